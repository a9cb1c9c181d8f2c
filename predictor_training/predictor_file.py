"""Activation predictors on disk: the format that ``pi-train-predictor`` writes and the solver and runtime read.

    predictor/model_{i}.pt   torch.save of {"fc1.weight": [r, hidden], "fc2.weight": [neurons, r]}, F16, contiguous
    predictor/config.json    "sparse_threshold" (one for all layers), and keys of ours: "format"
                             "powerinfer-toolkit/predictor", "version" 1, "fingerprint" of the model, "layers": per layer
                             {"layer", "kind": "mlp", "input": "residual", "hidden", "recall", "precision", "density",
                             "firing_share"} measured on held-out documents

Neuron j of a layer is a candidate on a token when (fc2 · relu(fc1 · x))_j ≥ sparse_threshold, with x the residual stream
before the FFN norm (Falcon: the layer input). This is PowerInfer's format: F16, BF16 and F32 are read; a directory
without our keys is accepted, checked by shapes, its threshold defaulting to 0.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_toolkit.profiler.activation_stats import (
    check_fingerprint,
    is_plain,
    load_tensors,
    numbered_files,
    save_tensors,
)
from pi_toolkit.profiler.atomic_write import atomic_directory
from pi_toolkit.profiler.errors import PredictorFileError, shown
from pi_toolkit.profiler.json_file import read_json, require_format, write_json

from .sizing import MAX_WIDTH

if TYPE_CHECKING:
    import torch

FORMAT, VERSION = "powerinfer-toolkit/predictor", 1
_REMEDY = "run pi-train-predictor to write it again"


@dataclass(frozen=True)
class LayerQuality:
    """What one layer's predictor is and how it did on held-out documents.

    ``recall``: share of firings that were candidates; ``precision``: share of candidates that fired; ``density``: share
    of neurons that were candidates; ``firing_share``: share that fired.
    """

    layer: int
    hidden: int
    recall: float
    precision: float
    density: float
    firing_share: float
    kind: str = "mlp"
    input: str = "residual"


@dataclass(frozen=True)
class PredictorSet:
    """Predictors of all layers: ``fc1`` [r, hidden] and ``fc2`` [neurons, r] per layer, one threshold."""

    fc1: "tuple[torch.Tensor, ...]"
    fc2: "tuple[torch.Tensor, ...]"
    threshold: float
    fingerprint: str | None
    quality: tuple[LayerQuality, ...] | None

    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.fc1 + self.fc2)


def write(
    directory: Path,
    predictors: PredictorSet,
    about_training: dict[str, Any],
    extra_files: dict[str, bytes] | None = None,
) -> None:
    """Replace *directory* as a whole by these predictors, stored in F16, and *extra_files* by name; atomic.

    *about_training* is kept in ``config.json`` under "training". Raises ``PredictorFileError`` if a weight overflows F16.
    """
    with atomic_directory(directory) as temporary:
        for layer, (fc1, fc2) in enumerate(zip(predictors.fc1, predictors.fc2, strict=True)):
            weights = {"fc1.weight": fc1.half().contiguous(), "fc2.weight": fc2.half().contiguous()}
            if not all(weight.isfinite().all() for weight in weights.values()):
                raise PredictorFileError(
                    f"the predictor of layer {layer} does not fit in F16: train with a lower --learning-rate or more --tokens"
                )
            save_tensors(temporary / f"model_{layer}.pt", weights)
        content: dict[str, Any] = {"sparse_threshold": predictors.threshold, "format": FORMAT, "version": VERSION}
        content |= {"fingerprint": predictors.fingerprint, "training": about_training}
        content["layers"] = [asdict(quality) for quality in predictors.quality or ()]
        write_json(temporary / "config.json", content)
        for name, extra in (extra_files or {}).items():
            (temporary / name).write_bytes(extra)


def read(directory: Path, hidden_size: int, ffn_sizes: Sequence[int], fingerprint: str) -> PredictorSet:
    """Predictors for a model of this shape, in the dtype they are stored in.

    Raises ``PredictorFileError`` for missing, foreign or malformed files and ``FingerprintMismatchError`` for the
    predictors of another model. A missing fingerprint is announced on stderr and leaves ``fingerprint`` None.
    """
    config, files = _open(directory, len(ffn_sizes), fingerprint)
    weights = [_read_weights(file, hidden_size, n) for file, n in zip(files, ffn_sizes, strict=True)]
    fc1, fc2 = zip(*weights, strict=True)
    quality = _quality(config, len(files), directory)
    if quality and [layer.hidden for layer in quality] != [len(weight) for weight in fc1]:
        raise PredictorFileError(f"config.json of {str(directory)!r} states other widths than its files: {_REMEDY}")
    return PredictorSet(fc1, fc2, _threshold(config, directory), config.get("fingerprint"), quality)


def read_hidden_sizes(directory: Path, hidden_size: int, ffn_sizes: Sequence[int], fingerprint: str) -> list[int]:
    """Width r of each layer's predictor, which sets its size in memory; loads weights only if ``config.json`` is foreign.

    Raises as :func:`read` does.
    """
    config, files = _open(directory, len(ffn_sizes), fingerprint)
    quality = _quality(config, len(files), directory)
    if quality:
        return [layer.hidden for layer in quality]
    return [len(_read_weights(file, hidden_size, n)[0]) for file, n in zip(files, ffn_sizes, strict=True)]


def read_overshoot(directory: Path, num_layers: int) -> list[float] | None:
    """Candidates per firing of each layer on held-out documents; None where ``config.json`` states no measurements."""
    path = directory / "config.json"
    quality = _quality(read_json(path, PredictorFileError, _REMEDY), num_layers, directory) if path.exists() else None
    if not quality:
        return None
    return [layer.density / layer.firing_share if layer.firing_share > 0 else 1.0 for layer in quality]


def _open(directory: Path, num_layers: int, fingerprint: str) -> tuple[dict[str, Any], list[Path]]:
    if not directory.is_dir():
        if directory.exists():
            raise PredictorFileError(f"{str(directory)!r} is no directory: move it away and run pi-train-predictor")
        raise PredictorFileError(f"{str(directory)!r} is missing: run pi-train-predictor first")
    files = numbered_files(directory, "model", num_layers, PredictorFileError, _REMEDY)
    path = directory / "config.json"
    config = read_json(path, PredictorFileError, _REMEDY) if path.exists() else {}
    if "format" in config:
        require_format(config, path, FORMAT, VERSION, PredictorFileError)
    check_fingerprint(directory, config.get("fingerprint"), fingerprint, _REMEDY)
    return config, files


def _threshold(config: dict[str, Any], directory: Path) -> float:
    threshold = config.get("sparse_threshold", 0.0)
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not number or not abs(threshold) <= sys.float_info.max:  # a whole number may be beyond every float
        raise PredictorFileError(f"config.json of {str(directory)!r} states threshold {shown(threshold)}: {_REMEDY}")
    return float(threshold)


def _quality(config: dict[str, Any], num_layers: int, directory: Path) -> tuple[LayerQuality, ...] | None:
    if "layers" not in config:
        return None
    known = {field.name for field in fields(LayerQuality)}
    layers = config["layers"]
    well_formed = isinstance(layers, list) and all(isinstance(e, dict) and set(e) == known for e in layers)
    if not well_formed or [e["layer"] for e in layers] != list(range(num_layers)) or not all(map(_measured, layers)):
        raise PredictorFileError(f"config.json of {str(directory)!r} has a malformed list of layers: {_REMEDY}")
    quality = tuple(LayerQuality(**entry) for entry in layers)
    for layer in quality:
        if layer.kind != "mlp" or layer.input != "residual":
            raise PredictorFileError(
                f"config.json of {str(directory)!r} states a predictor of kind {shown(layer.kind)} on {shown(layer.input)}, "
                f"which this release does not know: {_REMEDY}"
            )
    return quality


def _measured(entry: dict[str, Any]) -> bool:
    """Whether the width is a whole number of units and the measured shares are shares."""
    shares = [entry[name] for name in ("recall", "precision", "density", "firing_share")]
    numbers = all(isinstance(share, int | float) and not isinstance(share, bool) for share in shares)
    width = isinstance(entry["hidden"], int) and not isinstance(entry["hidden"], bool)
    return width and 0 < entry["hidden"] <= MAX_WIDTH and numbers and all(0 <= share <= 1 for share in shares)


def _read_weights(path: Path, hidden_size: int, neurons: int) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    content = load_tensors(path, PredictorFileError, _REMEDY)
    names, dtypes = ("fc1.weight", "fc2.weight"), (torch.float16, torch.bfloat16, torch.float32)
    if not isinstance(content, dict) or set(content) != set(names):
        raise PredictorFileError(f"{str(path)!r} does not hold exactly fc1.weight and fc2.weight: {_REMEDY}")
    fc1, fc2 = (content[name] for name in names)
    for weight in (fc1, fc2):
        if not is_plain(weight) or weight.ndim != 2 or weight.dtype not in dtypes:
            raise PredictorFileError(f"{str(path)!r} does not hold two matrices in F16, BF16 or F32: {_REMEDY}")
    if fc1.shape[1] != hidden_size or fc2.shape[0] != neurons or fc1.shape[0] != fc2.shape[1]:
        raise PredictorFileError(
            f"{str(path)!r} has shapes {list(fc1.shape)} and {list(fc2.shape)} where [r, {hidden_size}] and "
            f"[{neurons}, r] belong: {_REMEDY}"
        )
    if not 0 < len(fc1) <= MAX_WIDTH:  # before anything is computed: a few bytes can claim a matrix of any size
        raise PredictorFileError(f"{str(path)!r} has {len(fc1):,} hidden units, which cannot be right: {_REMEDY}")
    if not (fc1.isfinite().all() and fc2.isfinite().all()):
        raise PredictorFileError(f"{str(path)!r} holds weights that are not finite: {_REMEDY}")
    return fc1.detach(), fc2.detach()
