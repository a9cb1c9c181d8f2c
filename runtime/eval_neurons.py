"""Which neurons fire and which the predictors name, layer by layer, while the model runs.

Candidates are compared with what really fires given the same input of that layer, so a layer is not blamed for what
earlier ones left out. The counts are taken on the decoder's torch path, see :mod:`.bench_replay`; where the native step
generates text, the tokens it chose are run through that path once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi_toolkit.predictor_training.predictor import Quality

from .bench_replay import activity, replay
from .decoder import Decoder
from .eval_windows import ScoredWindow
from .generate import generate
from .kernels.sparse_ffn_reference import Mode
from .placed_ffn import PlacedFfn
from .sampling import Sampler, SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class NeuronCounts:
    """Sums per layer over every token shown to :meth:`observe`, the last ``last`` of each call where that is set.

    In modes without predictors a neuron is a candidate if it fires.
    """

    def __init__(self, layers: int) -> None:
        self._sums = [[0, 0, 0, 0] for _ in range(layers)]
        self.last: int | None = None

    def observe(self, layer: int, ffn: PlacedFfn, normed: "torch.Tensor", residual: "torch.Tensor", mode: Mode) -> None:
        """Count one call of one layer's FFN, of which *normed* and *residual* [tokens, hidden] are the inputs."""
        first = 0 if self.last is None else len(normed) - self.last
        for seen in activity(ffn, normed[first:], residual[first:], mode):
            fires = seen.fires
            named = seen.named if mode == "predicted" else fires
            found = [fires.numel(), *(int(mask.sum()) for mask in (fires, named, fires & named))]
            self._sums[layer] = [total + more for total, more in zip(self._sums[layer], found, strict=True)]

    def qualities(self) -> list[Quality]:
        """Of every layer; empty where no token was shown."""
        return [Quality(*sums) for sums in self._sums] if self._sums[0][0] else []


@dataclass(frozen=True)
class GenerationOptions:
    """Greedy continuations of ``prompts`` prompts, the first ``prompt_tokens`` of windows evenly spread over the text, with
    ``bos_id`` in the place of the first token where it is not None, because ``pi-run``'s prompts begin with it."""

    prompts: int
    prompt_tokens: int
    new_tokens: int
    bos_id: int | None = None


def count_while_generating(
    decoder: Decoder,
    windows: Sequence[ScoredWindow],
    options: GenerationOptions,
    end_ids: frozenset[int],
    advance: "Callable[[int], None]" = lambda _: None,
) -> tuple[NeuronCounts, int]:
    """Counts over the decoding steps, each of which reads one generated token, and the number of those steps.

    Calls *advance* once per prompt.
    """
    counts, steps = NeuronCounts(decoder.shape.num_layers), 0
    for window in spread(windows, options.prompts):
        prompt = list(window.token_ids[: options.prompt_tokens])
        if options.bos_id is not None:
            prompt[0] = options.bos_id
        text = generate(decoder, prompt, options.new_tokens + 1, Sampler(SamplingOptions()), end_ids).token_ids
        counts.last = len(text) - 1  # the first came out of the prompt, the last was not read
        if counts.last:
            replay(decoder, prompt + text[:-1], counts.observe)
        steps += counts.last
        advance(1)
    return counts, steps


def spread(windows: Sequence[ScoredWindow], count: int) -> list[ScoredWindow]:
    """Up to *count* of *windows*, evenly spread."""
    count = min(count, len(windows))
    return [windows[index * len(windows) // count] for index in range(count)]
