"""What ``pi-eval`` prints, and the same as JSON."""

import math
from collections.abc import Sequence
from typing import Any

import click

from pi_toolkit.predictor_training.predictor import Quality
from pi_toolkit.profiler.command_line import percent, print_table

from .eval_text import TextEvaluation
from .perplexity import Score


def print_text_evaluation(found: TextEvaluation, conditions: dict[str, Any]) -> None:
    """Perplexities, neurons by layer, what was measured on."""
    first_name, first = next(iter(found.scores.items()))
    others = [score for name, score in found.scores.items() if name != first_name]
    print_table(
        {
            "": list(found.scores),
            "perplexity": [f"{score.perplexity:.3f}" for score in found.scores.values()],
            f"against {first_name}": ["–", *(_change(score, first) for score in others)],
            "KL (nats)": ["–", *(f"{score.kl:.6f}" for score in others)],
            "same first choice": ["–", *(percent(score.top1_agreement) for score in others)],
        }
    )
    for title, qualities in (
        (f"neurons of {found.watched_mode} on the windows", found.evaluating),
        (f"neurons of {found.watched_mode} in {found.decoding_steps:,} decoding steps", found.generating),
    ):
        if qualities:
            click.echo(f"\n{title}")
            _print_neurons(qualities, with_predictors=found.watched_mode == "predicted")
    click.echo(f"\n{_describe(found, conditions)}")
    if found.alarm:
        click.echo(f"ALARM: {found.alarm}")


def _change(score: Score, first: Score) -> str:
    error = score.change_error(first)
    change = f"{100 * score.change_from(first):+.3f}"
    return f"{change} %" if error is None else f"{change} ± {100 * error:.3f} %"


def _print_neurons(qualities: Sequence[Quality], with_predictors: bool) -> None:
    table: dict[str, Sequence[object]] = {"layer": range(len(qualities))}
    if with_predictors:
        table["recall"] = [f"{quality.recall:.4f}" for quality in qualities]
        table["precision"] = [f"{quality.precision:.4f}" for quality in qualities]
        table["candidates"] = [percent(quality.density) for quality in qualities]
    table["fire"] = [percent(quality.firing_share) for quality in qualities]
    print_table(table)
    if with_predictors:
        whole = Quality(*(sum(getattr(q, name) for q in qualities) for name in Quality.__dataclass_fields__))
        per_firing = whole.candidates / whole.firings if whole.firings else math.nan
        click.echo(f"all layers: recall {whole.recall:.4f}, {per_firing:.2f} candidates per firing")


def _describe(found: TextEvaluation, conditions: dict[str, Any]) -> str:
    bos = conditions["bos_id"]
    begins = "the tokenizer adds no BOS" if bos is None else f"BOS (token {bos}) in front of every {conditions['bos']}"
    documents = "held-out documents" if conditions["split"] == "held-out" else "all documents"
    return (
        f"{found.predictions:,} predictions in {len(found.windows):,} windows of {conditions['window']} tokens, one every "
        f"{conditions['stride']}, from position {conditions['score_from']} on; {documents} of {conditions['corpus']}; "
        f"{begins}; weights in {conditions['dtype']}"
    )


def text_json(found: TextEvaluation) -> dict[str, Any]:
    """``layers`` are those counted while generating, or on the windows where nothing was generated; ``kl`` and the other
    comparisons are those of mode predicted with dense, and null where one of them did not run."""
    compared = {name: _compared(score, found.scores) for name, score in found.scores.items()}
    predicted = compared.get("predicted", {})
    return {
        **{f"perplexity_{mode}": compared.get(mode, {}).get("perplexity") for mode in ("dense", "exact", "predicted")},
        **{name: predicted.get(name) for name in ("delta_percent", "kl", "top1_agreement")},
        "layers": _layers(found.generating or found.evaluating),
        "tokens": found.predictions,
        "windows": len(found.windows),
        "layers_on_windows": _layers(found.evaluating),
        "compared": compared,
        "alarm": found.alarm,
    }


def _compared(score: Score, scores: dict[str, Score]) -> dict[str, float | None]:
    """*score* beside that of mode dense; a perplexity beyond a float is null."""
    dense, error = scores.get("dense"), None
    if dense and dense is not score:
        error = score.change_error(dense)
    numbers = {
        "perplexity": score.perplexity,
        "delta_percent": 100 * score.change_from(dense) if dense else None,
        "delta_percent_error": None if error is None else 100 * error,
        "kl": score.kl if dense else None,
        "top1_agreement": score.top1_agreement if dense else None,
    }
    return {name: number if number is not None and math.isfinite(number) else None for name, number in numbers.items()}


def _layers(qualities: Sequence[Quality]) -> list[dict[str, float]]:
    return [
        {
            "layer": layer,
            "recall": quality.recall,
            "precision": quality.precision,
            "density": quality.density,
            "firing_share": quality.firing_share,
        }
        for layer, quality in enumerate(qualities)
    ]


def print_tasks(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """One row per task and mode, one column per metric; *results* by task, mode and metric."""
    names = (name for modes in results.values() for found in modes.values() for name in found)
    metrics = [name for name in dict.fromkeys(names) if name != "left_out"]  # which has been said
    rows = [(task, mode, found) for task, modes in results.items() for mode, found in modes.items()]
    table: dict[str, Sequence[object]] = {"task": [row[0] for row in rows], "mode": [row[1] for row in rows]}
    for metric in metrics:
        table[metric] = [_figure(found.get(metric)) for _, _, found in rows]
    print_table(table)


def _figure(number: float | None) -> str:
    """Counts as whole numbers, shares with four places."""
    if number is None:
        return "–"
    return f"{number:,.0f}" if number >= 2 and number == int(number) else f"{number:.4f}"
