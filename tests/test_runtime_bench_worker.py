"""Contenders in processes of their own: questions, named errors from the other side, and a process that dies."""

import hashlib
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from pi_toolkit.profiler.errors import BenchmarkError, GenerationError
from pi_toolkit.runtime.bench_worker import SLICE_SECONDS, Worker, open_workers


@dataclass(frozen=True)
class EchoRecipe:
    """A contender that says what it was asked, or fails on purpose."""

    title: str = "echo"
    refuses: bool = False

    def open(self) -> "Echo":
        if self.refuses:
            raise GenerationError("nothing to open: give something")
        return Echo()


class Echo:
    def facts(self) -> dict[str, Any]:
        return {"process": os.getpid()}

    def say(self, word: str) -> str:
        return word

    def fail(self) -> None:
        raise BenchmarkError("cannot: do otherwise")

    def die(self) -> None:
        os._exit(3)

    def leave_a_thread_spinning(self, seconds: float) -> None:
        def spin() -> None:
            end, block = time.perf_counter() + seconds, bytes(2**20)
            while time.perf_counter() < end:
                hashlib.sha256(block)  # without Python's lock, as the threads of a library spin

        threading.Thread(target=spin).start()


def test_a_worker_answers_from_a_process_of_its_own() -> None:
    """Thread pools of two libraries in one process."""
    with open_workers([EchoRecipe(), EchoRecipe()]) as workers:
        processes = {worker.facts["process"] for worker in workers}
        assert len(processes) == 2 and os.getpid() not in processes
        assert [worker.ask("say", word) for worker, word in zip(workers, "ab", strict=True)] == ["a", "b"]
        with pytest.raises(BenchmarkError, match="cannot: do otherwise"):
            workers[0].ask("fail")
        assert workers[0].ask("say", "still here") == "still here"


def test_an_answer_waits_until_threads_lie_still() -> None:
    """The next contender's time with the cores still taken by the one before."""
    with open_workers([EchoRecipe()]) as (worker,):
        began = time.perf_counter()
        worker.ask("leave_a_thread_spinning", 10 * SLICE_SECONDS)
        assert time.perf_counter() - began >= 10 * SLICE_SECONDS


def test_errors_of_opening_keep_their_name() -> None:
    """A missing file reported as a broken pipe."""
    with pytest.raises(GenerationError, match="nothing to open"):
        Worker(EchoRecipe(refuses=True))


def test_a_process_that_dies_is_named() -> None:
    """A benchmark that hangs because the system took a contender's memory away."""
    with open_workers([EchoRecipe(title="mortal")]) as (worker,):
        with pytest.raises(BenchmarkError, match="process of mortal ended with exit code 3"):
            worker.ask("die")
        with pytest.raises(BenchmarkError, match="process of mortal"):
            worker.ask("say", "anything")
