"""How likely a model finds a continuation of a context: what multiple-choice questions are answered by.

Contexts and continuations become tokens as in lm-eval's own models, so that figures can be compared: both are tokenised
together, and the continuation's tokens are those behind as many as the context has alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pi_toolkit.profiler.errors import GenerationError

from .decoder import Decoder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pair:
    """Token ids of a context, at least one, and of what follows it, at least one."""

    context: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Likelihood:
    """Natural logarithm of the continuation's probability, and whether greedy decoding would write it."""

    log_probability: float
    is_greedy: bool


def prefix_id(tokenizer: Any) -> int:
    """What stands before a text that has no context: BOS, or EOS without one; raises ``GenerationError`` without either."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise GenerationError(
        "the tokenizer knows neither BOS nor EOS, one of which an empty context needs: give a context"
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids, with the special tokens that the tokenizer adds by itself unless *text* begins with BOS."""
    begins = tokenizer.decode([prefix_id(tokenizer)])
    return tokenizer(text, add_special_tokens=not (begins and text.startswith(begins)))["input_ids"]


def encode_pair(tokenizer: Any, context: str, continuation: str) -> Pair:
    """Spaces at the end of the context belong to the continuation, because words begin with them."""
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    if not stripped:
        ids = tokenizer(continuation, add_special_tokens=False)["input_ids"]
        first = prefix_id(tokenizer)
        return Pair([first], ids[1:] if ids[:1] == [first] else ids)
    before, whole = encode(tokenizer, stripped), encode(tokenizer, stripped + continuation)
    return Pair(before, whole[len(before) :])


def shortened(pair: Pair, limit: int) -> Pair:
    """*pair* if its continuation fits into *limit* positions, else the last *limit* tokens of it behind the one before."""
    if len(pair.continuation) <= limit:
        return pair
    return Pair(pair.continuation[-limit - 1 : -limit], pair.continuation[-limit:])


def log_likelihoods(
    decoder: Decoder, pairs: Sequence[Pair], advance: Callable[[int], None] = lambda _: None
) -> list[Likelihood]:
    """Of every pair, in order; as many at once as the decoder has slots. Calls *advance* with the pairs that are done.

    Contexts too long for the decoder lose their beginning. Raises ``GenerationError`` for a continuation that is too long
    itself, and for an empty one.
    """
    limit, slots = decoder.cache.context, len(decoder.cache.keys[0])
    for pair in pairs:
        if not 0 < len(pair.continuation) <= limit:
            raise GenerationError(
                f"a continuation has {len(pair.continuation)} tokens and the context {limit} positions: give one of at least "
                "one token, and none longer than the context"
            )
    # Longest first, so that those of a batch need little padding and a lack of memory shows at once.
    order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index].context) - len(pairs[index].continuation))
    found: dict[int, Likelihood] = {}
    for first in range(0, len(order), slots):
        indices = order[first : first + slots]
        found.update(zip(indices, _batch(decoder, [pairs[index] for index in indices], limit), strict=True))
        advance(len(indices))
    return [found[index] for index in range(len(pairs))]


def _batch(decoder: Decoder, pairs: list[Pair], limit: int) -> Iterator[Likelihood]:
    """A row each, padded behind its end, where no earlier token sees it."""
    import torch

    rows = [(pair.context + pair.continuation)[-(limit + 1) : -1] for pair in pairs]
    tokens = max(map(len, rows))
    ids = torch.tensor([row + [0] * (tokens - len(row)) for row in rows])
    positions = torch.arange(tokens).expand(len(rows), tokens)
    states = decoder.hidden_states(ids, positions, torch.arange(len(rows)))
    for row, pair, state in zip(rows, pairs, states, strict=True):
        yield _likelihood(decoder.logits(state[len(row) - len(pair.continuation) : len(row)]), pair.continuation)


def _likelihood(logits: "torch.Tensor", continuation: list[int]) -> Likelihood:
    """From float32 [continuation, vocabulary], the logits that predict each token of it."""
    import torch

    targets = torch.tensor(continuation, device=logits.device)
    chosen = logits.log_softmax(dim=-1).gather(1, targets[:, None])
    return Likelihood(float(chosen.sum()), bool((logits.argmax(dim=-1) == targets).all()))
