"""Whether the dense model predicts text at all. If not, no comparison with it means anything.

A model whose activation, embedding, tokenizer or weights are not those it was trained with still computes numbers, only
absurd ones. Two bounds need no threshold to be chosen: a model that knows nothing has the perplexity of its vocabulary's
size, and one that knows only how frequent each token of this text is has that of the text's token frequencies.
"""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .decoder import Decoder
from .eval_windows import ScoredWindow
from .perplexity import compare, of_decoder

if TYPE_CHECKING:
    from pi_toolkit.profiler.model_families import Activation

# With fewer tokens most occur once, and their frequencies are better known than any model could know them.
FEW_TOKENS = 1000
WINDOWS_TO_TRY = 2
MUCH_BETTER = 0.5  # of the perplexity: no rounding or luck changes it that much
SAME = 0.05  # relative difference from the reference


def find_alarm(
    decoder: Decoder, perplexity: float, windows: Sequence[ScoredWindow], reference: float | None = None
) -> str | None:
    """One sentence that ends in a remedy when *perplexity*, that of mode dense on *windows*, is absurd; else None.

    *reference* is what ``transformers`` made of the same windows, if it was asked.
    """
    vocabulary, frequencies = decoder.shape.vocabulary_size, frequency_perplexity(windows)
    if not math.isfinite(perplexity):
        complaint = f"the dense model computes no finite perplexity ({perplexity})"
    elif perplexity > vocabulary:
        complaint = (
            f"the dense model's perplexity of {perplexity:,.0f} is above its vocabulary of {vocabulary:,}, which is worse "
            "than guessing"
        )
    elif frequencies is not None and perplexity > frequencies:
        complaint = (
            f"the dense model's perplexity of {perplexity:,.0f} is above the {frequencies:,.0f} of knowing no more than how "
            "frequent each token of this text is"
        )
    else:
        return None
    if better := _better_activation(decoder, windows):
        activation, instead = better
        return (
            f"{complaint}, and with the activation {activation} in place of {decoder.shape.activation} it would be "
            f"{instead:,.0f} on the first windows: put that into the model's config, or use a model that was trained with "
            f"{decoder.shape.activation}"
        )
    return f"{complaint}{_explain(perplexity, reference)}"


def _explain(perplexity: float, reference: float | None) -> str:
    if reference is None:
        return (
            ": config, tokenizer and weights are probably not of one model, or the text is not what it was trained on; "
            "compare with --reference, and download or convert the model again"
        )
    if abs(reference - perplexity) <= SAME * perplexity:
        return (
            ", and transformers agrees, so that config, tokenizer and weights are probably not of one model: download or "
            "convert it again, or give a text like those it was trained on"
        )
    return f", where transformers has {reference:,.1f} for the reference: convert the model from that again"


def frequency_perplexity(windows: Sequence[ScoredWindow]) -> float | None:
    """Perplexity of the predicted tokens under their own frequencies; None where they are too few to tell."""
    counts = Counter(token for window in windows for token in window.token_ids[window.first_scored + 1 :])
    total = counts.total()
    if total < FEW_TOKENS:
        return None
    return math.exp(-sum(count / total * math.log(count / total) for count in counts.values()))


def _better_activation(decoder: Decoder, windows: Sequence[ScoredWindow]) -> "tuple[Activation, float] | None":
    """The plain activation that makes the perplexity of the first windows far better than the model's own does."""
    plain: tuple[Activation, ...] = ("relu", "silu", "gelu")
    candidates = [decoder.shape.known_activation(), *(other for other in plain if other != decoder.shape.activation)]
    found = {}
    for activation in candidates:
        model = of_decoder(_with_activation(decoder, activation))
        scores = compare({activation: model}, windows[:WINDOWS_TO_TRY], 1, decoder.shape.vocabulary_size)
        found[activation] = scores[activation].perplexity
    best = min(found, key=found.__getitem__)
    return (best, found[best]) if found[best] < MUCH_BETTER * found[candidates[0]] else None


def _with_activation(decoder: Decoder, activation: "Activation") -> Decoder:
    """A dense twin over the same weights and cache whose neurons compute *activation*."""
    layers = []
    for layer in decoder.weights.layers:
        tiers = layer.ffn.tiers
        if activation != decoder.shape.activation:
            tiers = tuple(replace(tier, activation=activation, activation_threshold=0.0) for tier in tiers)
        layers.append(replace(layer, ffn=replace(layer.ffn, tiers=tiers)))
    twin = copy.copy(decoder)
    twin.mode, twin.weights = "dense", replace(decoder.weights, layers=tuple(layers))
    twin.native = twin.gpu = None
    return twin
