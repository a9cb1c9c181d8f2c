"""Choosing the next token from logits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingOptions:
    """``temperature`` 0 takes the most likely token; otherwise one is drawn among the ``top_k`` most likely (0: all) that
    together hold ``top_p`` of the probability."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Sampler:
    """Draws tokens; the same seed and logits give the same tokens."""

    def __init__(self, options: SamplingOptions) -> None:
        import torch

        self._options = options
        self._generator = torch.Generator().manual_seed(options.seed)

    def __call__(self, logits: "torch.Tensor") -> int:
        """A token id from *logits* float32 [vocabulary]."""
        import torch

        options = self._options
        if options.temperature == 0:
            return int(logits.argmax())
        logits = logits.cpu()
        # Against the largest logit, because a tiny temperature would make infinities of both and nothing of their difference.
        ordered, order = ((logits - logits.max()) / options.temperature).sort(descending=True, stable=True)
        if options.top_k:
            ordered = ordered[: options.top_k]
        shares = ordered.softmax(dim=0)
        excluded = shares.cumsum(dim=0) - shares >= options.top_p
        excluded[0] = False  # the most likely token remains, however small top_p is
        shares = shares.masked_fill(excluded, 0.0)
        return int(order[torch.multinomial(shares, 1, generator=self._generator)])
