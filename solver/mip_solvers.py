"""The programs that solve integer programs: CBC in a process of its own, HiGHS in this one. Never believed beyond what they
can know: what counts is whether an answer exists, whether it is proven best, and that its integers are integral."""

import errno
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import pulp

from pi_toolkit.profiler.errors import PlacementError

T = TypeVar("T")
Status = Literal["optimal", "feasible", "greedy"]
OPTIMAL_GAP = 1e-4  # relative; an answer proven to be within it is called optimal
SOLVER_TOLERANCE = 1e-7  # relative; CBC was 1e-8 short before firings were scaled, exact in ten large instances since
SOLVERS_SHARE = 0.99  # of an allowed gap; the rest is for the tolerance
_TITLES = {"cbc": "CBC", "highs": "HiGHS"}
SOLVERS = tuple(_TITLES)
_REINSTALL = {"cbc": "'pulp[cbc]'", "highs": "highspy"}
_INTEGRALITY_TOLERANCE = 1e-5
_DUMMY = "__dummy"  # what PuLP adds to an objective without variables; solvers may leave it out
# Folders for the files that PuLP and CBC exchange, where the system's own has a space in its path: PuLP splits CBC's
# command line at spaces.
_PLAIN_FOLDERS = ("/dev/shm", "/tmp", "/var/tmp")


class SolverUnusableError(PlacementError):
    """A solver is missing, crashed, or answered nonsense; another may do better."""


class SolverTimeoutError(SolverUnusableError):
    """A solver ran out of time without an answer."""


def solve_program(
    program: pulp.LpProblem, solver: str, time_limit_seconds: float, gap: float, options: Iterable[str] = ()
) -> bool | None:
    """Solve *program*, whose variables then hold the answer: True when it is proven to be within the relative *gap* of the
    best, False when it merely exists, None when the solver found that no answer does.

    *options* are CBC's. One thread and fixed seeds: the same problem gives the same answer, unless the time limit cuts the
    search short. Raises ``SolverUnusableError``.
    """
    title = _TITLES[solver]
    began = time.monotonic()
    try:
        if solver == "cbc":
            _run_cbc(program, time_limit_seconds, gap, options)
        else:
            _run_highs(program, time_limit_seconds, gap)
    except (pulp.PulpSolverError, OSError, ImportError, ValueError, IndexError, AttributeError) as error:
        raise SolverUnusableError(f"{title} cannot be used {_fault_and_remedy(error, solver)}") from error
    # PuLP's `status` says "Optimal" after a time-out, and `sol_status` may say so too over fractional values.
    if program.sol_status == pulp.LpSolutionInfeasible:
        return None
    if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise SolverTimeoutError(f"{title} found no placement within {time_limit_seconds:g} s: raise --time-limit")
    values = [(v.value(), v.cat == pulp.LpInteger) for v in program.variables() if v.name != _DUMMY]
    if any(v is None or (whole and abs(v - round(v)) > _INTEGRALITY_TOLERANCE) for v, whole in values):
        raise SolverUnusableError(f"{title}'s answer is not integral: raise --time-limit")
    return program.sol_status == pulp.LpSolutionOptimal and time.monotonic() - began < time_limit_seconds


def _fault_and_remedy(error: Exception, solver: str) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"(no room for its files in {tempfile.gettempdir()}): make room there, or name another folder in TMPDIR"
    # PuLP says of a solver that was killed, or crashed, where it lies and how to see its output.
    fault = "it ended without an answer" if isinstance(error, pulp.PulpSolverError) else error
    return f"({fault}): reinstall it with pip install {_REINSTALL[solver]}"


def first_usable(solver: str, attempt: Callable[[str], T]) -> tuple[T | None, str | None]:
    """What *attempt* returns for *solver*, else for the other one, else None; and why not for *solver*, where it failed.

    "greedy" attempts nothing. After a time-out nothing else is attempted.
    """
    if solver == "greedy":
        return None, None
    reasons = []
    for name in sorted(_TITLES, key=lambda name: name != solver):
        try:
            result = attempt(name)
        except SolverUnusableError as error:
            reasons.append(error.message)
            if isinstance(error, SolverTimeoutError):
                break
        else:
            instead = f"{_TITLES[name]} is used instead: {reasons[0]}" if reasons else None
            return result, instead
    return None, "the greedy placement is used instead: " + "; ".join(reasons)


def status_of(gap: float) -> Status:
    """Of a solver's answer that is proven to be within the relative *gap* of the best."""
    return "optimal" if gap <= OPTIMAL_GAP else "feasible"


def is_one(variable: Any) -> bool:
    """The value of a binary variable of a solved program."""
    return round(variable.value()) == 1


def _run_cbc(program: pulp.LpProblem, time_limit_seconds: float, gap: float, options: Iterable[str]) -> None:
    seeds = ["randomSeed 1", "randomCbcSeed 1"]
    solver = pulp.COIN_CMD(
        path=_cbc_path(), msg=False, gapRel=gap, timeLimit=time_limit_seconds, options=[*seeds, *options]
    )
    with tempfile.TemporaryDirectory(dir=_folder_without_spaces()) as solver.tmpDir, _started_processes_end():
        program.solve(solver)


def _run_highs(program: pulp.LpProblem, time_limit_seconds: float, gap: float) -> None:
    import highspy

    class Quiet(highspy.Highs):
        def enableCallbacks(self) -> None:
            """Left out: it makes HiGHS print its name to stdout before it can be told not to."""

    class QuietSolver(pulp.HiGHS):
        def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
            lp.solverModel = Quiet()
            options = {"output_flag": False, "mip_rel_gap": gap, "mip_abs_gap": 0.0, "threads": 1}
            for name, value in (options | {"time_limit": float(time_limit_seconds)}).items():
                lp.solverModel.setOptionValue(name, value)

    solver = QuietSolver(msg=False)
    if not solver.available():
        raise ImportError("highspy is not installed")
    program.solve(solver)


def _folder_without_spaces() -> str | None:
    """None for the system's own folder of temporary files."""
    if not any(sign.isspace() for sign in tempfile.gettempdir()):
        return None
    return next((folder for folder in _PLAIN_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), None)


@contextmanager
def _started_processes_end() -> Iterator[None]:
    """On any exception, end what this thread started inside the block: PuLP only waits for CBC, which would go on
    computing for nobody until its time limit."""
    before = _children()
    try:
        yield
    except BaseException:
        for process in _children() - before:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        raise


def _children() -> set[int]:
    """Processes this thread started; none where the system does not list them (other than Linux)."""
    try:
        return {int(process) for process in Path("/proc/thread-self/children").read_text("ascii").split()}
    except OSError:
        return set()


def _cbc_path() -> str:
    import cbcbox

    path = cbcbox.cbc_bin_path()
    if not Path(path).is_file():
        raise FileNotFoundError(f"no binary at {path}")
    return path
