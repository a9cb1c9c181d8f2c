"""Activation predictors on disk: the format that ``pi-train-predictor`` writes and the solver and runtime read.

    predictor/model_{i}.pt   torch.save of {"fc1.weight": [r, hidden], "fc2.weight": [neurons, r]}, F16, contiguous
    predictor/config.json    "sparse_threshold" (one for all layers), and keys of ours: "format"
                             "powerinfer-toolkit/predictor", "version" 1, "fingerprint" of the model, "layers": per layer
                             {"layer", "kind": "mlp", "input": "residual", "hidden", "recall", "precision", "density",
                             "firing_share"} measured on held-out documents, or the same with "kind": "copy", "input":
                             "normed" and, in place of "hidden", "threshold"

Neuron j of a layer of kind mlp is a candidate on a token when (fc2 · relu(fc1 · x))_j ≥ sparse_threshold, with x the
residual stream before the FFN norm (Falcon: the layer input). This is PowerInfer's format: F16, BF16 and F32 are read; a
directory without our keys is accepted, checked by shapes, its threshold defaulting to 0.

A layer of kind copy has no ``model_{i}.pt``: its predictor is the rows that decide on firing (gate; up with its bias), in
blocks of Q4_0 that are made from the model's weights wherever they are loaded. Neuron j is a candidate when
(row_j · y + bias_j) ≥ the layer's own threshold, with y the normed vector that the neurons themselves read.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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

from .predictor_size import PredictorSize
from .sizing import MAX_WIDTH

if TYPE_CHECKING:
    import torch

FORMAT, VERSION = "powerinfer-toolkit/predictor", 1
_REMEDY = "run pi-train-predictor to write it again"
_INPUT = {"mlp": "residual", "copy": "normed"}
_OF_ONE_KIND = {"mlp": "hidden", "copy": "threshold"}


@dataclass(frozen=True)
class LayerQuality:
    """What one layer's predictor is and how it did on held-out documents.

    ``hidden``: width of an MLP, 0 of a copy; ``recall``: share of firings that were candidates; ``precision``: share of
    candidates that fired; ``density``: share of neurons that were candidates; ``firing_share``: share that fired;
    ``threshold``: of a copy's scores.
    """

    layer: int
    hidden: int
    recall: float
    precision: float
    density: float
    firing_share: float
    kind: Literal["mlp", "copy"] = "mlp"
    input: str = "residual"
    threshold: float | None = None

    @property
    def size(self) -> PredictorSize:
        return "copy" if self.kind == "copy" else self.hidden

    def entry(self) -> dict[str, Any]:
        """What ``config.json`` holds of it."""
        other = _OF_ONE_KIND["mlp" if self.kind == "copy" else "copy"]
        return {name: value for name, value in asdict(self).items() if name != other}


@dataclass(frozen=True, eq=False)
class MlpWeights:
    """``fc1`` [r, hidden] and ``fc2`` [neurons, r], whose scores are compared with the threshold of the set."""

    fc1: "torch.Tensor"
    fc2: "torch.Tensor"


@dataclass(frozen=True)
class RowsCopy:
    """The layer's own deciding rows in Q4_0, whose scores are compared with ``threshold``."""

    threshold: float


@dataclass(frozen=True, eq=False)
class PredictorSet:
    """Predictors of all layers, and the one threshold of those that are MLPs."""

    layers: tuple[MlpWeights | RowsCopy, ...]
    threshold: float
    fingerprint: str | None
    quality: tuple[LayerQuality, ...] | None

    @classmethod
    def of_mlps(
        cls,
        fc1: "Sequence[torch.Tensor]",
        fc2: "Sequence[torch.Tensor]",
        threshold: float,
        fingerprint: str | None = None,
        quality: tuple[LayerQuality, ...] | None = None,
    ) -> "PredictorSet":
        """A set without copies, from the matrices of its layers."""
        layers = tuple(MlpWeights(*weights) for weights in zip(fc1, fc2, strict=True))
        return cls(layers, threshold, fingerprint, quality)

    def sizes(self) -> list[PredictorSize]:
        return ["copy" if isinstance(layer, RowsCopy) else len(layer.fc1) for layer in self.layers]

    @property
    def has_copies(self) -> bool:
        return "copy" in self.sizes()


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
        for layer, mlp in enumerate(predictors.layers):
            if isinstance(mlp, MlpWeights):
                _write_weights(temporary / f"model_{layer}.pt", layer, mlp)
        content: dict[str, Any] = {"sparse_threshold": predictors.threshold, "format": FORMAT, "version": VERSION}
        content |= {"fingerprint": predictors.fingerprint, "training": about_training}
        content["layers"] = [quality.entry() for quality in predictors.quality or ()]
        write_json(temporary / "config.json", content)
        for name, extra in (extra_files or {}).items():
            (temporary / name).write_bytes(extra)


def _write_weights(path: Path, layer: int, mlp: MlpWeights) -> None:
    save_tensors(path, {"fc1.weight": in_half(mlp.fc1, layer), "fc2.weight": in_half(mlp.fc2, layer)})


def in_half(weight: "torch.Tensor", layer: int) -> "torch.Tensor":
    """*weight* of the predictor of *layer* as it is stored; raises ``PredictorFileError`` if it overflows F16."""
    half = weight.half().contiguous()
    if not half.isfinite().all():
        raise PredictorFileError(
            f"the predictor of layer {layer} does not fit in F16: train with a lower --learning-rate or more --tokens"
        )
    return half


def read(directory: Path, hidden_size: int, ffn_sizes: Sequence[int], fingerprint: str) -> PredictorSet:
    """Predictors for a model of this shape, in the dtype they are stored in.

    Raises ``PredictorFileError`` for missing, foreign or malformed files and ``FingerprintMismatchError`` for the
    predictors of another model. A missing fingerprint is announced on stderr and leaves ``fingerprint`` None.
    """
    config, quality, files = _open(directory, len(ffn_sizes), fingerprint)
    layers: list[MlpWeights | RowsCopy] = []
    for layer, (file, neurons) in enumerate(zip(files, ffn_sizes, strict=True)):
        if file is not None:
            layers.append(MlpWeights(*_read_weights(file, hidden_size, neurons)))
        else:
            threshold = quality[layer].threshold if quality else None
            assert threshold is not None, "only a layer that says so has no file"
            layers.append(RowsCopy(threshold))
    found = PredictorSet(tuple(layers), _threshold(config, directory), config.get("fingerprint"), quality)
    if quality and [layer.size for layer in quality] != found.sizes():
        raise PredictorFileError(f"config.json of {str(directory)!r} states other widths than its files: {_REMEDY}")
    return found


def read_sizes(directory: Path, hidden_size: int, ffn_sizes: Sequence[int], fingerprint: str) -> list[PredictorSize]:
    """What sets the size of each layer's predictor in memory; loads weights only if ``config.json`` is foreign.

    Raises as :func:`read` does.
    """
    _, quality, files = _open(directory, len(ffn_sizes), fingerprint)
    if quality:
        return [layer.size for layer in quality]
    return [len(_read_weights(file, hidden_size, n)[0]) for file, n in zip(files, ffn_sizes, strict=True) if file]


def read_overshoot(directory: Path, num_layers: int) -> list[float] | None:
    """Candidates per firing of each layer on held-out documents; None where ``config.json`` states no measurements."""
    path = directory / "config.json"
    quality = _quality(read_json(path, PredictorFileError, _REMEDY), num_layers, directory) if path.exists() else None
    if not quality:
        return None
    return [layer.density / layer.firing_share if layer.firing_share > 0 else 1.0 for layer in quality]


def _open(
    directory: Path, num_layers: int, fingerprint: str
) -> tuple[dict[str, Any], tuple[LayerQuality, ...] | None, list[Path | None]]:
    """``config.json``, what it says of the layers, and the file of each layer that is no copy."""
    if not directory.is_dir():
        if directory.exists():
            raise PredictorFileError(f"{str(directory)!r} is no directory: move it away and run pi-train-predictor")
        raise PredictorFileError(f"{str(directory)!r} is missing: run pi-train-predictor first")
    path = directory / "config.json"
    config = read_json(path, PredictorFileError, _REMEDY) if path.exists() else {}
    if "format" in config:
        require_format(config, path, FORMAT, VERSION, PredictorFileError)
    check_fingerprint(directory, config.get("fingerprint"), fingerprint, _REMEDY)
    quality = _quality(config, num_layers, directory)
    copies = {layer.layer for layer in quality or () if layer.kind == "copy"}
    files = iter(numbered_files(directory, "model", num_layers, PredictorFileError, _REMEDY, copies))
    return config, quality, [None if layer in copies else next(files) for layer in range(num_layers)]


def _threshold(config: dict[str, Any], directory: Path) -> float:
    threshold = config.get("sparse_threshold", 0.0)
    if not _is_number(threshold):
        raise PredictorFileError(f"config.json of {str(directory)!r} states threshold {shown(threshold)}: {_REMEDY}")
    return float(threshold)


def _quality(config: dict[str, Any], num_layers: int, directory: Path) -> tuple[LayerQuality, ...] | None:
    if "layers" not in config:
        return None
    layers = config["layers"]
    well_formed = isinstance(layers, list) and all(
        isinstance(e, dict) and e.get("layer") == i for i, e in enumerate(layers)
    )
    if not well_formed or len(layers) != num_layers:
        raise _malformed(directory)
    return tuple(_layer_quality(entry, directory) for entry in layers)


def _layer_quality(entry: dict[str, Any], directory: Path) -> LayerQuality:
    kind = entry.get("kind")
    if not (isinstance(kind, str) and kind in _INPUT and entry.get("input") == _INPUT[kind]):
        raise PredictorFileError(
            f"config.json of {str(directory)!r} states a predictor of kind {shown(kind)} on {shown(entry.get('input'))}, "
            f"which this release does not know: {_REMEDY}"
        )
    known = {field.name for field in fields(LayerQuality)} - (set(_OF_ONE_KIND.values()) - {_OF_ONE_KIND[kind]})
    if set(entry) != known or not _measured(entry):
        raise _malformed(directory)
    return LayerQuality(**({"hidden": 0} | entry))


def _malformed(directory: Path) -> PredictorFileError:
    return PredictorFileError(f"config.json of {str(directory)!r} has a malformed list of layers: {_REMEDY}")


def _measured(entry: dict[str, Any]) -> bool:
    """Whether the width is a whole number of units, or the threshold a number, and the measured shares are shares."""
    shares = [entry[name] for name in ("recall", "precision", "density", "firing_share")]
    if not all(_is_number(share) and 0 <= share <= 1 for share in shares):
        return False
    if entry["kind"] == "copy":
        return _is_number(entry["threshold"])
    hidden = entry["hidden"]
    return isinstance(hidden, int) and not isinstance(hidden, bool) and 0 < hidden <= MAX_WIDTH


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # a whole number may be beyond every float


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
