"""Random neurons in every kind of weights, and what the reference makes of them in float64: for kernels of any technology."""

from typing import Literal, get_args

import torch

from pi_toolkit.profiler.model_families import Activation
from pi_toolkit.runtime.kernels import sparse_ffn_reference as reference
from pi_toolkit.runtime.kernels.packed_matrix import Kind, allocate, fill, pack, row_bytes
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode, NeuronRows
from pi_toolkit.runtime.placed_ffn import NeuronTier

CPU = torch.device("cpu")
Form = Literal["gated", "bias", "plain"]  # with a gate; ungated with a bias (OPT); ungated without one (Falcon)
# What neurons there are and in which modes they run.
COMPUTATIONS: list[tuple[Activation, Form, Mode]] = [
    *[("relu", form, mode) for form in ("gated", "bias") for mode in get_args(Mode)],
    ("relu", "plain", "predicted"),
    *[(activation, "gated", mode) for activation in ("fatrelu", "drelu") for mode in ("exact", "predicted")],
    ("silu", "gated", "dense"),
    ("gelu", "bias", "dense"),
]


def draw(*size: int, seed: int = 0, device: torch.device = CPU) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device)


def hidden_sizes(kind: Kind, *sizes: int) -> list[int]:
    """Sizes that rows of *kind* can have: whole blocks of 32 values."""
    return [-(-size // 32) * 32 for size in sizes] if kind in ("q8_0", "q4_0") else list(sizes)


def make_neurons(
    kind: Kind, neurons: int, hidden: int, activation: Activation, form: Form, device: torch.device = CPU
) -> NeuronTier:
    """Neurons as :mod:`pi_toolkit.runtime.weights` lays them out."""

    def rows(seed: int) -> torch.Tensor:
        return draw(neurons, hidden, seed=seed) / hidden**0.5

    length = row_bytes(kind, hidden)
    pairs = allocate(neurons, 2 * length, device)
    return NeuronTier(
        first=pack(rows(1), kind, device),
        up=fill(pairs[:, :length], kind, rows(2)) if form == "gated" else None,
        down=fill(pairs[:, length:], kind, rows(3)),
        up_bias=draw(neurons, seed=4, device=device) if form == "bias" else None,
        activation=activation,
        activation_threshold=0.3 if activation == "fatrelu" else 0.0,
    )


def wanted(
    neurons: NeuronTier, x: torch.Tensor, mode: Mode, scores: torch.Tensor | None = None, threshold: float = 0.0
) -> torch.Tensor:
    """float64 [tokens, hidden] on the CPU."""
    first, down = neurons.first.values().double().cpu(), neurons.down.values().double().cpu()
    bias = None if neurons.up_bias is None else neurons.up_bias.double().cpu()
    up, gate = (first, None) if neurons.up is None else (neurons.up.values().double().cpu(), first)
    rows = NeuronRows(up, down, gate, bias, neurons.activation, neurons.activation_threshold)
    if mode == "predicted":
        assert scores is not None
        return reference.predicted(x.double().cpu(), rows, scores.cpu(), threshold)
    return (reference.dense if mode == "dense" else reference.exact)(x.double().cpu(), rows)
