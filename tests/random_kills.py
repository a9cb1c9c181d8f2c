"""A command killed with SIGKILL at random moments of its work, and resumed each time.

The moments come from a seed and lie anywhere in the time that a run takes; progress is saved at every step, so that there is
something to resume. Every run is a fork of one process that has imported torch and all else, so that a kill costs the test
milliseconds, and falls into the work rather than the start-up.
"""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pi_toolkit.profiler.progress_file import ProgressFile

WORKSPACE = "{workspace}"  # stands for the workspace among the arguments


def kill_at_random(module: str, arguments: list[str], whole: Path, killed: Path, kills: int, seed: int) -> list[float]:
    """``main`` of *module* runs to its end in the workspace *whole*, and in *killed* with *kills* kills before its end.

    Returns after how much work each kill came, as a share of a run's.
    """
    given = json.dumps([module, arguments, str(whole), str(killed), kills, seed])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, __file__, given], capture_output=True, text=True, check=False, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _main(module: str, arguments: list[str], whole: str, killed: str, kills: int, seed: int) -> None:
    command = importlib.import_module(module).main
    ProgressFile.due = lambda _self: True  # type: ignore[method-assign]

    def run(workspace: str, *more: str) -> None:
        command([argument.replace(WORKSPACE, workspace) for argument in arguments] + [*more], standalone_mode=False)

    run(whole)  # imports
    began = time.monotonic()
    run(whole)
    seconds = time.monotonic() - began
    generator = random.Random(seed)
    moments = sorted(generator.uniform(0, seconds) for _ in range(kills))
    for before, moment in zip([0.0, *moments], moments, strict=False):
        _killed_after(moment - before, lambda: run(killed, "--resume"))
    run(killed, "--resume")
    print(json.dumps([moment / seconds for moment in moments]))


def _killed_after(seconds: float, work: Callable[[], Any]) -> None:
    """Do *work* in a fork of this process, which is killed unless it ends before."""
    deadline = time.monotonic() + seconds
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    time.sleep(max(0.0, deadline - time.monotonic()))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
