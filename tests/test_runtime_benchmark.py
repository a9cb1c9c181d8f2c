"""The order of the runs, what must agree before anything is timed, and the arithmetic of the report."""

from typing import Any

import pytest

from pi_toolkit.profiler.errors import BenchmarkError
from pi_toolkit.runtime.bench_bytes import Touched
from pi_toolkit.runtime.bench_contenders import Task, Timing
from pi_toolkit.runtime.bench_report import print_report, ratios, to_json
from pi_toolkit.runtime.benchmark import Entrant, Plan, run_benchmark

PLAN = Plan({2: (5, 6), 8: tuple(range(8))}, steps=4, runs=3)
TOKENS = (1, 2, 3, 4, 5)
CONDITIONS: dict[str, Any] = {
    "cpu": "a CPU",
    "cores": 2,
    "threads": 1,
    "load_average": 0.0,
    "other_processes_cores": 0.5,
    "versions": {"torch": "2"},
    "instruction_sets": {"a": "avx2"},
    "file_bytes": {"a.gguf": 10**6},
}


class FakeWorker:
    """Answers at a fixed speed and writes down when it was asked."""

    def __init__(self, log: list[str], name: str, seconds_per_token: float, tokens: dict[str, tuple[int, ...]]) -> None:
        self.log, self.name, self.seconds, self.tokens = log, name, seconds_per_token, tokens
        self.facts: dict[str, Any] = {"bytes_per_token": 1000, "cache_bytes_per_position": 10, "on_cpu": True}

    def ask(self, question: str, *arguments: Any) -> Any:
        if question == "bytes_per_second":
            return 0.5e6, 1e6
        if question == "count":
            return Touched(100.0, 0.0, 50.0, 5.0, firing_share=0.1, candidate_share=None)
        task: Task = arguments[0]
        self.log.append(f"{self.name} {task.mode} {len(task.prompt)}+{task.steps}")
        return Timing(0.5, self.seconds * task.steps, self.tokens.get(task.mode or "", ()))


def entrants(log: list[str], exact: tuple[int, ...] = TOKENS) -> list[Entrant]:
    own: Any = FakeWorker(log, "own", 0.01, {"dense": TOKENS, "exact": exact, "predicted": (1, 2, 9, 4, 5)})
    other: Any = FakeWorker(log, "other", 0.02, {})
    modes = [Entrant(f"{mode} f", own, "f", mode) for mode in ("dense", "exact", "predicted")]
    return [*modes, Entrant("other g", other, "g")]


def reader() -> Any:
    return FakeWorker([], "reader", 0.0, {})


def test_contenders_alternate_run_by_run() -> None:
    """Blocks of one contender, which a busy minute slows alone."""
    log: list[str] = []
    benchmark = run_benchmark(entrants(log), reader(), PLAN)
    warm_up = ["own dense 2+4", "own exact 2+4", "own predicted 2+4", "other None 2+4"]
    one_round = [line for call in warm_up for line in (call, call.replace("2+4", "8+0"))]
    assert log == warm_up + 3 * one_round
    assert [len(result.decode_runs) for result in benchmark.results] == [3] * 4
    assert all(set(result.prompt_runs) == {2, 8} for result in benchmark.results)


def test_dense_and_exact_must_agree() -> None:
    """Ratios of two computations that are not the same."""
    log: list[str] = []
    with pytest.raises(BenchmarkError, match=r"exact f and dense f part after 1 tokens.*report this bug"):
        run_benchmark(entrants(log, exact=(1, 7, 3, 4, 5)), reader(), PLAN)
    assert len(log) == 4, "nothing was timed"


def test_agreement_is_reported() -> None:
    """A predictor that changes the text from the first token on, unseen behind its speed."""
    agreements = run_benchmark(entrants([]), reader(), PLAN).agreements
    assert [(one.name, one.equal, one.tokens) for one in agreements] == [("exact f", 5, 5), ("predicted f", 2, 5)]


def test_densities_are_compared_with_nothing() -> None:
    """An error about texts that are nonsense by construction."""
    log: list[str] = []
    worker: Any = FakeWorker(log, "own", 0.01, {"dense": TOKENS, "exact": (9,) * 5})
    made_up = [Entrant("dense", worker, "f", "dense"), Entrant("exact at 5 %", worker, "f", "exact", 0.05)]
    assert run_benchmark(made_up, reader(), PLAN).agreements == []


def test_json_figures() -> None:
    """A ratio upside down, or bytes of one contender in another's row."""
    report = to_json(run_benchmark(entrants([]), reader(), PLAN), PLAN, CONDITIONS)
    dense, *_, other = report["contenders"]
    assert dense["decode_tokens_per_second"] == dense["min"] == dense["max"] == pytest.approx(100)
    assert dense["prompt_tokens_per_second"] == pytest.approx(8 / 0.5), "of the longest prompt"
    assert dense["prompts"]["2"]["median"] == pytest.approx(2 / 0.5)
    assert dense["bytes_per_token"] == 155
    assert dense["bandwidth_share"] == pytest.approx(155 * 100 / 1e6), "of the better way to read"
    assert other["bytes_per_token"] == 1000 + 10 * (2 + 5 / 2), "weights and the cache half way"
    pairs = {(row["name"], row["against"]): row["decode"] for row in report["ratios"]}
    assert pairs.pop(("dense f", "other g")) == pytest.approx(2)
    assert set(pairs) == {(f"{mode} f", base) for mode in ("exact", "predicted") for base in ("dense f", "other g")}


def test_types_are_compared_with_their_own() -> None:
    """Our Q4_0 beside llama.cpp's F16, which looks like a triumph."""
    own: Any = FakeWorker([], "own", 0.01, {"dense": TOKENS})
    fast: Any = FakeWorker([], "own q4_0", 0.01, {"dense": TOKENS})
    others: Any = [FakeWorker([], "llama", 0.02, {}) for _ in range(3)]
    names = ("llama.cpp:a float16", "llama.cpp:b q4_0", "transformers:c bfloat16")
    compared = [Entrant("dense float16", own, "float16", "dense"), Entrant("dense q4_0", fast, "q4_0", "dense")]
    compared += [Entrant(name, worker, name.split()[1]) for name, worker in zip(names, others, strict=True)]
    pairs = {(row["name"], row["against"]) for row in ratios(run_benchmark(compared, reader(), PLAN), PLAN)}
    assert pairs == {
        ("dense float16", "llama.cpp:a float16"),
        ("dense float16", "transformers:c bfloat16"),
        ("dense q4_0", "llama.cpp:b q4_0"),
        ("dense q4_0", "transformers:c bfloat16"),
    }


def test_the_printed_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures without their conditions."""
    print_report(run_benchmark(entrants([]), reader(), PLAN), PLAN, CONDITIONS)
    printed = capsys.readouterr().out
    for words in (
        "100.0",
        "2.00 ×",
        "first 2 of 5",
        "a CPU",
        "at start 0.00",
        "used 0.50 cores",
        "torch 2",
        "avx2",
        "1 MB",
    ):
        assert words in printed
    assert "made up" not in printed
