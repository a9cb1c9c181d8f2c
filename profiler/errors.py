"""Named errors of the whole toolkit.

Every one derives from ``click.ClickException``: raised inside a command it becomes one line, ``Error: …``, and exit
code 1; for a library user it is an ordinary exception. A message is one sentence that ends in the remedy.
"""

import reprlib

import click

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: object) -> str:
    """``repr`` for a message: a file can hold an integer of a thousand digits or a list of a million items."""
    return _SHORT.repr(value)


class ToolkitError(click.ClickException):
    """Base of every error the toolkit raises on purpose."""


class UnsupportedModelError(ToolkitError):
    """The model's architecture, activation or a config key is not one whose maths this toolkit knows."""


class CheckpointError(ToolkitError):
    """A model directory cannot be found or read, or lacks a tensor."""


class CorpusError(ToolkitError):
    """A corpus cannot be found or read, or holds too little text."""


class WorkspaceError(ToolkitError):
    """A workspace is missing, incomplete, foreign or cannot be written."""


class FingerprintMismatchError(WorkspaceError):
    """A file belongs to another model than the workspace it lies in."""


class ActivationStatsError(WorkspaceError):
    """Activation counts are missing, malformed or of another shape."""


class PredictorFileError(WorkspaceError):
    """Predictor files are missing, malformed or of another shape."""


class GpuIndexError(WorkspaceError):
    """A ``.gpuidx`` is malformed or of another shape."""


class GgufError(ToolkitError):
    """A GGUF container is malformed, truncated or uses what this reader does not know."""


class HardwareError(ToolkitError):
    """A hardware description is unknown, malformed or does not fit what was asked."""


class PlacementError(ToolkitError):
    """No placement meets the constraints, or the solver failed, or its answer did not pass the independent check."""


class GenerationError(ToolkitError):
    """A prompt does not fit, or the mode that was asked for is not possible with the files at hand."""


class HostFunctionError(ToolkitError):
    """A GPU's driver does not take a function of the host into a stream or a graph."""


class BenchmarkError(ToolkitError):
    """A contender of a benchmark cannot run, or what is to be compared does not compute the same."""


class TaskError(ToolkitError):
    """Multiple-choice questions cannot be read, or the library that runs a task is not installed or refuses it."""
