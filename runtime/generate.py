"""One prompt to one continuation: the prompt in pieces, then token by token."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pi_toolkit.profiler.errors import GenerationError

from .decoder import Decoder
from .sampling import Sampler

if TYPE_CHECKING:
    import torch

# Tokens of a prompt per step: bounds the memory of activations and masks; larger pieces are no faster on a CPU.
PROMPT_PIECE = 512


@dataclass
class Generation:
    """What came out, and how long prompt and decoding took. The first token is part of the prompt's time."""

    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prompt_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """0 when a single token was generated, which needs no decoding step."""
        steps = len(self.token_ids) - 1
        return steps / self.decode_seconds if steps > 0 else 0.0


def check_prompt(prompt_tokens: int, context: int) -> None:
    """Raise ``GenerationError`` unless at least one token fits behind the prompt."""
    if prompt_tokens == 0:
        raise GenerationError("the prompt is empty and the tokenizer adds no BOS token: give some text with -p")
    if prompt_tokens >= context:
        raise GenerationError(
            f"the prompt has {prompt_tokens} tokens and the context is {context}, which leaves no room for an answer: "
            "shorten the prompt, or raise --ctx where the model has more positions"
        )


def generate(
    decoder: Decoder,
    prompt_ids: list[int],
    new_tokens: int,
    sampler: Sampler,
    end_ids: frozenset[int] = frozenset(),
    on_token: Callable[[int], None] = lambda _: None,
) -> Generation:
    """Up to *new_tokens* tokens behind *prompt_ids*, in slot 0 of the decoder's cache.

    Stops after a token of *end_ids* (which is part of the result) and where the context is full. Calls *on_token* with
    each token as it is chosen. Raises ``GenerationError`` for a prompt that does not fit.
    """
    context = decoder.cache.context
    check_prompt(len(prompt_ids), context)
    result = Generation(prompt_tokens=len(prompt_ids))
    began = time.perf_counter()
    logits = read_prompt(decoder, prompt_ids)
    token = sampler(logits)
    result.prompt_seconds = time.perf_counter() - began
    result.token_ids.append(token)
    on_token(token)
    room = min(new_tokens, context - len(prompt_ids))
    while len(result.token_ids) < room and token not in end_ids:
        position = len(prompt_ids) + len(result.token_ids) - 1
        began = time.perf_counter()
        token = sampler(_step(decoder, [token], position))
        result.decode_seconds += time.perf_counter() - began
        result.token_ids.append(token)
        on_token(token)
    return result


def read_prompt(decoder: Decoder, prompt_ids: list[int]) -> "torch.Tensor":
    """Fill slot 0 with the prompt; logits float32 [vocabulary] behind its last token."""
    for first in range(0, len(prompt_ids), PROMPT_PIECE):
        logits = _step(decoder, prompt_ids[first : first + PROMPT_PIECE], first)
    return logits


def _step(decoder: Decoder, tokens: list[int], first: int) -> "torch.Tensor":
    import torch

    positions = torch.arange(first, first + len(tokens))
    return decoder.step(torch.tensor([tokens]), positions[None], torch.zeros(1, dtype=torch.int64))[0]
