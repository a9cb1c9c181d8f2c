"""How long a token takes under any placement, predicted from bytes and bandwidths. No solver is needed for it.

    seconds = Σ_l [attention_l + predictor_l + max(GPU part_l, CPU part_l) + T_sync · y_l + overhead] + head

Every part is the bytes that it reads, divided by the read bandwidth of the device they lie on (the paper's eq. 5): a
token at batch 1 reads each weight at most once, and computes little with it. y_l is 1 where the units of a layer lie on
more than one device. Several GPUs work at the same time, so the GPU part is that of the slowest. What the model leaves
out: arithmetic (long prompts, large batches), caches, and the way of the hidden states between layers whose attention
lies on different devices.

Bytes come from :mod:`.memory`. What a token reads of an FFN neuron is a share of the neuron's bytes, by
:func:`expected_reads`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pi_toolkit.profiler.hardware import Hardware

from .costs import transfer_seconds
from .memory import UnitBytes

CPU = -1  # the device number of the CPU; GPUs are counted from 0
# Candidates per firing where nothing measured them; the predictors of the two demo models reach 1.39 and 1.34.
ASSUMED_OVERSHOOT = 1.4
Mode = Literal["dense", "exact", "predicted"]


@dataclass(frozen=True)
class Speeds:
    """Read bandwidths in bytes per second and the cost of one CPU–GPU synchronisation in seconds.

    Two constants can be fitted to measurements: ``overhead_seconds_per_layer``, which every layer costs whatever it reads,
    and ``cpu_bandwidth_share``, the share of its bandwidth that the CPU reaches.
    """

    cpu_bytes_per_second: float
    gpu_bytes_per_second: tuple[float, ...]
    sync_seconds: float
    overhead_seconds_per_layer: float = 0.0
    cpu_bandwidth_share: float = 1.0

    def seconds_per_byte(self) -> np.ndarray:
        """float64 [GPUs + 1], the CPU's last: so device number ``CPU`` is an index of it."""
        reached = self.cpu_bytes_per_second * self.cpu_bandwidth_share
        return 1.0 / np.array([*self.gpu_bytes_per_second, reached], dtype=np.float64)


@dataclass(frozen=True)
class UnitDevices:
    """The device of every unit: a GPU's number, or ``CPU``.

    ``attention`` and ``predictor``: int [layers]; ``head``: the output head's; ``neurons``: per layer int [neurons].
    """

    attention: np.ndarray
    predictor: np.ndarray
    head: int
    neurons: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class TokenTime:
    """Predicted seconds of one token, float64 [layers] each, except the head's.

    ``gpu_seconds`` and ``cpu_seconds`` are the FFN neurons'; they run at the same time.
    """

    attention_seconds: np.ndarray
    predictor_seconds: np.ndarray
    gpu_seconds: np.ndarray
    cpu_seconds: np.ndarray
    sync_seconds: np.ndarray
    overhead_seconds: np.ndarray
    head_seconds: float

    @property
    def layer_seconds(self) -> np.ndarray:
        slower = np.maximum(self.gpu_seconds, self.cpu_seconds)
        return self.attention_seconds + self.predictor_seconds + slower + self.sync_seconds + self.overhead_seconds

    @property
    def total_seconds(self) -> float:
        return float(self.layer_seconds.sum()) + self.head_seconds

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / self.total_seconds if self.total_seconds > 0 else np.inf


def speeds_of(hardware: Hardware, hidden_size: int, batch_size: int = 1, sync_seconds: float | None = None) -> Speeds:
    """The speeds of *hardware*; *sync_seconds* replaces all of T_sync (see :mod:`.costs`)."""
    gpus = hardware.gpus
    if sync_seconds is None:
        sync_seconds = max(
            (gpu.sync_seconds + transfer_seconds(gpu, hidden_size, batch_size) for gpu in gpus), default=0.0
        )
    return Speeds(hardware.cpu_bytes_per_second, tuple(gpu.bytes_per_second for gpu in gpus), sync_seconds)


def firing_shares(counts: Sequence[np.ndarray], tokens: int | None) -> tuple[np.ndarray, ...]:
    """Per layer float64 [neurons]: the share of tokens on which a neuron fires.

    Counts are divided by the number of *tokens*. Where that is unknown (None: files of PowerInfer's own, without
    ``profile.json``), values that all lie within 0 … 1 are taken for shares as they are, and of larger ones the
    largest of all layers for a neuron that fires on every token: the shares are then upper estimates, in true proportion.
    """
    largest = max((float(layer.max(initial=0)) for layer in counts), default=0.0)
    per = float(tokens) if tokens is not None else max(largest, 1.0)
    return tuple(np.asarray(layer, dtype=np.float64) / per for layer in counts)


def expected_reads(
    shares: Sequence[np.ndarray],
    mode: Mode,
    neuron_matrices: int,
    overshoot: float | Sequence[float] = ASSUMED_OVERSHOOT,
    batch_size: int = 1,
) -> tuple[np.ndarray, ...]:
    """Per layer float64 [neurons]: the expected share of a neuron's bytes that one step reads.

    A neuron has *neuron_matrices* rows of equal length. The first (gate, or up of ungated neurons) is read of every
    candidate: all neurons in mode ``exact``, *overshoot* times as many as fire in mode ``predicted`` (one number, or
    one per layer; never more than once a token). The other rows are read where the neuron fires. ``dense`` reads
    everything. A step of *batch_size* sequences reads what at least one of them does, taken to be independent.
    """
    factors = np.broadcast_to(np.asarray(overshoot, dtype=np.float64), (len(shares),))
    rest = (neuron_matrices - 1) / neuron_matrices
    reads = []
    for share, factor in zip(shares, factors, strict=True):
        candidate = np.minimum(share * factor, 1.0) if mode == "predicted" else np.ones_like(share)
        firing = np.ones_like(share) if mode == "dense" else np.minimum(share, candidate)
        read_by_any = [1.0 - (1.0 - part) ** batch_size for part in (candidate, firing)]
        reads.append(read_by_any[0] * (1.0 - rest) + read_by_any[1] * rest)
    return tuple(reads)


def token_time(units: UnitBytes, devices: UnitDevices, reads: Sequence[np.ndarray], speeds: Speeds) -> TokenTime:
    """The predicted time of one token (of one step, with a batch) under the placement *devices*.

    *reads*: per layer float [neurons], the expected share of a neuron's bytes that is read. The KV cache counts as full,
    so give *units* of the context that the time is asked for.
    """
    price = speeds.seconds_per_byte()
    gpus = len(price) - 1
    # Seconds [layers, devices] that the neurons of a layer take on each device, the CPU last.
    neuron_seconds = np.array(
        [
            np.bincount(device % len(price), weights=read, minlength=len(price)) * units.neuron * price
            for device, read in zip(devices.neurons, reads, strict=True)
        ]
    )
    return TokenTime(
        attention_seconds=np.array(units.attention, dtype=np.float64) * price[devices.attention],
        predictor_seconds=np.array(units.predictor, dtype=np.float64) * price[devices.predictor],
        gpu_seconds=neuron_seconds[:, :gpus].max(axis=1, initial=0.0),
        cpu_seconds=neuron_seconds[:, CPU],
        sync_seconds=speeds.sync_seconds * is_split(units, devices),
        overhead_seconds=np.full(len(neuron_seconds), speeds.overhead_seconds_per_layer),
        head_seconds=float(units.head * price[devices.head]),
    )


def is_split(units: UnitBytes, devices: UnitDevices) -> np.ndarray:
    """bool [layers], y_l: whether attention, predictor (where there is one) and neurons lie on more than one device."""
    elsewhere = [
        bool((neurons != attention).any()) or (num_bytes > 0 and predictor != attention)
        for attention, predictor, num_bytes, neurons in zip(
            devices.attention, devices.predictor, units.predictor, devices.neurons, strict=True
        )
    ]
    return np.array(elsewhere, dtype=bool)
