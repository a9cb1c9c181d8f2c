"""Samples to learn from: on each token, what a layer's predictor will see and which of the layer's neurons fired.

They are kept in memory-mapped files, one pair per layer and split, so that a model of any size can be sampled with the
memory of one batch: the input in BF16 (the residual stream of large models overflows F16), the firing mask as bits.
"""

import errno
import hashlib
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
from pi_toolkit.profiler.processes import Processes
from pi_toolkit.profiler.progress_file import ProgressError, ProgressFile
from pi_toolkit.profiler.record import verify_activation
from pi_toolkit.profiler.token_windows import token_windows, window_batches
from pi_toolkit.profiler.window_batch import other_text

if TYPE_CHECKING:
    import torch

COUNT_ROWS = 4096  # samples whose firings are counted at once
BITS_SET = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint8)
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

    def firing_share(self) -> float:
        """Share of the neurons that fires, over all samples."""
        firings = sum(
            int(BITS_SET[self.firing[start : start + COUNT_ROWS].numpy()].sum(dtype=np.int64))
            for start in range(0, len(self), COUNT_ROWS)
        )
        return firings / (len(self) * self.neurons)

    def batches(self, size: int) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
        """All samples in order."""
        for start in range(0, len(self), size):
            yield self.batch(slice(start, start + size))


class SampleStore:
    """Samples of every layer in *directory*, filled by :func:`collect_samples`.

    *tokens* pass by per split, and evenly spread ones are kept, at most *samples* of them (default: all). With *existing*
    the files of another process, or of an earlier one, are opened as they are. Raises ``CorpusError`` when the disk has no
    room for them, ``OSError`` when another process takes the room meanwhile, ``ProgressError`` when existing files are not
    what they were.
    """

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        tokens: dict[Split, int],
        device: "torch.device",
        samples: dict[Split, int] | None = None,
        existing: bool = False,
    ) -> None:
        self.shape, self.device, self._tokens = shape, device, tokens
        self._seen = dict.fromkeys(SPLITS, 0)
        self._kept = {split: min(tokens[split], (samples or tokens)[split]) for split in SPLITS}
        need, free = self.bytes_needed(shape, sum(self._kept.values())), shutil.disk_usage(directory).free
        if need > free and not existing:
            raise CorpusError(
                f"{sum(self._kept.values()):,} samples take {readable_bytes(need)} and the disk of {str(directory.parent)!r} "
                f"has {readable_bytes(free)} free: lower --samples or --tokens, or free some space"
            )
        self._samples = {
            split: [
                self._map(directory, split, layer, self._kept[split], existing) for layer in range(shape.num_layers)
            ]
            for split in SPLITS
        }

    @staticmethod
    def bytes_needed(shape: ModelShape, tokens: int) -> int:
        return tokens * sum(2 * shape.hidden_size + (neurons + 7) // 8 for neurons in shape.ffn_sizes)

    def room(self, split: Split) -> int:
        """Tokens that *split* can still take."""
        return self._tokens[split] - self._seen[split]

    def _index(self, split: Split, token: int) -> int:
        """How many samples the first *token* tokens of *split* leave."""
        return token * self._kept[split] // self._tokens[split]

    def layer(self, split: Split, layer: int) -> LayerSamples:
        """What was collected for one layer."""
        samples, filled = self._samples[split][layer], self._index(split, self._seen[split])
        return LayerSamples(samples.inputs[:filled], samples.firing[:filled], samples.neurons, self.device)

    def splits(self, layer: int) -> tuple[LayerSamples, LayerSamples, LayerSamples]:
        """Training, calibration and held-out samples of one layer."""
        training, calibration, held_out = (self.layer(split, layer) for split in SPLITS)
        return training, calibration, held_out

    def tokens(self) -> int:
        """Tokens that passed by, over all splits."""
        return sum(self._seen.values())

    def samples(self) -> int:
        """Samples of each layer over all splits."""
        return sum(self._index(split, self._seen[split]) for split in SPLITS)

    def kept_rows(self, split: Split, start: int, end: int) -> tuple[slice, "torch.Tensor"]:
        """Of the tokens *start* … *end* of *split*: where samples of them lie, and which of these tokens they are."""
        import torch

        token = torch.arange(start, end + 1, dtype=torch.int64)
        before = token * self._kept[split] // self._tokens[split]
        return slice(int(before[0]), int(before[-1])), (before[1:] > before[:-1]).nonzero().flatten()

    def put_input(self, split: Split, layer: int, place: slice, inputs: "torch.Tensor") -> None:
        self._samples[split][layer].inputs[place] = inputs.to(self._samples[split][layer].inputs)

    def put_firing(self, split: Split, layer: int, place: slice, fires: "torch.Tensor") -> None:
        import torch

        bits = np.packbits(fires.cpu().numpy(), axis=1, bitorder="little")
        self._samples[split][layer].firing[place] = torch.from_numpy(bits)

    def advance(self, split: Split, tokens: int) -> None:
        """Call after every layer has put its part of *tokens* tokens."""
        self._seen[split] += tokens

    def _map(self, directory: Path, split: Split, layer: int, rows: int, existing: bool) -> LayerSamples:
        import torch

        hidden, neurons = self.shape.hidden_size, self.shape.ffn_sizes[layer]

        def mapped(kind: str, columns: int, dtype: torch.dtype) -> torch.Tensor:
            path, num_bytes = directory / f"{split}.{layer}.{kind}", rows * columns * dtype.itemsize
            if not existing:
                reserve(path, num_bytes)
            elif not path.is_file() or path.stat().st_size != num_bytes:  # torch would fill it up with zeros
                raise ProgressError(
                    f"{str(path)!r} is missing or not as it was saved: run the command again without --resume"
                )
            return torch.from_file(str(path), shared=True, size=rows * columns, dtype=dtype).view(rows, columns)

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


def open_store(
    directory: Path,
    shape: ModelShape,
    tokens: dict[Split, int],
    samples: dict[Split, int],
    device: "torch.device",
    processes: Processes,
    existing: bool,
) -> SampleStore:
    """The store that all *processes* fill: the first makes it unless it is *existing*, then the others open it."""
    store = SampleStore(directory, shape, tokens, device, samples, existing) if processes.is_first else None
    processes.wait(device)  # until the first process has made it
    return store or SampleStore(directory, shape, tokens, device, samples, existing=True)


def split_tokens(total: int, kind: str = "mlp") -> dict[Split, int]:
    """How many of *total* tokens each split gets: a tenth each to choose thresholds on and to report on, and the rest, which
    predictors of *kind* copy do without, to train on."""
    tenth = max(1, total // 10)
    training = 1 if kind == "copy" else max(1, total - 2 * tenth)
    return {"training": training, "calibration": tenth, "held-out": tenth}


def collect_samples(
    model: Any,
    store: SampleStore,
    corpus: str,
    tokenizer: Any,
    window: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda _: None,
    processes: Processes | None = None,
    done: ProgressFile | None = None,
    position: dict[str, Any] | None = None,
) -> str:
    """Fill *store* from *corpus*, document by document into its split; returns a digest of all token ids.

    Several *processes* with the same files take turns batch by batch. How far this one is goes to *done*; batches before
    *position*, read from there, were put by an earlier run. Raises ``CorpusError`` when a split stays empty, which happens
    with fewer than about twenty documents, ``ProgressError`` when the earlier run read another text, and what
    :func:`verify_activation` does on the first window.
    """
    processes, before = processes or Processes(), dict(position or {})
    digest_before, digest = before.pop("digest", None), hashlib.blake2b(digest_size=16)
    passed: dict[str, int] = dict.fromkeys(SPLITS, 0)
    verified = False
    for split in SPLITS:
        texts = (text for index, text in enumerate(documents(corpus)) if split_of(index) == split)
        windows = token_windows(texts, tokenizer, window, store.room(split))
        for number, batch in enumerate(window_batches(windows, batch_size, store.shape.vocabulary_size)):
            seen, mine = passed[split], number % processes.count == processes.rank
            digest.update(batch.numpy().tobytes())
            passed[split] += batch.numel()
            if mine and seen >= before.get(split, 0):
                if not verified:
                    verify_activation(model, store.shape, batch[:1])
                    verified = True
                _put_batch(model, store, split, seen, batch)
                if done and done.due():
                    done.save({}, {**passed, "digest": digest.hexdigest()})
            elif passed == before and digest.hexdigest() != digest_before:
                raise other_text()
            store.advance(split, batch.numel())
            advance(batch.numel())
        if passed[split] < before.get(split, 0):
            raise other_text()
        if not len(store.layer(split, 0)):
            raise CorpusError(
                f"the corpus has no {split} document (of every 40, the first is held out and three calibrate): give one "
                "with at least 20 documents (in a .txt file blank lines separate them)"
            )
    return digest.hexdigest()


def _put_batch(model: Any, store: SampleStore, split: Split, start: int, batch: "torch.Tensor") -> None:
    """Run the model over *batch*, which begins at token *start* of *split*, and keep what its layers see."""
    import torch

    place, rows = store.kept_rows(split, start, start + batch.numel())
    if not len(rows):
        return
    rows = rows.to(store.device)

    def put_input(layer: int, inputs: torch.Tensor) -> None:
        store.put_input(split, layer, place, inputs[rows])

    def put_firing(layer: int, pre_activation: torch.Tensor) -> None:
        store.put_firing(split, layer, place, pre_activation[rows] > store.shape.activation_threshold)

    with (
        torch.inference_mode(),
        observe_ffn(model, store.shape, predictor_input=put_input, pre_activation=put_firing),
    ):
        model.base_model(input_ids=batch.to(store.device), use_cache=False)
