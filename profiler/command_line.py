"""What the four commands share: the shape of a command, option types, tables, progress and the JSON line.

A command's result goes to stdout (with ``--json`` its last line is one JSON object), everything else to stderr. Nothing
here imports torch, so that ``--help`` answers quickly.
"""

import errno
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from .atomic_write import published
from .interruption import interruptible
from .progress_file import kept

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


LARGEST_COUNT = 10**15  # of tokens: beyond it only slips of the keyboard lie
MOST_THREADS = 1024  # as many as no processor has cores: tens of thousands end the process
MOST_SEQUENCES = 2**16  # at once
_TAKE_MEMORY = ("--batch-size", "--slots", "--window", "--ctx", "--tokens")


class ToolkitCommand(click.Command):
    """A click command that turns what the operating system or the user interrupts into one sentence and exit code 1."""

    def invoke(self, context: click.Context) -> Any:
        try:
            with interruptible():
                return super().invoke(context)
        except KeyboardInterrupt:
            written = ", ".join(repr(str(path)) for path in published(context))
            changed = f"{written} was already written" if written else "no output was changed"
            if progress := kept(context):
                changed += f" and the work done so far is in {str(progress)!r}"
                raise click.ClickException(
                    f"interrupted before the end: {changed}, run the command again with --resume"
                ) from None
            raise click.ClickException(f"interrupted before the end: {changed}, run the command again") from None
        except OSError as error:
            if is_out_of_memory(error):
                raise self._out_of_memory() from error
            if error.errno == errno.EPIPE:
                raise  # click ends quietly when the reader of a pipe has gone
            where = f" {str(error.filename)!r}" if error.filename else ""
            raise click.ClickException(
                f"{error.strerror or error}{where}: check that the path is readable or writable and that the disk has room"
            ) from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory() from error

    def _out_of_memory(self) -> click.ClickException:
        """The remedy names the options that this command has."""
        options = {name for parameter in self.params for name in parameter.opts}
        smaller = " or ".join(name for name in _TAKE_MEMORY if name in options)
        remedies = [f"lower {smaller}"] * bool(smaller) + ["use --dtype bfloat16"] * ("--dtype" in options)
        return click.ClickException(
            f"out of memory: {', or '.join(remedies) or 'use a machine with more of it, or a smaller model'}"
        )


def is_out_of_memory(error: Exception) -> bool:
    """Torch raises subclasses of ``RuntimeError`` for a GPU and ``RuntimeError`` itself for a CPU."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return any(
        words in str(error).lower() for words in ("out of memory", "can't allocate memory", "cannot allocate memory")
    )


@dataclass(frozen=True)
class CountType(click.ParamType):
    """A positive whole number that may end in k, M or G (powers of 1000): ``200k``, ``1M``, ``1.5M``."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmMgG]?)", value.strip()) if len(value) < 100 else None
        if not match:
            self.fail(f"{value!r} is not a count: write for example 200k or 1M", param, context)
        number = Fraction(match[1]) * 1000 ** " kmg".index(match[2].lower() or " ")
        if not 1 <= number <= LARGEST_COUNT or number.denominator != 1:
            self.fail(
                f"{value!r} is not a whole number between 1 and {LARGEST_COUNT:,}: write for example 200k or 1M",
                param,
                context,
            )
        return int(number)


@dataclass(frozen=True)
class FiniteFloatType(click.ParamType):
    """A finite number of at least *minimum* (above it with *exclusive*): refuses nan, which click's own range accepts."""

    minimum: float = 0.0
    exclusive: bool = False
    maximum: float = math.inf
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        try:
            number = float(value) if str(value).isascii() else math.nan
        except ValueError:
            self.fail(f"{value!r} is not a number", param, context)
        too_low = number <= self.minimum if self.exclusive else number < self.minimum
        if not math.isfinite(number) or too_low or number > self.maximum:
            bound = f"{'above' if self.exclusive else 'of at least'} {self.minimum:g}"
            upper = f" and at most {self.maximum:g}" if math.isfinite(self.maximum) else ""
            self.fail(f"{value!r} is out of range: give a finite number {bound}{upper}", param, context)
        return number


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")
version_option = click.version_option(package_name="powerinfer-toolkit")
device_option = click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda, cuda:1 …; auto takes a GPU when there is one."
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Type to compute in; auto: the checkpoint's on a GPU, float32 on a CPU where the memory allows.",
)


def given_options(context: click.Context) -> list[click.Parameter]:
    """The parameters that the user set, by command line or environment."""
    default = click.core.ParameterSource.DEFAULT
    return [p for p in context.command.params if context.get_parameter_source(p.name or "") is not default]


def note(message: str) -> None:
    """Say something about the run on stderr."""
    click.echo(message, err=True)


def emit_json(result: dict[str, Any]) -> None:
    """Print *result* as one line; a number that JSON cannot hold is our own mistake and raises ``ValueError``."""
    click.echo(json.dumps(result, allow_nan=False, ensure_ascii=False))


def print_table(columns: dict[str, Sequence[object]]) -> None:
    """Print columns of equal length to stdout, right-aligned under their titles."""
    import pandas

    click.echo(pandas.DataFrame(columns).to_string(index=False))


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def readable_bytes(num_bytes: float) -> str:
    """In the largest binary unit that leaves at least 1: ``10.2 MiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.2f} GiB"


class TokenProgress:
    """One bar on stderr: done, speed and time left."""

    def __init__(self, progress: "Progress", task: "TaskID") -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: int) -> None:
        self._progress.advance(self._task, amount)


@contextmanager
def progress_bar(title: str, total: int, unit: str = "tokens", shown: bool = True) -> Iterator[TokenProgress]:
    """A progress bar on stderr with the speed in *unit* per second and the time left; erased when done, and not there at
    all unless *shown* on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class SpeedColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:,.0f} {unit}/s" if speed else f"– {unit}/s")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        SpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        yield TokenProgress(progress, progress.add_task(title, total=total))
