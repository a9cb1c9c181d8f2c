"""Contenders timed in turn, run by run, so that whatever slows the machine for a while slows all of them alike.

A run of one contender: each prompt length once, the shortest followed by the decoding steps. The runs go ABC ABC …, never
AAA BBB, and a figure is the median of a contender's runs.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pi_toolkit.profiler.errors import BenchmarkError

from .bench_contenders import Task, Timing
from .bench_worker import Worker

if TYPE_CHECKING:
    from .bench_bytes import Touched
    from .kernels.sparse_ffn_reference import Mode

MUST_AGREE = 8  # tokens: what dense and exact have in common whatever the order of their sums


@dataclass(frozen=True)
class Entrant:
    """One row of the report: a worker, and for ourselves a mode and perhaps a made-up density."""

    name: str
    worker: Worker
    dtype: str
    mode: "Mode | None" = None
    density: float | None = None

    @property
    def is_own(self) -> bool:
        return self.mode is not None


@dataclass(frozen=True)
class Spread:
    """Runs of one quantity."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, runs: Sequence[float]) -> "Spread":
        return cls(statistics.median(runs), min(runs), max(runs))


@dataclass
class Result:
    """Tokens per second of one entrant, run by run; ``touched`` is None where it is not ours to count."""

    entrant: Entrant
    warm_up: Timing
    touched: "Touched | None" = None
    decode_runs: list[float] = field(default_factory=list)
    prompt_runs: dict[int, list[float]] = field(default_factory=dict)

    @property
    def decode(self) -> Spread:
        return Spread.of(self.decode_runs)

    def prompt(self, length: int) -> Spread:
        return Spread.of(self.prompt_runs[length])


@dataclass(frozen=True)
class Agreement:
    """How many of the first *tokens* greedy tokens are those of the mode dense of the same weights."""

    name: str
    against: str
    equal: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """``prompts`` by length, the shortest first; ``steps`` decoding steps behind that one, ``runs`` times."""

    prompts: dict[int, tuple[int, ...]]
    steps: int
    runs: int

    @property
    def shortest(self) -> tuple[int, ...]:
        return self.prompts[min(self.prompts)]

    @property
    def mean_positions(self) -> float:
        """Keys that a decoding step reads, on average."""
        return len(self.shortest) + (self.steps + 1) / 2


@dataclass(frozen=True)
class Benchmark:
    """``read_runs``: bytes per second of sequential reading in each round, by the kernels (0 without) and by torch."""

    results: list[Result]
    agreements: list[Agreement]
    read_runs: list[tuple[float, float]]

    @property
    def read_bytes_per_second(self) -> float:
        """The better of the two ways, each the median of its rounds."""
        return max(statistics.median(runs) for runs in zip(*self.read_runs, strict=True))


def run_benchmark(
    entrants: Sequence[Entrant], reader: Worker, plan: Plan, advance: Callable[[int], None] = lambda _: None
) -> Benchmark:
    """Warm up, check that modes agree, count what they read, then time them in turn; calls *advance* once per run.

    Raises ``BenchmarkError`` when dense and exact part within their first tokens.
    """
    results = []
    for entrant in entrants:
        results.append(Result(entrant, _ask(entrant, plan.shortest, plan.steps)))
        advance(1)
    agreements = check_agreement(results)
    for result in results:
        if result.entrant.is_own:
            task = _task(result.entrant, plan.shortest, plan.steps)
            result.touched = result.entrant.worker.ask("count", task, result.warm_up.token_ids)
    read_runs = []
    for _ in range(plan.runs):
        by_kernel, by_sum = reader.ask("bytes_per_second")
        read_runs.append((by_kernel or 0.0, by_sum))
        for result in results:
            _time(result, plan)
            advance(1)
    return Benchmark(results, agreements, read_runs)


def check_agreement(results: Sequence[Result]) -> list[Agreement]:
    """Compare the warm-up's tokens of every mode with those of dense on the same weights and density.

    Raises ``BenchmarkError`` when exact, which is dense up to rounding, leaves it at once.
    """
    agreements = []
    for reference in (result for result in results if result.entrant.mode == "dense"):
        for result in results:
            mine, theirs = result.entrant, reference.entrant
            if mine.worker is not theirs.worker or mine.density != theirs.density or mine.mode in (None, "dense"):
                continue
            tokens = len(reference.warm_up.token_ids)
            equal = _equal_tokens(result.warm_up.token_ids, reference.warm_up.token_ids)
            if mine.mode == "exact" and equal < min(MUST_AGREE, tokens):
                raise BenchmarkError(
                    f"{mine.name} and {theirs.name} part after {equal} tokens, so that their speeds say nothing: report this "
                    "bug, and compare with --dtype float32"
                )
            agreements.append(Agreement(mine.name, theirs.name, equal, tokens))
    return agreements


def _equal_tokens(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Before the first difference."""
    return next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), len(mine))


def _time(result: Result, plan: Plan) -> None:
    for length, prompt in plan.prompts.items():
        steps = plan.steps if prompt is plan.shortest else 0
        timing = _ask(result.entrant, prompt, steps)
        result.prompt_runs.setdefault(length, []).append(length / timing.prompt_seconds)
        if steps:
            result.decode_runs.append(steps / timing.decode_seconds)


def _task(entrant: Entrant, prompt: tuple[int, ...], steps: int) -> Task:
    return Task(prompt, steps, entrant.mode, entrant.density)


def _ask(entrant: Entrant, prompt: tuple[int, ...], steps: int) -> Timing:
    return entrant.worker.ask("time", _task(entrant, prompt, steps))
