"""Firing counts on disk: the format that ``pi-profile`` writes and the solver reads.

    activation/activation_{i}.pt   torch.save of one int64 tensor [neurons of layer i]: on how many tokens each fired
    activation/profile.json        "format" "powerinfer-toolkit/activation", "version" 1, "fingerprint" of the model,
                                   "tokens" counted, "corpus", "window", "dtype" computed in, "firing_threshold" (a
                                   neuron fires above it), "firing_share" per layer, "convergence" and "comparison"
                                   (see :mod:`.convergence`; null where not measured)

The ``.pt`` files are PowerInfer's format, which allows any numeric dtype and has no ``profile.json``: such a directory
is accepted, checked by shapes, and its counts are relative (``tokens`` None). Layers are read in numeric order.
"""

import io
import pickle
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .atomic_write import atomic_directory
from .command_line import LARGEST_COUNT, note
from .errors import ActivationStatsError, FingerprintMismatchError, WorkspaceError, shown
from .json_file import read_json, require_format, write_json

if TYPE_CHECKING:
    from typing import TypeGuard

    import torch

FORMAT, VERSION = "powerinfer-toolkit/activation", 1
_REMEDY = "run pi-profile to write it again"
MAX_COUNTS_FILE_BYTES = 64 * 1024 * 1024  # eight million neurons in one layer; nothing real comes near


@dataclass(frozen=True)
class ActivationStats:
    """Counts of every layer, each [neurons] int64 (or float64 from foreign files), with where they come from."""

    counts: tuple[np.ndarray, ...]
    fingerprint: str | None
    tokens: int | None
    corpus: str | None = None
    window: int | None = None
    dtype: str | None = None

    def firing_share(self) -> list[float]:
        """Per layer the mean share of neurons that fire on a token; raises without a token count."""
        if self.tokens is None:
            raise ActivationStatsError(f"the counts come without profile.json, so shares are unknown: {_REMEDY}")
        return [float(c.sum()) / (len(c) * self.tokens) for c in self.counts]


def write(
    directory: Path,
    stats: ActivationStats,
    extra_files: dict[str, bytes] | None = None,
    convergence: dict[str, Any] | None = None,
    comparison: dict[str, Any] | None = None,
    firing_threshold: float = 0.0,
) -> None:
    """Replace *directory* as a whole by these counts and *extra_files* (figures, a report); atomic.

    *convergence* and *comparison* (with another corpus) are for people and are not read back.
    """
    import torch

    _validate(stats, [len(c) for c in stats.counts], directory)
    with atomic_directory(directory) as temporary:
        for layer, counts in enumerate(stats.counts):
            save_tensors(temporary / f"activation_{layer}.pt", torch.from_numpy(counts))
        for name, content in (extra_files or {}).items():
            (temporary / name).write_bytes(content)
        write_json(
            temporary / "profile.json",
            {
                "format": FORMAT,
                "version": VERSION,
                "fingerprint": stats.fingerprint,
                "tokens": stats.tokens,
                "corpus": stats.corpus,
                "window": stats.window,
                "dtype": stats.dtype,
                "firing_threshold": firing_threshold,
                "firing_share": stats.firing_share(),
                "convergence": convergence,
                "comparison": comparison,
            },
        )


def read(directory: Path, ffn_sizes: Sequence[int], fingerprint: str) -> ActivationStats:
    """Counts for a model with *ffn_sizes* neurons per layer.

    Raises ``ActivationStatsError`` for missing, foreign or malformed files and ``FingerprintMismatchError`` for the
    counts of another model. A missing fingerprint is announced on stderr and leaves ``fingerprint`` None.
    """
    if not directory.is_dir():
        raise ActivationStatsError(f"{str(directory)!r} is missing: run pi-profile first")
    files = numbered_files(directory, "activation", len(ffn_sizes), ActivationStatsError, _REMEDY)
    about: dict[str, Any] = {}
    if (directory / "profile.json").exists():
        about = read_json(directory / "profile.json", ActivationStatsError, _REMEDY)
        require_format(about, directory / "profile.json", FORMAT, VERSION, ActivationStatsError)
        tokens = about.get("tokens")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= LARGEST_COUNT:
            raise ActivationStatsError(f"profile.json states {shown(tokens)} tokens: {_REMEDY}")
    check_fingerprint(directory, about.get("fingerprint"), fingerprint, _REMEDY)
    stats = ActivationStats(
        tuple(_read_counts(file, neurons) for file, neurons in zip(files, ffn_sizes, strict=True)),
        about.get("fingerprint"),
        about.get("tokens"),
        about.get("corpus"),
        about.get("window"),
        about.get("dtype"),
    )
    _validate(stats, ffn_sizes, directory)
    return stats


def numbered_files(
    directory: Path,
    stem: str,
    num_layers: int,
    error: type[WorkspaceError],
    remedy: str,
    without: Collection[int] = (),
) -> list[Path]:
    """``{stem}_0.pt`` … in numeric order; raises *error* unless there is exactly one file per layer, and none for the layers
    *without* one.

    Anything else that begins like them (``activation_3.pt.bak``, ``activation_03.pt``) is refused: a file that looks
    like data and is silently left out is how a placement ends up with another layer's neurons.
    """
    expected = [f"{stem}_{layer}.pt" for layer in range(num_layers) if layer not in without]
    present = {path.name for path in directory.iterdir() if path.name.startswith(f"{stem}_")}
    if foreign := sorted(present - set(expected)):
        beyond = [name for name in foreign if re.fullmatch(rf"{stem}_(0|[1-9]\d*)\.pt", name)]
        if beyond and beyond[0] in {f"{stem}_{layer}.pt" for layer in without}:
            raise error(f"{str(directory)!r} holds {beyond[0]!r} for a layer that needs no file: {remedy}")
        if beyond:
            raise error(f"{str(directory)!r} holds {beyond[0]!r} and the model has {num_layers} layers: {remedy}")
        raise error(f"{str(directory)!r} holds the foreign file {foreign[0]!r}: move it elsewhere")
    if missing := [name for name in expected if name not in present]:
        raise error(f"{str(directory)!r} lacks {missing[0]!r} of {num_layers} layers: {remedy}")
    return [directory / name for name in expected]


def check_fingerprint(path: Path, found: object, expected: str, remedy: str) -> None:
    """Raise ``FingerprintMismatchError`` if *path* states the fingerprint of another model; announce if it states none."""
    if found is None:
        note(f"{str(path)!r} states no model fingerprint: it was checked by its shapes alone")
    elif found != expected:
        raise FingerprintMismatchError(f"{str(path)!r} belongs to another model than this workspace: {remedy}")


def save_tensors(path: Path, content: Any) -> None:
    """``torch.save``, but a full disk is an ``OSError``: torch's own writer makes a ``RuntimeError`` of it."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getbuffer())


def is_plain(value: object) -> "TypeGuard[torch.Tensor]":
    """Whether *value* is a tensor whose numbers are all there: dense, unquantised, and not on the meta device."""
    import torch

    if not isinstance(value, torch.Tensor):
        return False
    return value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu"


def load_tensors(path: Path, error: type[WorkspaceError], remedy: str) -> Any:
    """``torch.load`` of plain tensors only; raises *error* for pickled objects and damaged files."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:  # nothing is wrong with the content, and writing it again is no remedy
        raise
    except pickle.UnpicklingError as cause:
        raise error(f"{str(path)!r} holds something else than plain tensors and was not opened: {remedy}") from cause
    except Exception as cause:  # a damaged archive or pickle raises a dozen unrelated types
        raise error(f"{str(path)!r} is damaged: {remedy}") from cause


def _read_counts(path: Path, neurons: int) -> np.ndarray:
    import torch

    if path.stat().st_size > MAX_COUNTS_FILE_BYTES:
        raise ActivationStatsError(
            f"{str(path)!r} has {path.stat().st_size:,} bytes, too many for firing counts: {_REMEDY}"
        )
    tensor = load_tensors(path, ActivationStatsError, _REMEDY)
    if not is_plain(tensor) or tensor.ndim != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ActivationStatsError(f"{str(path)!r} does not hold one numeric vector of counts: {_REMEDY}")
    if len(tensor) != neurons:  # before anything is copied: a few bytes can claim a vector of any length
        raise ActivationStatsError(f"{str(path)!r} counts {len(tensor)} neurons and the model has {neurons}: {_REMEDY}")
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else torch.int64).numpy()


def _validate(stats: ActivationStats, ffn_sizes: Sequence[int], directory: Path) -> None:
    for layer, (counts, neurons) in enumerate(zip(stats.counts, ffn_sizes, strict=True)):
        where = f"layer {layer} of {str(directory)!r}"
        if len(counts) != neurons:
            raise ActivationStatsError(f"{where} counts {len(counts)} neurons and the model has {neurons}: {_REMEDY}")
        if not np.isfinite(counts).all():
            raise ActivationStatsError(f"{where} holds counts that are not finite: {_REMEDY}")
        if (counts < 0).any():
            raise ActivationStatsError(f"{where} holds negative counts: {_REMEDY}")
        if stats.tokens is not None and (counts > stats.tokens).any():
            raise ActivationStatsError(f"{where} counts more firings than tokens: {_REMEDY}")
