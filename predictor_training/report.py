"""``report.html`` beside the predictors: what each layer's predictor finds, what it names in vain and how large it is."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pi_toolkit.profiler.command_line import percent, readable_bytes
from pi_toolkit.profiler.model_families import ModelShape
from pi_toolkit.profiler.report import ACCENT, MUTED, SECOND, Report, figure_style, new_figure

from .predictor_file import LayerQuality
from .predictor_size import F16_BYTES, predictor_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def training_report(name: str, shape: ModelShape, quality: Sequence[LayerQuality], about: dict[str, Any]) -> bytes:
    """The page about the predictors of the model *name*; *about* is what their ``config.json`` says of the training."""
    num_bytes = [
        predictor_bytes(shape.hidden_size, n, layer.size) for layer, n in zip(quality, shape.ffn_sizes, strict=True)
    ]
    copies = any(layer.kind == "copy" for layer in quality)
    firing = sum(layer.firing_share * n for layer, n in zip(quality, shape.ffn_sizes, strict=True))
    named = sum(layer.density * n for layer, n in zip(quality, shape.ffn_sizes, strict=True))
    found = sum(layer.recall * layer.firing_share * n for layer, n in zip(quality, shape.ffn_sizes, strict=True))
    change = about["perplexity_predicted"] / about["perplexity_dense"] - 1
    report = Report(
        f"Predictors of {name}",
        f"trained on {about['tokens']:,} tokens of {about['corpus']}; every figure is of held-out documents",
    )
    report.key_figures(
        {
            "recall": percent(found / firing if firing else 1.0),
            "candidates per firing": f"{named / firing:.2f}" if firing else "–",
            f"of the model's {'bytes in F16' if copies else 'parameters'}": percent(
                sum(num_bytes) / (F16_BYTES * shape.num_parameters())
            ),
            "of predictors" if copies else "in F16": readable_bytes(sum(num_bytes)),
            "perplexity, dense → predicted": f"{about['perplexity_dense']:.2f} → {about['perplexity_predicted']:.2f}",
            "change": f"{change:+.2%}",
        }
    )
    report.heading("Recall and candidates")
    report.text(
        "Recall is the share of the firings that were candidates: what is missed is left out of the layer's output. "
        "Candidates that stay silent cost one row of weights each and change nothing."
    )
    report.figure(shares_figure(quality), "Recall per layer, and the share of neurons that fire and that are named")
    report.heading("Size")
    if copies:
        report.text(
            "A layer of kind copy is predicted by the rows that decide on firing, in blocks of four bits; MLPs are in F16."
        )
    report.figure(size_figure(quality, num_bytes), "Width of each layer's MLP and size of its predictor")
    report.heading("Layers")
    report.table(
        {
            "layer": [layer.layer for layer in quality],
            "kind": [layer.kind for layer in quality],
            "width": [layer.hidden or "–" for layer in quality],
            "size": [readable_bytes(size) for size in num_bytes],
            "recall": [f"{layer.recall:.4f}" for layer in quality],
            "precision": [f"{layer.precision:.4f}" for layer in quality],
            "candidates": [percent(layer.density) for layer in quality],
            "fire": [percent(layer.firing_share) for layer in quality],
        }
    )
    return report.html()


def shares_figure(quality: Sequence[LayerQuality]) -> "Figure":
    """Recall above, shares of neurons below, layer by layer."""
    layers = [layer.layer for layer in quality]
    with figure_style():
        figure = new_figure(9.0, 4.0)
        above, below = figure.subplots(2, 1, sharex=True)
        above.plot(layers, [layer.recall for layer in quality], "o-", color=ACCENT, markersize=3, label="recall")
        above.plot(layers, [layer.precision for layer in quality], "o-", color=SECOND, markersize=3, label="precision")
        above.set_ylim(top=1.0)
        above.legend()
        below.bar(layers, [100 * layer.density for layer in quality], color=MUTED, label="candidates")
        below.bar(layers, [100 * layer.firing_share for layer in quality], color=ACCENT, width=0.5, label="fire")
        below.set(xlabel="layer", ylabel="% of neurons")
        below.xaxis.get_major_locator().set_params(integer=True)
        below.legend()
    return figure


def size_figure(quality: Sequence[LayerQuality], num_bytes: Sequence[int]) -> "Figure":
    """Width as bars, MiB written on the other axis."""
    layers = [layer.layer for layer in quality]
    with figure_style():
        figure = new_figure(9.0, 2.4)
        left, right = figure.subplots(1, 2)
        left.bar(layers, [layer.hidden for layer in quality], color=ACCENT)
        left.set(xlabel="layer", ylabel="hidden units")
        right.bar(layers, [size / 2**20 for size in num_bytes], color=SECOND)
        right.set(xlabel="layer", ylabel="MiB")
        for axes in (left, right):
            axes.xaxis.get_major_locator().set_params(integer=True)
    return figure
