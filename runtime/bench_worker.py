"""A contender in a process of its own, which stays warm and answers one question at a time.

Libraries bring thread pools that spin while they wait for work. In one process, or in two that work at once, they take
the cores from each other; so each has its process, and none is asked before the one before it has answered and its
threads lie still.
"""

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pi_toolkit.profiler.errors import BenchmarkError, ToolkitError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# OpenMP's threads spin for some 10 ms behind their last job (xllamacpp's wheel, two threads). A process is still when it
# used less than a tenth of a slice of time and no thread of it waits for a core, and nobody waits longer than the limit.
SLICE_SECONDS, LONGEST_WAIT_SECONDS = 0.02, 2.0


class Contender(Protocol):
    """What a recipe opens inside the worker; its methods are the questions."""

    def facts(self) -> dict[str, Any]: ...


class Recipe(Protocol):
    """How to make a contender; travels to the worker by pickle."""

    @property
    def title(self) -> str: ...

    def open(self) -> Contender: ...


class Worker:
    """The process of one *recipe*; ``facts`` is what its contender says about itself.

    Raises the contender's own named error when it cannot be opened, and ``BenchmarkError`` when its process ends.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._title = recipe.title
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, recipe), daemon=True)
        self._process.start()
        theirs.close()
        self.facts: dict[str, Any] = self._answer()

    @property
    def process(self) -> int:
        """Its number in the system."""
        return self._process.pid or 0

    def ask(self, question: str, *arguments: Any) -> Any:
        """Call the contender's method *question*."""
        with contextlib.suppress(BrokenPipeError):  # its end is reported by _answer
            self._pipe.send((question, arguments))
        return self._answer()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(timeout=5)
            raise BenchmarkError(
                f"the process of {self._title} ended with exit code {self._process.exitcode}: see its own words above, and "
                "check that all contenders fit into memory together"
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer


@contextlib.contextmanager
def open_workers(recipes: Sequence[Recipe]) -> Iterator[list[Worker]]:
    """Workers of all recipes, opened one after the other; ended on the way out, whatever happens."""
    with contextlib.ExitStack() as stack:
        opened = []
        for recipe in recipes:
            opened.append(Worker(recipe))
            stack.callback(opened[-1].close)
        yield opened


def _serve(pipe: "Connection", recipe: Recipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it then closes the pipe
    contender: Contender | None = None
    question, arguments = "facts", ()
    while True:
        try:
            contender = contender or recipe.open()
            answer = getattr(contender, question)(*arguments)
            _wait_until_still()
        except (ToolkitError, OSError, MemoryError) as error:
            answer = error
        try:
            pipe.send(answer)
            question, arguments = pipe.recv()
        except (EOFError, OSError):
            return


def _wait_until_still() -> None:
    """Sleep until this process's threads no longer use the cores."""
    for _ in range(round(LONGEST_WAIT_SECONDS / SLICE_SECONDS)):
        before = time.process_time()
        time.sleep(SLICE_SECONDS)
        if time.process_time() - before < SLICE_SECONDS / 10 and not _others_are_running():
            return


def _others_are_running() -> bool:
    """Whether another thread of this process runs or would, if others left it a core; False where the system does not say."""
    mine = threading.get_native_id()
    for thread in Path("/proc/self/task").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(thread.parent.name) != mine and thread.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
