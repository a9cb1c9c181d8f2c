"""A model file, PowerInfer's ``.powerinfer.gguf`` or llama.cpp's dense ``.gguf``, read by the toolkit's roles.

It answers what :class:`.checkpoint.Checkpoint` answers – ``shape``, ``shared``, ``attention``, ``layer``,
``neuron_rows``, ``dtype``, ``fingerprint`` – and, besides, what only a file has in it: predictors, their threshold, the
tokenizer. F32, F16 and BF16 come as memory-mapped tensors, Q4_0 and Q8_0 as :class:`QuantisedMatrix` over the mapped
blocks, every other quantised type dequantised to float32, one tensor at a time. The pages of a tensor leave the memory
when the next one is asked for, so that loading needs no more than the result. The layout is described in
:mod:`.model_gguf_layout`.
"""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import gguf_container
from .command_line import note
from .errors import GgufError
from .fingerprint_samples import ask_for_samples, samples
from .gguf_container import TensorType, ValueType
from .model_gguf_layout import (
    OURS,
    VERSION,
    interleaved_rows,
    layer_name,
    predictor_names,
    read_shape,
    shared_name,
    stored_layer_shapes,
)
from .quantisation import (
    KINDS,
    QuantisedKind,
    QuantisedMatrix,
    SelectedRows,
    TurnedMatrix,
    dense,
    dequantise,
    quantisable,
    select_rows,
)

if TYPE_CHECKING:
    import torch

    Weight = torch.Tensor | QuantisedMatrix
    Rows = Weight | TurnedMatrix | SelectedRows

_REMEDY = "make or download the file again"
_FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)


def is_model_file(model: str | Path) -> bool:
    """Whether *model* is meant as a file of this kind rather than as a directory or hub id."""
    return str(model).endswith(".gguf") and not Path(model).is_dir()


class GgufModel:
    """One model file; *activation* replaces what is assumed where the file does not state its activation.

    Raises ``GgufError`` for a damaged container, an unknown architecture, and tensors that are missing, unknown, or of
    another shape than the keys say. ``num_predictors`` is the number of layers, or 0 in a file without predictors;
    ``copy_thresholds`` has those of the layers whose predictor is a copy of their rows.
    """

    def __init__(self, path: Path, activation: str | None = None) -> None:
        self.path, self.magic = path, gguf_container.read_magic(path)
        self.file = gguf_container.read(path, self.magic)
        self._last_read: str | None = None
        try:
            self._check_version()
            self.shape = read_shape(self.file, self.magic, activation)
            self.copy_thresholds = self._read_copy_thresholds()
            self.num_predictors = self._count_predictors()
            self._check_tensors()
            self.threshold = self._read_threshold()
        except GgufError as error:
            raise GgufError(f"{str(path)!r}: {error.message}") from None

    @property
    def directory(self) -> Path:
        """Where the tokenizer is: the file itself."""
        return self.path

    @property
    def files(self) -> list[Path]:
        """The file that holds the weights."""
        return [self.path]

    @property
    def name(self) -> str:
        """``general.name``, or the file's without its endings."""
        stated = self.file.key_values.get("general.name")
        plain = stated is not None and isinstance(stated.value, str) and re.fullmatch(r"[\w.+-]+", stated.value)
        return stated.value if plain else self.path.name.removesuffix(".gguf").removesuffix(".powerinfer")  # type: ignore[union-attr]

    @property
    def states_activation(self) -> bool:
        """Whether the file itself says what its neurons compute."""
        return f"{OURS}activation" in self.file.key_values

    def shared(self, role: str) -> "Weight":
        """A tensor outside the layers; the tied output head is the embedding."""
        if role == "head.weight" and self.shape.tied_embeddings:
            role = "embedding.weight"
        return self._read(shared_name(role))

    def attention(self, layer: int) -> "dict[str, Weight]":
        """All attention tensors of *layer* and the attention norm."""
        roles = self.shape.attention_shapes()
        tensors: dict[str, Weight] = {}
        if self.shape.family == "falcon":
            fused, first = self._read(self._name(layer, "fused_qkv.weight")), 0
            for role in ("query.weight", "key.weight", "value.weight"):
                end = first + roles[role][0]
                tensors[role] = fused.rows(first, end) if isinstance(fused, QuantisedMatrix) else fused[first:end]
                first = end
        return tensors | {role: self.layer(layer, role) for role in roles if role not in tensors}

    def attention_rows(self, layer: int) -> "dict[str, Rows]":
        """The same with rows that are to be exchanged described in place of copied."""
        if self.shape.family == "falcon":
            return dict(self.attention(layer))
        tensors: dict[str, Rows] = {}
        for role in self.shape.attention_shapes():
            order = interleaved_rows(self.shape, role) if role.endswith(".weight") else None
            if order is None:
                tensors[role] = self.layer(layer, role)
            else:
                tensors[role] = select_rows(self._read(self._name(layer, role)), order.argsort())
        return tensors

    def layer(self, layer: int, role: str) -> "Weight":
        """One tensor of *layer* that is stored under a name of its own, rows and columns as in a checkpoint.

        A down matrix that is stored transposed comes as floating point.
        """
        tensor = self._read(self._name(layer, role))
        if role == "down.weight" and self.magic == "PWRI":
            return dense(tensor).T
        stored_order = interleaved_rows(self.shape, role)
        if stored_order is None:
            return tensor
        order = stored_order.argsort()
        return tensor.select(order) if isinstance(tensor, QuantisedMatrix) else tensor[order]

    def neuron_rows(self, layer: int, role: str) -> "Weight | TurnedMatrix":
        """``gate``, ``up`` or ``down`` of *layer* by neuron, [neurons, hidden]; as stored, but for a down that is turned."""
        if role != "down.weight":
            return self.layer(layer, role)
        tensor = self._read(self._name(layer, role))
        return tensor if self.magic == "PWRI" else tensor.T

    def predictor(self, layer: int) -> "tuple[Weight, Weight]":
        """``fc1`` [r, hidden] and ``fc2`` [neurons, r] of *layer*."""
        fc1, fc2 = predictor_names(layer)
        return self._read(fc1), self._read(fc2)

    def predictor_sizes(self) -> list[int | Literal["copy"]] | None:
        """Width r of each layer's predictor, or that it is a copy; None in a file without them."""
        return [self._predictor_size(layer) for layer in range(self.num_predictors)] or None

    def _predictor_size(self, layer: int) -> int | Literal["copy"]:
        return "copy" if layer in self.copy_thresholds else self.file.tensors[predictor_names(layer)[0]].shape[0]

    def dtype(self) -> "torch.dtype":
        """The floating type nearest to what the FFN weights are stored in: F16 for quantised ones."""
        import torch

        tensor_type = self.file.tensors[self._name(0, "up.weight")].type
        return {TensorType.F32: torch.float32, TensorType.BF16: torch.bfloat16}.get(tensor_type, torch.float16)

    def quantised_kind(self) -> QuantisedKind | None:
        """The block type of the FFN weights, where it is one that kernels know."""
        return KINDS.get(self.file.tensors[self._name(0, "up.weight")].type)

    @cached_property
    def stated_fingerprint(self) -> str | None:
        """The fingerprint of the model that the file was made from; None in files that others wrote."""
        if f"{OURS}fingerprint" not in self.file.key_values:
            return None
        stated = self.file.value(f"{OURS}fingerprint", ValueType.STRING)
        if not re.fullmatch(r"[0-9a-f]{64}", stated):
            raise GgufError(f"{str(self.path)!r} states a fingerprint of other than 64 digits: {_REMEDY}")
        return stated

    def fingerprint(self) -> str:
        """The stated one, else one over the shape and, of each tensor as stored, name, type, shape and three samples."""
        return self.stated_fingerprint or self._own_fingerprint

    @cached_property
    def _own_fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self.shape.to_json(), sort_keys=True).encode())
        views = map(self.file.data, self.file.tensors)
        ask_for_samples((view.ctypes.data, view.nbytes) for view in views)
        for name, info in sorted(self.file.tensors.items()):
            digest.update(f"{name}|{info.type.name}|{list(info.shape)}|".encode())
            data = self.file.data(name).reshape(-1).view(np.uint8)
            for sample in samples(len(data)):
                digest.update(data[sample].tobytes())
        return digest.hexdigest()

    def end_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        several = self.file.key_values.get(f"{OURS}end_token_ids")
        if several is not None and several.item_type == ValueType.U32:
            return frozenset(several.value.tolist())
        one = self.file.key_values.get("tokenizer.ggml.eos_token_id")
        if one is not None and one.type == ValueType.U32:
            return frozenset([one.value])
        return frozenset()

    def tokenizer(self) -> Any:
        """The file's tokenizer as a ``transformers`` fast tokenizer."""
        from .gguf_tokenizer import load_tokenizer

        return load_tokenizer(self.file, str(self.path))

    def drop_pages(self) -> None:
        """Take all that was read out of this process's memory; what was handed out is read from the file again."""
        self.file.drop_pages()

    def _name(self, layer: int, role: str) -> str:
        return layer_name(self.shape, self.magic, layer, role)

    def _read(self, name: str) -> "Weight":
        import torch

        if self._last_read is not None and self._last_read != name:
            self.file.drop_pages(self._last_read)
        self._last_read = name
        info, data = self.file.tensors[name], self.file.data(name)
        if info.type in KINDS:
            return QuantisedMatrix(KINDS[info.type], (info.shape[0], info.shape[1]), data)
        if info.type not in _FLOATS:
            return dequantise(data, info.type, torch.float32)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensor = torch.from_numpy(data)
        return tensor.view(torch.bfloat16) if info.type == TensorType.BF16 else tensor

    def _check_version(self) -> None:
        if f"{OURS}version" in self.file.key_values:
            version = self.file.value(f"{OURS}version", ValueType.U32)
            if version != VERSION:
                raise GgufError(
                    f"has toolkit version {version} and this release reads {VERSION}: convert the model again"
                )

    def _count_predictors(self) -> int:
        copies = self.copy_thresholds
        present = [
            predictor_names(layer)[0] in self.file.tensors or layer in copies for layer in range(self.shape.num_layers)
        ]
        if any(present) and self.magic == "GGUF":
            raise GgufError(f"has predictors in a dense file: {_REMEDY}")
        if any(present) and not all(present):
            raise GgufError(f"has predictors of {sum(present)} of its {len(present)} layers: {_REMEDY}")
        return len(present) if all(present) else 0

    def _check_tensors(self) -> None:
        """Every tensor that the shape asks for is there in that shape, and no other; stops at the first that is not."""
        expected = set()
        for name, size in self._expected_tensors():
            expected.add(name)
            info = self.file.tensors.get(name)
            if info is None:
                raise GgufError(f"has no tensor {name!r}: {_REMEDY}")
            if info.shape != size:
                raise GgufError(f"tensor {name!r} is {list(info.shape)} where the keys ask for {list(size)}: {_REMEDY}")
            if info.type == TensorType.I32 or (len(size) == 1 and info.type not in _FLOATS):
                raise GgufError(f"tensor {name!r} is stored as {info.type.name}, which its role cannot be: {_REMEDY}")
        if unknown := sorted(set(self.file.tensors) - expected):
            raise GgufError(f"has tensors that are not understood ({', '.join(unknown[:3])}): use a model without them")

    def _expected_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        shape = self.shape
        for role, size in shape.shared_shapes().items():
            yield shared_name(role), size
        for layer in range(shape.num_layers):
            for role, size in stored_layer_shapes(shape, self.magic, layer).items():
                yield self._name(layer, role), size
            if self.num_predictors and layer not in self.copy_thresholds:
                fc1, fc2 = predictor_names(layer)
                width = self.file.tensors[fc1].shape[0]
                yield fc1, (width, shape.hidden_size)
                yield fc2, (shape.ffn_sizes[layer], width)

    def _read_copy_thresholds(self) -> dict[int, float]:
        name, layers = f"{OURS}copy_thresholds", self.shape.num_layers
        if name not in self.file.key_values:
            return {}
        stated = self.file.value(name, ValueType.ARRAY, ValueType.F32)
        copies = {layer: float(threshold) for layer, threshold in enumerate(stated) if not math.isnan(threshold)}
        if len(stated) != layers or not all(map(math.isfinite, copies.values())):
            raise GgufError(f"states no threshold or NaN for each of its {layers} layers: {_REMEDY}")
        if copies and not quantisable(self.shape.hidden_size, TensorType.Q4_0):
            raise GgufError(f"states copies of rows of {self.shape.hidden_size} values, no whole blocks: {_REMEDY}")
        return copies

    def _read_threshold(self) -> float:
        name = "powerinfer.sparse_threshold"
        if self.magic != "PWRI" or name not in self.file.key_values:
            return 0.0
        threshold = self.file.value(name, ValueType.F32)
        if not math.isfinite(threshold):
            raise GgufError(f"states a predictor threshold of {threshold}: {_REMEDY}")
        return threshold

    def announce_dequantised(self) -> None:
        """Say once which of the file's types are computed with as floating point."""
        types = {i.type.name for i in self.file.tensors.values() if i.type not in _FLOATS and i.type not in KINDS}
        if types:
            note(f"{self.path.name}: {', '.join(sorted(types))} tensors are dequantised while loading")


class DequantisedModel:
    """A model whose quantised matrices come as floating point in *dtype*, for code that computes with nothing else."""

    def __init__(self, model: GgufModel, dtype: "torch.dtype | None" = None) -> None:
        self.shape, self._model, self._dtype = model.shape, model, dtype

    def shared(self, role: str) -> "torch.Tensor":
        return dense(self._model.shared(role), self._dtype)

    def attention(self, layer: int) -> "dict[str, torch.Tensor]":
        return {role: dense(tensor, self._dtype) for role, tensor in self._model.attention(layer).items()}

    def layer(self, layer: int, role: str) -> "torch.Tensor":
        return dense(self._model.layer(layer, role), self._dtype)

    def neuron_rows(self, layer: int, role: str) -> "torch.Tensor":
        return dense(self._model.neuron_rows(layer, role), self._dtype)

    def dtype(self) -> "torch.dtype":
        return self._model.dtype()
