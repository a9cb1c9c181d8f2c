"""Work done so far, in one file beside the result: what ``--resume`` continues from after a crash or a kill.

A progress file is a safetensors file whose metadata hold, as JSON under the key "progress": "format"
"powerinfer-toolkit/progress", "version" 1, "job" (what was asked for: fingerprint of the model and every option that
changes the result; all must be equal) and "position" (how far it is). It is replaced atomically, at most once in
``seconds_between``, and removed when the result is in place.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .atomic_write import atomic_file
from .errors import WorkspaceError, shown

if TYPE_CHECKING:
    import torch

FORMAT, VERSION = "powerinfer-toolkit/progress", 1
SECONDS_BETWEEN = 30.0
MOST_SECONDS_BETWEEN = 60.0
SLOW_SAVE = 20  # times as long as saving takes, saving waits, so that it never costs more than 5 %
_KEPT = "pi_toolkit.progress"  # key of a click context's meta: the progress file that an interruption leaves


class ProgressError(WorkspaceError):
    """Saved progress is damaged or belongs to another job."""


@dataclass(frozen=True)
class Progress:
    """What was saved: tensors on the CPU and a JSON object."""

    tensors: "dict[str, torch.Tensor]"
    position: dict[str, Any]


class ProgressFile:
    """The progress of one *job* (a JSON object that says what was asked for) at *path*."""

    def __init__(self, path: Path, job: dict[str, Any], seconds_between: float = SECONDS_BETWEEN) -> None:
        self.path, self._job, self._seconds_between = path, json.loads(json.dumps(job)), seconds_between
        self._saved_at, self._save_seconds = time.monotonic(), 0.0

    def read(self) -> Progress | None:
        """What was saved, None if nothing; raises ``ProgressError`` when it is damaged or of another job."""
        import torch
        from safetensors import SafetensorError, safe_open

        if not self.path.exists():
            return None
        remedy = "run the command again without --resume"
        try:
            with safe_open(self.path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["progress"])
                tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            found, job, position = (about["format"], about["version"]), about["job"], about["position"]
            if not isinstance(job, dict) or not isinstance(position, dict):
                raise ValueError("job or position")
        except PermissionError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProgressError(f"{str(self.path)!r} is damaged ({shown(str(error))}): {remedy}") from error
        if found != (FORMAT, VERSION):
            raise ProgressError(f"{str(self.path)!r} was saved by another release: {remedy}")
        for key in sorted(self._job | job):
            if self._job.get(key) != job.get(key):
                raise ProgressError(
                    f"{str(self.path)!r} was saved with {key} {shown(job.get(key))} where this command has "
                    f"{shown(self._job.get(key))}: give the same options, or {remedy}"
                )
        _keep(self.path)
        return Progress(tensors, position)

    def due(self) -> bool:
        """Whether it is time to save again; always where ``seconds_between`` is 0."""
        wait = min(max(self._seconds_between, SLOW_SAVE * self._save_seconds), MOST_SECONDS_BETWEEN)
        return not self._seconds_between or time.monotonic() - self._saved_at >= wait

    def save(self, tensors: "dict[str, torch.Tensor]", position: dict[str, Any]) -> None:
        """Replace what was saved; the tensors may lie on any device.

        Raises ``ProgressError`` when another command took the file away while it was written.
        """
        from safetensors.torch import save

        began = time.monotonic()
        about = {"format": FORMAT, "version": VERSION, "job": self._job, "position": position}
        content = save(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            {"progress": json.dumps(about, allow_nan=False)},
        )
        try:
            with atomic_file(self.path, is_output=False) as temporary:
                temporary.write_bytes(content)
        except FileNotFoundError as error:
            raise ProgressError(
                f"{str(self.path)!r} is kept by another command at the same time: let that one end, or choose another "
                "workspace with -o"
            ) from error
        _keep(self.path)
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - began

    def remove(self) -> None:
        """Call when the result is in place."""
        for path in (self.path, self.path.with_name(f"{self.path.name}.new")):
            path.unlink(missing_ok=True)
        if context := click.get_current_context(silent=True):
            context.meta.pop(_KEPT, None)


def saved_job(path: Path) -> dict[str, Any]:
    """The job of the progress at *path*; empty where nothing readable is, of which :meth:`ProgressFile.read` says more."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            job = json.loads((file.metadata() or {})["progress"])["job"]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return job if isinstance(job, dict) else {}


def _keep(path: Path) -> None:
    if context := click.get_current_context(silent=True):
        context.meta[_KEPT] = path


def kept(context: click.Context) -> Path | None:
    """The progress file that the command of *context* has read or written and not removed."""
    path: Path | None = context.meta.get(_KEPT)
    return path if path and path.exists() else None
