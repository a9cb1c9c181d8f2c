"""``report.html`` of a profile: how unevenly neurons fire, layer by layer, and whether the text was enough to tell."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .activation_stats import ActivationStats
from .command_line import percent
from .convergence import Agreement, Convergence
from .locality import CARRIED_SHARE, Locality, measure_locality, share_for
from .report import ACCENT, HEAT_COLOURS, INK, MUTED, SECOND, Report, figure_style, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE_POINTS = 200
HEAT_COLUMNS = 512
HISTOGRAM_BINS = 40
RARE = 1e-6  # firing rates below are shown at it


def profile_report(
    name: str,
    stats: ActivationStats,
    convergence: Convergence | None,
    comparison: Agreement | None = None,
    compared_with: str = "",
) -> bytes:
    """The page on the counts of model *name*, and on how they agree with those on the corpus *compared_with*."""
    tokens = stats.tokens or 0
    locality = measure_locality(stats.counts, tokens)
    report = Report(
        f"Which neurons of {name} fire",
        f"{tokens:,} tokens of {stats.corpus}, windows of {stats.window}, computed in {stats.dtype}",
    )
    report.key_figures(_key_figures(stats, locality, convergence, comparison))
    report.heading("How few neurons carry how many firings")
    report.figure(
        cumulative_figure(stats.counts),
        "Neurons from the hottest to the coldest, and the share of all firings that they carry together. Thin lines are "
        "single layers, the dark one is the whole model; the dot marks 80 % of its firings.",
    )
    report.heading("How often neurons fire")
    report.figure(
        histogram_figure(stats.counts, tokens),
        "How a layer's neurons are spread over firing rates, layer 0 on top. On the right the share of each layer's "
        "neurons that never fired.",
    )
    report.figure(
        heat_map_figure(stats.counts, tokens),
        "Firing rates of each layer's neurons, hottest on the left.",
    )
    report.heading("Layers")
    report.table(_layer_table(stats, locality, convergence, comparison))
    report.heading("Was the text enough?")
    _explain_convergence(report, convergence, comparison, compared_with)
    return report.html()


def _key_figures(
    stats: ActivationStats, locality: Locality, convergence: Convergence | None, comparison: Agreement | None
) -> dict[str, str]:
    neurons = sum(len(counts) for counts in stats.counts)
    firings = sum(int(counts.sum()) for counts in stats.counts)
    figures = {
        "of the neurons carry 80 % of the firings": percent(locality.share_for_80_percent_model),
        "of the neurons fire on a token": percent(firings / (neurons * (stats.tokens or 1))),
        f"neurons in {len(stats.counts)} layers": f"{neurons:,}",
    }
    if convergence:
        figures["of the hottest fifth is the same in both halves of the text"] = percent(
            convergence.halves.hot_overlap_model
        )
    if comparison:
        figures["of the hottest fifth is the same on the other corpus"] = percent(comparison.hot_overlap_model)
    return figures


def _layer_table(
    stats: ActivationStats, locality: Locality, convergence: Convergence | None, comparison: Agreement | None
) -> dict[str, Sequence[object]]:
    columns: dict[str, Sequence[object]] = {
        "layer": range(len(stats.counts)),
        "neurons": [f"{len(counts):,}" for counts in stats.counts],
        "fire per token": [percent(share) for share in locality.firing_share],
        "carry 80 % of firings": [percent(share) for share in locality.share_for_80_percent],
        "never fired": [percent(float((counts == 0).mean())) for counts in stats.counts],
    }
    if convergence:
        columns["hottest fifth, half and all"] = [percent(share) for share in convergence.half_and_all.hot_overlap]
        columns["hottest fifth, two halves"] = [percent(share) for share in convergence.halves.hot_overlap]
        columns["rank correlation, two halves"] = [_correlation(r) for r in convergence.halves.rank_correlation]
    if comparison:
        columns["hottest fifth, other corpus"] = [percent(share) for share in comparison.hot_overlap]
    return columns


def _correlation(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _explain_convergence(
    report: Report, convergence: Convergence | None, comparison: Agreement | None, compared_with: str
) -> None:
    if convergence is None:
        report.text("The text was too short to be divided into two halves of documents.")
    else:
        for what, agreement in (
            ("half of the documents and all of them", convergence.half_and_all),
            ("one half of the documents and the other", convergence.halves),
        ):
            report.text(f"Counts on {what} {_in_words(agreement)}")
        report.figure(
            convergence_figure(convergence),
            "Per layer, the share of the hottest fifth of neurons that two counts have in common, and the rank "
            "correlation of the counts. Values near 1 mean that more text would change little.",
        )
    if comparison:
        report.text(f"Counts on this corpus and on {compared_with} {_in_words(comparison)}")


def _in_words(agreement: Agreement) -> str:
    first, second = (f"{n:,}" if n else "an unknown number of" for n in agreement.tokens)
    return (
        f"({first} and {second} tokens) agree on {percent(agreement.hot_overlap_model)} of the model's hottest fifth of "
        f"neurons; rank correlation {_correlation(agreement.rank_correlation_model)}."
    )


def cumulative_figure(counts: Sequence[np.ndarray]) -> "Figure":
    """Share of firings over share of neurons, per layer and for the whole model."""
    model = np.concatenate(list(counts))
    share = share_for(model)
    with figure_style():
        figure = new_figure(9.5, 4.2)
        axes = figure.subplots()
        for layer in counts:
            axes.plot(*_cumulative(layer), color=ACCENT, linewidth=0.8, alpha=max(0.15, min(0.7, 6 / len(counts))))
        axes.plot(*_cumulative(model), color=INK, linewidth=2.0)
        axes.axhline(CARRIED_SHARE, color=MUTED, linewidth=0.8, linestyle=":")
        axes.plot([share], [CARRIED_SHARE], "o", color=SECOND)
        axes.annotate(
            f"{share:.1%} of the neurons carry {CARRIED_SHARE:.0%}",
            (share, CARRIED_SHARE),
            textcoords="offset points",
            xytext=(10, -14),
            color=SECOND,
        )
        axes.set(xlabel="share of neurons, hottest first", ylabel="share of firings", xlim=(0, 1), ylim=(0, 1.02))
    return figure


def _cumulative(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most ``CURVE_POINTS`` points of the curve, closer together where it is steep."""
    carried = np.concatenate([[0.0], np.sort(counts)[::-1].cumsum(dtype=np.float64)]) / max(float(counts.sum()), 1.0)
    wanted = np.linspace(0, 1, min(len(carried), CURVE_POINTS)) ** 2
    points = np.unique(np.round(wanted * (len(carried) - 1)).astype(int))
    return points / (len(carried) - 1), carried[points]


def histogram_figure(counts: Sequence[np.ndarray], tokens: int) -> "Figure":
    """One ridge per layer: how many of its neurons have which firing rate, on a logarithmic axis."""
    lowest = max(1 / max(tokens, 2), RARE)
    edges = np.geomspace(lowest, 1.0, HISTOGRAM_BINS + 1)
    centres = np.sqrt(edges[1:] * edges[:-1])
    histograms = [np.histogram(layer / max(tokens, 1), edges)[0] / len(layer) for layer in counts]
    tallest = max(max(float(h.max()) for h in histograms), 1e-12)
    with figure_style():
        figure = new_figure(9.5, 1.0 + min(0.55 * len(counts), 4.0 + 0.14 * len(counts)))
        axes, silent_axes = figure.subplots(1, 2, width_ratios=[5, 1], sharey=True)
        for layer, histogram in enumerate(histograms):
            top = layer - 1.6 * histogram / tallest  # ridges overlap by a little
            axes.fill_between(centres, layer, top, color=ACCENT, alpha=0.35, linewidth=0, zorder=layer)
            axes.plot(centres, top, color=ACCENT, linewidth=0.9, zorder=layer)
        silent = [100 * float((layer == 0).mean()) for layer in counts]
        silent_axes.barh(range(len(counts)), silent, color=MUTED, height=0.6)
        axes.set(xscale="log", xlim=(lowest, 1.0), ylabel="layer", xlabel="share of tokens on which a neuron fires")
        axes.set_ylim(len(counts) - 0.4, -1.8)
        axes.set_yticks(_layer_ticks(len(counts)))
        silent_axes.set(xlabel="never fired, %", xlim=(0, max(1.0, *silent)))
    return figure


def heat_map_figure(counts: Sequence[np.ndarray], tokens: int) -> "Figure":
    """Layers × neurons by hotness; a row of the picture is at most ``HEAT_COLUMNS`` means, whatever the layer's width."""
    from matplotlib.colors import LogNorm

    columns = min(HEAT_COLUMNS, max(len(layer) for layer in counts))
    rates = np.stack([_resampled(np.sort(layer)[::-1] / max(tokens, 1), columns) for layer in counts])
    lowest = max(1 / max(tokens, 2), RARE)
    with figure_style():
        figure = new_figure(9.5, 1.2 + min(0.3 * len(counts), 2.5 + 0.03 * len(counts)))
        axes = figure.subplots()
        picture = axes.imshow(
            np.clip(rates, lowest, 1.0),
            aspect="auto",
            interpolation="nearest",
            cmap=HEAT_COLOURS,
            norm=LogNorm(lowest, 1.0),
            extent=(0, 100, len(counts) - 0.5, -0.5),
        )
        axes.set(xlabel="neurons of the layer, hottest first, %", ylabel="layer")
        axes.set_yticks(_layer_ticks(len(counts)))
        figure.colorbar(picture, ax=axes, label="share of tokens", pad=0.01)
    return figure


def _resampled(values: np.ndarray, columns: int) -> np.ndarray:
    """Means of *columns* equal stretches of *values*, which may be shorter or longer."""
    carried = np.concatenate([[0.0], values.cumsum(dtype=np.float64)])
    edges = np.interp(np.linspace(0, len(values), columns + 1), np.arange(len(carried)), carried)
    return np.diff(edges) * columns / len(values)


def convergence_figure(convergence: Convergence) -> "Figure":
    """Overlap of the hottest fifth and rank correlation, per layer."""
    panels: tuple[tuple[str, Sequence[float | None], Sequence[float | None]], ...] = (
        ("hottest fifth in common", convergence.half_and_all.hot_overlap, convergence.halves.hot_overlap),
        ("rank correlation", convergence.half_and_all.rank_correlation, convergence.halves.rank_correlation),
    )
    with figure_style():
        figure = new_figure(9.5, 3.0)
        for axes, (title, half_and_all, halves) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            layers = range(len(halves))
            for values, colour, label in (
                (half_and_all, ACCENT, "half and all"),
                (halves, SECOND, "one half and the other"),
            ):
                shown = [np.nan if value is None else value for value in values]
                axes.plot(layers, shown, "o-", color=colour, markersize=3, linewidth=1, label=label)
            axes.set(xlabel="layer", title=title)
            axes.set_xticks(_layer_ticks(len(halves)))
        axes.set_ylim(top=1.002)
        axes.legend(loc="lower right")
    return figure


def _layer_ticks(layers: int) -> list[int]:
    step = next(step for step in (1, 2, 4, 8, 16, 10**4) if layers / step <= 24)
    return list(range(0, layers, step))
