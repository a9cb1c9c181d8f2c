"""Samples to learn from: on each token, what a layer's predictor will see and which of the layer's neurons fired.

They are kept in memory-mapped files, one pair per layer and split, so that a model of any size can be sampled with the
memory of one batch: the input in BF16 (the residual stream of large models overflows F16), the firing mask as bits.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pi_toolkit.profiler.command_line import readable_bytes
from pi_toolkit.profiler.corpus import Split, documents, split_of
from pi_toolkit.profiler.errors import CorpusError
from pi_toolkit.profiler.hf_model import observe_ffn
from pi_toolkit.profiler.model_families import ModelShape
from pi_toolkit.profiler.record import verify_activation
from pi_toolkit.profiler.token_windows import token_windows, window_batches

if TYPE_CHECKING:
    import torch

SPLITS: tuple[Split, ...] = ("training", "calibration", "held-out")


@dataclass
class LayerSamples:
    """Samples of one layer and split: ``inputs`` bfloat16 [tokens, hidden], ``firing`` uint8 bits [tokens, ⌈neurons/8⌉].

    They stay in their files; batches of them are handed out on ``device``.
    """

    inputs: "torch.Tensor"
    firing: "torch.Tensor"
    neurons: int
    device: "torch.device"

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: "torch.Tensor | slice") -> "tuple[torch.Tensor, torch.Tensor]":
        """Inputs float32 [rows, hidden] and firing mask bool [rows, neurons]."""
        import torch

        bits = np.unpackbits(self.firing[rows].numpy(), axis=1, count=self.neurons, bitorder="little")
        return self.inputs[rows].to(self.device).float(), torch.from_numpy(bits).to(self.device).bool()

    def evenly(self, count: int) -> "torch.Tensor":
        """Inputs float32 [≤ *count*, hidden] of samples spread evenly over all of them."""
        step = -(-len(self) // count)
        return self.inputs[::step].to(self.device).float()

    def batches(self, size: int) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
        """All samples in order."""
        for start in range(0, len(self), size):
            yield self.batch(slice(start, start + size))


class SampleStore:
    """Samples of every layer in *directory*, room for *tokens* per split; filled by :func:`collect_samples`.

    Raises ``CorpusError`` when the disk has no room for them, ``OSError`` when another process takes the room meanwhile.
    """

    def __init__(self, directory: Path, shape: ModelShape, tokens: dict[Split, int], device: "torch.device") -> None:
        need, free = self.bytes_needed(shape, sum(tokens.values())), shutil.disk_usage(directory).free
        if need > free:
            raise CorpusError(
                f"{sum(tokens.values()):,} samples take {readable_bytes(need)} and the disk of {str(directory.parent)!r} has "
                f"{readable_bytes(free)} free: lower --tokens or free some space"
            )
        self.shape, self.device, self._filled = shape, device, dict.fromkeys(SPLITS, 0)
        self._samples = {
            split: [self._map(directory, split, layer, tokens[split]) for layer in range(shape.num_layers)]
            for split in SPLITS
        }

    @staticmethod
    def bytes_needed(shape: ModelShape, tokens: int) -> int:
        return tokens * sum(2 * shape.hidden_size + (neurons + 7) // 8 for neurons in shape.ffn_sizes)

    def room(self, split: Split) -> int:
        """Tokens that *split* can still take."""
        return len(self._samples[split][0]) - self._filled[split]

    def layer(self, split: Split, layer: int) -> LayerSamples:
        """What was collected for one layer."""
        samples, filled = self._samples[split][layer], self._filled[split]
        return LayerSamples(samples.inputs[:filled], samples.firing[:filled], samples.neurons, self.device)

    def splits(self, layer: int) -> tuple[LayerSamples, LayerSamples, LayerSamples]:
        """Training, calibration and held-out samples of one layer."""
        training, calibration, held_out = (self.layer(split, layer) for split in SPLITS)
        return training, calibration, held_out

    def tokens(self) -> int:
        """Samples of each layer over all splits."""
        return sum(self._filled.values())

    def put_input(self, split: Split, layer: int, inputs: "torch.Tensor") -> None:
        start = self._filled[split]
        self._samples[split][layer].inputs[start : start + len(inputs)] = inputs

    def put_firing(self, split: Split, layer: int, fires: "torch.Tensor") -> None:
        import torch

        bits = np.packbits(fires.cpu().numpy(), axis=1, bitorder="little")
        start = self._filled[split]
        self._samples[split][layer].firing[start : start + len(bits)] = torch.from_numpy(bits)

    def advance(self, split: Split, tokens: int) -> None:
        """Call after every layer has put its part of *tokens* tokens."""
        self._filled[split] += tokens

    def _map(self, directory: Path, split: Split, layer: int, tokens: int) -> LayerSamples:
        import torch

        hidden, neurons = self.shape.hidden_size, self.shape.ffn_sizes[layer]

        def mapped(kind: str, columns: int, dtype: torch.dtype) -> torch.Tensor:
            path = directory / f"{split}.{layer}.{kind}"
            reserve(path, tokens * columns * dtype.itemsize)
            return torch.from_file(str(path), shared=True, size=tokens * columns, dtype=dtype).view(tokens, columns)

        inputs, firing = mapped("inputs", hidden, torch.bfloat16), mapped("firing", (neurons + 7) // 8, torch.uint8)
        return LayerSamples(inputs, firing, neurons, self.device)


def reserve(path: Path, num_bytes: int) -> None:
    """Create *path* with *num_bytes* that are allocated on the disk, or raise ``OSError``.

    A file with holes has no such promise: when the disk is full, a write through its memory map kills the process.
    """
    unsupported = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
    with path.open("wb") as file:
        try:
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except AttributeError:  # macOS
                file.truncate(num_bytes)
            except OSError as error:
                if error.errno not in unsupported:
                    raise
                file.truncate(num_bytes)
        except OSError as error:
            error.filename = str(path)
            raise


def split_tokens(total: int) -> dict[Split, int]:
    """How many of *total* tokens each split gets: a tenth each to choose thresholds on and to report on."""
    tenth = max(1, total // 10)
    return {"training": max(1, total - 2 * tenth), "calibration": tenth, "held-out": tenth}


def collect_samples(
    model: Any,
    store: SampleStore,
    corpus: str,
    tokenizer: Any,
    window: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Fill *store* from *corpus*, document by document into its split.

    Raises ``CorpusError`` when a split stays empty, which happens with fewer than about twenty documents, and what
    :func:`verify_activation` does on the first window.
    """
    import torch

    for split in SPLITS:
        texts = (text for index, text in enumerate(documents(corpus)) if split_of(index) == split)
        windows = token_windows(texts, tokenizer, window, store.room(split))
        for batch in window_batches(windows, batch_size, store.shape.vocabulary_size):
            if not store.tokens():
                verify_activation(model, store.shape, batch[:1])

            def put_input(layer: int, inputs: torch.Tensor, split: Split = split) -> None:
                store.put_input(split, layer, inputs)

            def put_firing(layer: int, pre_activation: torch.Tensor, split: Split = split) -> None:
                store.put_firing(split, layer, pre_activation > store.shape.activation_threshold)

            with (
                torch.inference_mode(),
                observe_ffn(model, store.shape, predictor_input=put_input, pre_activation=put_firing),
            ):
                model.base_model(input_ids=batch.to(store.device), use_cache=False)
            store.advance(split, batch.numel())
            advance(batch.numel())
        if not len(store.layer(split, 0)):
            raise CorpusError(
                f"the corpus has no {split} document (of every 40, the first is held out and three calibrate): give one "
                "with at least 20 documents"
            )
