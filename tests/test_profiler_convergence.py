"""Agreement of two counts by definitions written out, and what pi-profile says of halves and of another corpus."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi_toolkit.profiler.cli import main
from pi_toolkit.profiler.convergence import hot_overlap, measure_agreement, measure_convergence, rank_correlation
from tiny_corpus import WORDS
from tiny_models import save_family


def test_rank_correlation_by_its_definition() -> None:
    """Prevents Pearson's in place of Spearman's, and ties that are broken by a neuron's number."""
    first, second = np.array([1, 5, 5, 1000, 0]), np.array([0, 2, 3, 4, 1])
    ranks = np.array([2, 3.5, 3.5, 5, 1]), np.array([1, 3, 4, 5, 2])
    assert rank_correlation(first, second) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert rank_correlation(first, first**2) == pytest.approx(1.0)
    assert rank_correlation(first, -first) == pytest.approx(-1.0)
    assert rank_correlation(first, np.zeros(5)) is None and rank_correlation(first[:1], second[:1]) is None


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ([9, 8, 1, 1, 1, 1, 1, 1, 1, 1], [9, 1, 8, 1, 1, 1, 1, 1, 1, 1], 0.5),
        ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], 0.0),
        ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 7, 8], 1.0),
        ([3], [0], 1.0),
    ],
)
def test_overlap_of_the_hottest_fifth(first: list[int], second: list[int], overlap: float) -> None:
    """Prevents a share of all neurons, or of the coldest, from being called an overlap of the hottest."""
    assert hot_overlap(np.array(first), np.array(second)) == overlap == hot_overlap(np.array(second), np.array(first))


def test_the_whole_model_is_compared_as_one() -> None:
    """Prevents a mean over layers, in which a layer of few neurons counts as much as a wide one."""
    first = [np.array([10, 9, 8, 7, 6]), np.array([0, 0, 0, 0, 1])]
    second = [np.array([10, 9, 8, 7, 6]), np.array([1, 0, 0, 0, 0])]
    agreement = measure_agreement(first, second, (10, 20))
    assert (agreement.hot_overlap, agreement.hot_overlap_model) == ([1.0, 0.0], 1.0)
    halves = [np.stack(pair) for pair in zip(first, second, strict=True)]
    convergence = measure_convergence(halves, (10, 20))
    assert convergence and convergence.halves == agreement
    assert convergence.half_and_all.tokens == (10, 30) and convergence.half_and_all.hot_overlap == [1.0, 0.0]
    assert measure_convergence(halves, (30, 0)) is None


def test_profile_reports_halves_and_another_corpus(tmp_path: Path, run: Callable[..., Any]) -> None:
    """Prevents numbers that differ between the table, profile.json and the page, and halves that share tokens."""
    model = save_family(tmp_path / "tiny", "llama")
    for name, words in (("one", WORDS), ("two", WORDS[::-1])):
        text = "\n\n".join(" ".join(words[n % 7 :] + words[: n % 11]) for n in range(80))
        (tmp_path / f"{name}.txt").write_text(text)
    results, stdout = [], ""
    for name, more in (("one", []), ("two", ["--compare", tmp_path / "one"])):
        given = ("--corpus", tmp_path / f"{name}.txt", "--tokens", "600", "--window", "16", "-o", tmp_path / name)
        result = run(main, model, *given, *more, "--json")
        assert result.exit_code == 0, result.output
        stdout = result.stdout
        results.append(json.loads(stdout.splitlines()[-1]))
    about = json.loads((tmp_path / "two" / "activation" / "profile.json").read_text())
    halves, comparison = about["convergence"]["halves"], about["comparison"]
    assert results[1]["convergence"] == about["convergence"] and results[0]["comparison"] is None
    assert sum(halves["tokens"]) == 600 and about["convergence"]["half_and_all"]["tokens"] == [halves["tokens"][0], 600]
    assert comparison["corpus"] == "one.txt" and comparison["tokens"] == [600, 600]
    assert {name: value for name, value in comparison.items() if name != "corpus"} == results[1]["comparison"]
    page = (tmp_path / "two" / "activation" / "report.html").read_text()
    for agreement in (halves, about["convergence"]["half_and_all"], comparison):
        shown = f"{100 * agreement['hot_overlap_model']:.2f} %"
        assert shown in stdout and shown in page
    assert "this corpus and one.txt agree on" in stdout and "on one.txt (600 and 600 tokens)" in page


def test_one_document_has_no_halves(tmp_path: Path, run_json: Callable[..., dict[str, Any]]) -> None:
    """Prevents a division by zero, or an agreement of counts with nothing."""
    model = save_family(tmp_path / "tiny", "llama")
    (tmp_path / "text.txt").write_text("held out\n\n" + " ".join(WORDS * 9))
    result = run_json(main, model, "--corpus", tmp_path / "text.txt", "--tokens", "64", "-o", tmp_path / "pi")
    assert result["convergence"] is None
    assert "too short to be divided into two halves" in (tmp_path / "pi" / "activation" / "report.html").read_text()


def test_compare_wants_a_profile(tmp_path: Path, refuses: Callable[..., str]) -> None:
    """Prevents an hour of profiling before the other workspace turns out to be empty."""
    model = save_family(tmp_path / "tiny", "llama")
    (tmp_path / "text.txt").write_text("a\n\nb")
    message = refuses(main, model, "--corpus", tmp_path / "text.txt", "--compare", tmp_path, "-o", tmp_path / "pi")
    assert message.endswith("is missing: run pi-profile first")
