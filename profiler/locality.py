"""How unevenly neurons fire: the numbers and the figure behind "few neurons carry most firings" (PowerInfer §3.1)."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CARRIED_SHARE = 0.8
ALMOST_NONE = 0.0005  # of a layer's neurons and tokens; the sparsest published models fire at some per cent


@dataclass(frozen=True)
class Locality:
    """Per layer the share of neurons that fire on a token and the share that carries 80 % of the firings."""

    firing_share: list[float]
    share_for_80_percent: list[float]
    share_for_80_percent_model: float


def measure_locality(counts: Sequence[np.ndarray], tokens: int) -> Locality:
    """The numbers of one profile; *counts* are int64 [neurons] per layer over *tokens* tokens."""
    return Locality(
        [float(layer.sum()) / (len(layer) * tokens) for layer in counts],
        [share_for(layer) for layer in counts],
        share_for(np.concatenate(list(counts))),
    )


def odd_layers(locality: Locality) -> str:
    """One sentence where layers have (almost) no neuron that fires, or none that falls silent; empty where none has."""
    silent = [layer for layer, share in enumerate(locality.firing_share) if share < ALMOST_NONE]
    firing = [layer for layer, share in enumerate(locality.firing_share) if share > 1 - ALMOST_NONE]
    found = [
        f"in {_layers(layers)} (almost) {what}"
        for layers, what in ((silent, "no neuron fires"), (firing, "every neuron fires on every token"))
        if layers
    ]
    if not found:
        return ""
    return (
        f"{' and '.join(found)}: check that these are the right weights for this config.json, and its activation and "
        "threshold, because nothing can be gained there"
    )


def _layers(numbers: Sequence[int]) -> str:
    """``layer 3``, ``layers 0-4, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    names = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' if len(numbers) > 1 else ''} {names}"


def share_for(counts: np.ndarray, carried: float = CARRIED_SHARE) -> float:
    """The smallest share of neurons whose counts sum to at least *carried* of all; 0.0 when nothing fired."""
    ordered = np.sort(counts)[::-1].cumsum(dtype=np.float64)
    if ordered[-1] == 0:
        return 0.0
    return float(np.searchsorted(ordered, carried * ordered[-1]) + 1) / len(counts)


def locality_figure(counts: Sequence[np.ndarray], tokens: int, title: str) -> bytes:
    """PNG of the power law: left the firing rate by rank on logarithmic axes, right the share of firings carried."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_rank, cumulative = figure.subplots(1, 2)
    for layer, layer_counts in enumerate(counts):
        ordered = np.sort(layer_counts)[::-1]
        shade = {"color": f"C{layer % 10}", "linewidth": 1.0, "alpha": 0.8, "label": f"layer {layer}"}
        by_rank.plot(np.arange(1, len(ordered) + 1), np.maximum(ordered, 0.5) / tokens, **shade)
        _plot_cumulative(cumulative, ordered, **shade)
    model = np.sort(np.concatenate(list(counts)))[::-1]
    _plot_cumulative(cumulative, model, color="black", linewidth=2.0, label="whole model")
    share = share_for(model)
    cumulative.axhline(CARRIED_SHARE, color="grey", linewidth=0.8, linestyle=":")
    cumulative.plot([share], [CARRIED_SHARE], "ko")
    cumulative.annotate(f"{share:.0%} of neurons", (share, CARRIED_SHARE), textcoords="offset points", xytext=(8, -14))
    by_rank.set(xscale="log", yscale="log", xlabel="neuron, hottest first", ylabel="share of tokens on which it fires")
    cumulative.set(xlabel="share of neurons, hottest first", ylabel="share of firings", xlim=(0, 1), ylim=(0, 1.02))
    if len(counts) <= 12:
        cumulative.legend(loc="lower right", fontsize="small")
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def _plot_cumulative(axes: object, ordered: np.ndarray, **style: object) -> None:
    total = max(float(ordered.sum()), 1.0)
    shares = np.concatenate([[0.0], ordered.cumsum(dtype=np.float64) / total])
    axes.plot(np.linspace(0, 1, len(shares)), shares, **style)  # type: ignore[attr-defined]
