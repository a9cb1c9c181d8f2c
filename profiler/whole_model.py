"""Passes of a model that fits into memory: a batch of windows at a time where that is exact, else window by window.

A product of 4096 rows may add in another order than one of 512, and a neuron at the edge of firing then fires or not by
the batch it is in. Whether it does depends on the machine's kernels and the shapes, not on the numbers. So the first full
batch goes through the model together and window by window; unless every bit is the same, all windows go one by one.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .hf_model import load_hf_model, observe_ffn
from .model_families import ModelShape
from .record import FiringCounter, verify_activation
from .window_batch import WindowBatch

if TYPE_CHECKING:
    import torch


class WholeModel:
    """An :class:`.record.Execution` of a model from :func:`load_hf_model`.

    The first batch also proves the activation: see :func:`verify_activation` for what is raised.
    """

    batches_per_round = 1

    def __init__(self, model: Any, shape: ModelShape) -> None:
        self._model, self._shape = model, shape
        self.device: torch.device = next(model.parameters()).device
        self._verified = False
        self._exact_together: dict[tuple[int, int], bool] = {}

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: "torch.device", dtype: "torch.dtype") -> "WholeModel":
        """The model of *checkpoint* with its ``transformers`` code."""
        return cls(load_hf_model(checkpoint, device, dtype), checkpoint.shape)

    def steps(self, batches: Sequence[WindowBatch], counter: FiringCounter) -> Iterator[int]:
        import torch

        for batch in batches:
            if not self._verified:
                verify_activation(self._model, self._shape, batch.ids()[:1])
                self._verified = True
            together = self._is_exact_together(batch)
            with torch.inference_mode(), observe_ffn(self._model, self._shape, pre_activation=counter.count):
                for part in [batch] if together else batch.one_by_one():
                    counter.expect(part)
                    self._pass(part)
            yield batch.tokens

    def state(self) -> "dict[str, torch.Tensor]":
        return {}

    def restore(self, state: "dict[str, torch.Tensor]") -> None:
        pass

    def _pass(self, batch: WindowBatch) -> "torch.Tensor":
        """The last hidden states, [windows, window, hidden]."""
        return self._model.base_model(input_ids=batch.ids().to(self.device), use_cache=False).last_hidden_state

    def _is_exact_together(self, batch: WindowBatch) -> bool:
        """Whether batches of this size give the bits of their windows alone; tried once per size, on *batch*."""
        import torch

        size = len(batch.windows), len(batch.windows[0])
        if size[0] == 1:
            return True
        if size not in self._exact_together:
            with torch.inference_mode():
                rows = iter(self._pass(batch))
                alone = sorted(batch.one_by_one(), key=lambda window: window.halves)  # as in the rows of the batch
                self._exact_together[size] = all(torch.equal(next(rows), self._pass(window)[0]) for window in alone)
        return self._exact_together[size]
