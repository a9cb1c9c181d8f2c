"""A model directory read tensor by tensor: safetensors or ``pytorch_model-*.bin``, in one file or in shards.

Tensors are asked for by the toolkit's roles (see :class:`ModelShape`), come as memory-mapped views in the dtype they
are stored in, and are checked for their shape. The fingerprint names the model by content: SHA-256 over the shape
record and, per tensor, role, dtype, shape and 4 KiB from its start, middle and end (hashing all of a 350 GB checkpoint
is not practical). It does not depend on file format, sharding, tensor names' prefix or the place on the disk.
"""

import hashlib
import json
import mmap
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .activation_stats import is_plain
from .errors import CheckpointError
from .fingerprint_samples import ask_for_samples, samples
from .model_families import FAMILIES, read_shape

if TYPE_CHECKING:
    import torch

# Types of safetensors files; of weights in others than the first four _checked says what they are.
_SAFETENSORS_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_FILE_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")


def expand(model: str) -> Path:
    """*model* as a path, ``~`` and ``~user`` replaced; raises ``CheckpointError`` for a user that is not known."""
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{model!r} begins with no known user's home ({error}): give the path in full") from None


def locate(model: str, revision: str | None = None, local_only: bool = False) -> Path:
    """The directory of *model*: itself if it is one, else the hub's snapshot (downloaded when it is not cached, unless
    *local_only*).

    Raises ``CheckpointError`` when neither is to be had.
    """
    path = expand(model)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{model!r} is a file: give the model's directory, the one that holds config.json")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it announces each of its retries on two lines
    wanted = ["*.json", "*.safetensors", "pytorch_model*.bin", "tokenizer*", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, local_files_only=local_only))
    except HFValidationError:
        raise CheckpointError(
            f"{model!r} is neither a directory nor a valid hub id: give a model directory or an id such as facebook/opt-6.7b"
        ) from None
    except Exception as error:  # the hub client raises many unrelated types: offline, gated, unknown, disk full
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{model!r} is no directory here and the hub did not provide it ({reason}): check the name, or download the "
            "model and give its directory"
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """The content of ``config.json``; raises ``CheckpointError``."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{str(directory)!r} has no config.json: give the directory of a Hugging Face model"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is not valid JSON ({error}): download the model again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{str(path)!r} does not hold a JSON object: download the model again")
    return config


class Checkpoint:
    """The tensors of one model directory, by role.

    Raises ``CheckpointError`` for missing, truncated or foreign weight files and ``UnsupportedModelError`` for a config
    that is not understood.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shape = read_shape(read_config(directory))
        self._family = FAMILIES[self.shape.family]
        self._tensors, self._pages = _open_weight_files(directory)

    def shared(self, role: str) -> "torch.Tensor":
        """A tensor outside the layers; the tied output head is the embedding."""
        if role == "head.weight" and self.shape.tied_embeddings:
            role = "embedding.weight"
        return self._checked(role, self._family.shared_tensors[role], self.shape.shared_shapes()[role])

    def attention(self, layer: int) -> "dict[str, torch.Tensor]":
        """All attention tensors of *layer* and the attention norm."""
        roles = self.shape.attention_shapes()
        tensors: dict[str, torch.Tensor] = {}
        if self._family.split_fused:
            q, kv = roles["query.weight"][0], roles["key.weight"][0]
            name = self._family.layer_tensors["fused_qkv.weight"].format(i=layer)
            fused = self._checked("fused_qkv.weight", name, (q + 2 * kv, self.shape.hidden_size))
            tensors = self._family.split_fused(self.shape, fused)
        return tensors | {role: self.layer(layer, role) for role in roles if role not in tensors}

    def attention_rows(self, layer: int) -> "dict[str, torch.Tensor]":
        """The same; of a model file it describes rows that are to be exchanged, and here none are."""
        return self.attention(layer)

    def drop_pages(self) -> None:
        """What was read of safetensors files leaves this process's memory; it stays in the page cache while there is room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for pages in self._pages:
                pages.madvise(mmap.MADV_DONTNEED)

    def layer(self, layer: int, role: str) -> "torch.Tensor":
        """One tensor of *layer* that is stored under a name of its own."""
        expected = (self.shape.attention_shapes() | self.shape.ffn_shapes(layer))[role]
        return self._checked(role, self._family.layer_tensors[role].format(i=layer), expected)

    def dtype(self) -> "torch.dtype":
        """The type the FFN weights are stored in."""
        return self.layer(0, "up.weight").dtype

    def neuron_rows(self, layer: int, role: str) -> "torch.Tensor":
        """``gate``, ``up`` or ``down`` of *layer* by neuron, [neurons, hidden]."""
        tensor = self.layer(layer, role)
        return tensor.T if role == "down.weight" else tensor

    def fingerprint(self) -> str:
        """64 hexadecimal digits; equal for the same weights in any file format."""
        ask_for_samples((tensor.data_ptr(), tensor.nbytes) for tensor in self._tensors.values() if is_plain(tensor))
        digest = hashlib.sha256(json.dumps(self.shape.to_json(), sort_keys=True).encode())
        for role in sorted(self.shape.shared_shapes()):
            _hash_tensor(digest, role, self.shared(role))
        for layer in range(self.shape.num_layers):
            tensors = self.attention(layer) | {r: self.layer(layer, r) for r in self.shape.ffn_shapes(layer)}
            for role in sorted(tensors):
                _hash_tensor(digest, f"{layer}.{role}", tensors[role])
        return digest.hexdigest()

    def _checked(self, role: str, names: str, expected: tuple[int, ...]) -> "torch.Tensor":
        for name in self._candidate_names(names):
            if name in self._tensors:
                tensor = self._tensors[name]
                if tuple(tensor.shape) != expected:
                    raise CheckpointError(
                        f"tensor {name!r} has shape {list(tensor.shape)} where config.json asks for {list(expected)}: "
                        "use weights and config of the same model"
                    )
                if not is_plain(tensor):
                    raise CheckpointError(
                        f"tensor {name!r} is sparse, quantised or without content: use a checkpoint with dense weights"
                    )
                if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
                    raise CheckpointError(
                        f"tensor {name!r} is stored as {tensor.dtype}: use an unquantised checkpoint (F32, F16 or BF16)"
                    )
                return tensor
        raise CheckpointError(
            f"{str(self.directory)!r} has no tensor for {role!r} ({names}): download the complete model"
        )

    def _candidate_names(self, names: str) -> list[str]:
        usual = names.split("|")
        return usual + [
            other + name.removeprefix(prefix)
            for prefix, other in self._family.alternative_prefixes
            for name in usual
            if name.startswith(prefix)
        ]


def _hash_tensor(digest: Any, role: str, tensor: "torch.Tensor") -> None:
    import torch

    data = tensor.contiguous().flatten().view(torch.uint8)
    digest.update(f"{role}|{str(tensor.dtype).removeprefix('torch.')}|{list(tensor.shape)}|".encode())
    for sample in samples(len(data)):
        digest.update(data[sample].numpy().tobytes())


def _open_weight_files(directory: Path) -> "tuple[dict[str, torch.Tensor], list[mmap.mmap]]":
    """All tensors by name, and the mappings of the safetensors files they are views of."""
    files = _require_weight_files(directory)
    tensors: dict[str, torch.Tensor] = {}
    pages = []
    for file in files:
        if file.suffix == ".safetensors":
            opened, mapped = _open_safetensors(file)
            pages.append(mapped)
        else:
            opened = _open_bin(file)
        tensors |= opened
    _check_index(directory, files[0].suffix, tensors)
    return tensors, pages


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights of a model directory; none where there are none."""
    found = (sorted(directory.glob(pattern)) for pattern in _FILE_PATTERNS)
    return next((files for files in found if files), [])


def _require_weight_files(directory: Path) -> list[Path]:
    if files := weight_files(directory):
        return files
    raise CheckpointError(
        f"{str(directory)!r} has no model*.safetensors or pytorch_model*.bin: download the model's weights into it"
    )


def _check_index(directory: Path, suffix: str, tensors: "dict[str, torch.Tensor]") -> None:
    """A sharded checkpoint lists its tensors; a shard that is absent must not pass as a smaller model."""
    stem = "model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin"
    index = directory / f"{stem}.index.json"
    if index.exists():
        try:
            listed = set(json.loads(index.read_text("utf-8"))["weight_map"])
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{str(index)!r} does not list tensors as a JSON object: download it again"
            ) from error
        if missing := sorted(listed - set(tensors)):
            raise CheckpointError(
                f"{index.name} lists {len(missing)} tensors that no shard holds ({missing[0]} …): download all shards"
            )


def _open_safetensors(path: Path) -> "tuple[dict[str, torch.Tensor], mmap.mmap]":
    """Views of the mapped file, and the mapping. The library checks the file and names its tensors; pages of its own views
    cannot be dropped, so that loading would take the memory of the model twice."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:  # safetensors hides why a file cannot be opened
            with safe_open(path, framework="pt") as checked:
                names = list(checked.keys())
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return {name: _mapped(pages, header[name], 8 + header_bytes) for name in names}, pages
    except PermissionError:
        raise
    except KeyError as error:
        raise CheckpointError(
            f"{str(path)!r} holds tensors of a type that is not read ({error}): use an unquantised checkpoint"
        ) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} is not a complete safetensors file ({error}): download it again (a git-lfs pointer?)"
        ) from error


def _mapped(pages: mmap.mmap, entry: dict[str, Any], data_offset: int) -> "torch.Tensor":
    """The tensor of one entry of a header that the library found right."""
    import torch

    dtype, (first, end) = getattr(torch, _SAFETENSORS_TYPES[entry["dtype"]]), entry["data_offsets"]
    if first == end:
        return torch.empty(entry["shape"], dtype=dtype)
    count = (end - first) // dtype.itemsize
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=data_offset + first).view(entry["shape"])


def _open_bin(path: Path) -> "dict[str, torch.Tensor]":
    import torch

    try:
        # Only the zip layout of torch ≥ 1.6 can be mapped; older files are read whole.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(content, dict):
            raise ValueError(f"holds a {type(content).__name__} in place of named tensors")
    except PermissionError:
        raise
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be loaded as plain tensors: download it again, or convert it to safetensors"
        ) from error
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}
