"""Neuron groups: 64 neurons of similar impact in one layer are placed together (PowerInfer §6.3).

That turns the millions of choices of a large model into tens of thousands.
"""

from collections.abc import Sequence

import numpy as np

from pi_toolkit.profiler.errors import PlacementError

from .bundle import Bundles

GROUP_NEURONS = 64
MAX_GROUPS = 100_000  # of a whole model; OPT-175B in groups of 64 has 73,728
# Sums up to here are exact in int64 and in the solver's float64.
MAX_TOTAL_IMPACT = 2**53


def group_neurons(
    counts: Sequence[np.ndarray],
    group_neurons: int = GROUP_NEURONS,
    neuron_bytes: int = 1,
    reads: Sequence[np.ndarray] | None = None,
    cuts: Sequence[int | None] | None = None,
) -> tuple[Bundles, ...]:
    """Groups per layer out of firing counts [n] per layer; a neuron's impact is its firing count (eq. 1: v_n = f_n).

    *reads*: per layer the share of its *neuron_bytes* that a token reads of each neuron (None: nothing). *cuts*: per layer a
    number of hottest neurons behind which a new group begins. Neurons that fire equally often keep the order of their ids;
    the last group of a layer and the one before a cut may be short. Raises ``PlacementError`` for counts whose sum is
    beyond exact arithmetic.
    """
    total = sum(float(layer.sum(dtype=np.float64)) for layer in counts)
    if not total <= MAX_TOTAL_IMPACT:
        raise PlacementError(f"the firing counts sum to {total:.3g}, beyond 2^53: divide them by a common factor")
    read_of = reads or [np.zeros(len(layer)) for layer in counts]
    cut_of = cuts or [None] * len(counts)
    return tuple(
        _group_layer(layer, read, group_neurons, neuron_bytes, cut)
        for layer, read, cut in zip(counts, read_of, cut_of, strict=True)
    )


def group_size_within(ffn_sizes: Sequence[int], wanted: int) -> int:
    """*wanted*, doubled until the whole model has at most ``MAX_GROUPS`` groups."""
    size = wanted
    while sum(-(-neurons // size) for neurons in ffn_sizes) > max(MAX_GROUPS, len(ffn_sizes)):
        size *= 2
    return size


def _group_layer(counts: np.ndarray, reads: np.ndarray, size: int, neuron_bytes: int, cut: int | None) -> Bundles:
    hottest_first = np.argsort(-counts, kind="stable")
    starts = np.arange(0, len(counts), size)
    if cut:
        starts = np.concatenate([np.arange(0, cut, size), np.arange(cut, len(counts), size)])
    sizes = np.diff(starts, append=len(counts))
    return Bundles(
        neurons=hottest_first,
        sizes=sizes,
        num_bytes=sizes * neuron_bytes,
        impacts=np.add.reduceat(counts[hottest_first], starts),
        read_bytes=np.add.reduceat(reads[hottest_first], starts) * neuron_bytes,
    )
