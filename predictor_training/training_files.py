"""What a training run keeps until it is done, in ``training-progress/`` of the workspace: samples and finished layers.

``sampling.{rank}`` says how far each process has sampled, ``layer_{i}.{name}`` holds one finished predictor; both are
progress files (:mod:`pi_toolkit.profiler.progress_file`), which know the job that they belong to. After a crash or a kill
``--resume`` goes on from here; the next run without it begins anew. The directory goes away with the end of the training,
with an error, and with an interruption that came before anything worth keeping.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pi_toolkit.profiler.processes import Processes, ProcessesError
from pi_toolkit.profiler.progress_file import ProgressError, ProgressFile, kept, saved_job
from pi_toolkit.profiler.window_batch import other_text
from pi_toolkit.profiler.workspace_lock import locked

from .firing_copy import CopiedLayer
from .predictor import Quality
from .predictor_file import in_half
from .train import TrainedLayer

DIRECTORY = "training-progress"
PredictedLayer = TrainedLayer | CopiedLayer


class TrainingFiles:
    """The files of one *job* in *directory*; ``text`` is the digest of what was sampled, once that is known."""

    def __init__(self, directory: Path, job: dict[str, Any], resumed: bool) -> None:
        self.directory, self._job, self.resumed, self.text = directory, job, resumed, ""

    def sampling(self, processes: Processes) -> ProgressFile:
        """How far this process has sampled."""
        return ProgressFile(self.directory / f"sampling.{processes.rank}", self._job | {"processes": processes.count})

    def read_layer(self, layer: int, name: str) -> PredictedLayer | None:
        """The predictor of *layer* that was trained as *name* says, if it is finished.

        Raises ``ProgressError`` when it was trained on another text.
        """
        progress = self._file(layer, name).read()
        if progress is None:
            return None
        about = progress.position
        if about.get("text") != self.text:
            raise other_text()
        quality, calibration = (Quality(**about[key]) for key in ("quality", "calibration"))
        if not progress.tensors:
            return CopiedLayer(quality, calibration, about["threshold"])
        fc1, fc2 = (progress.tensors[key].float() for key in ("fc1", "fc2"))
        return TrainedLayer(fc1, fc2, quality, calibration, about["threshold"])

    def write_layer(self, layer: int, name: str, trained: PredictedLayer) -> None:
        """Raises ``PredictorFileError`` if a weight overflows F16."""
        about = {key: asdict(getattr(trained, key)) for key in ("quality", "calibration")}
        weights = {}
        if isinstance(trained, TrainedLayer):
            weights = {"fc1": in_half(trained.fc1, layer), "fc2": in_half(trained.fc2, layer)}
        self._file(layer, name).save(weights, about | {"threshold": trained.threshold, "text": self.text})

    def _file(self, layer: int, name: str) -> ProgressFile:
        return ProgressFile(self.directory / f"layer_{layer}.{name}", self._job)


@contextmanager
def training_files(workspace: Path, job: dict[str, Any], resume: bool, processes: Processes) -> Iterator[TrainingFiles]:
    """The files of *job* in *workspace*; with *resume* those of an earlier run, if there are any.

    Raises ``WorkspaceError`` when another command trains in this workspace. The first process makes and removes the
    directory; the others must wait for it before they enter.
    """
    directory = workspace / DIRECTORY
    if not processes.is_first:
        yield TrainingFiles(directory, job, resume)
        return
    with locked(workspace):
        if not resume:
            shutil.rmtree(directory, ignore_errors=True)
        resumed = directory.exists()
        directory.mkdir(exist_ok=True)
        try:
            yield TrainingFiles(directory, job, resumed)
        except BaseException as error:
            if not _worth_keeping(error):
                shutil.rmtree(directory, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)


def job_under_way(workspace: Path) -> dict[str, Any]:
    """What the training that was interrupted in *workspace* had been asked for; empty if nothing was saved."""
    for pattern in ("sampling.*", "layer_*"):
        for path in sorted((workspace / DIRECTORY).glob(pattern)):
            if job := saved_job(path):
                return job
    return {}


def _worth_keeping(error: BaseException) -> bool:
    """Whether the same command may well succeed later: it was interrupted after something was saved, another process was
    lost, or the files are of another job."""
    context = click.get_current_context(silent=True)
    interrupted = isinstance(error, KeyboardInterrupt) and context is not None and kept(context) is not None
    return interrupted or isinstance(error, ProcessesError | ProgressError)
