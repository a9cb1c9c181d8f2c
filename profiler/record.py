"""Counts on how many tokens each FFN neuron fires, and checks on the data that the model is what its config says."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import CheckpointError, CorpusError, UnsupportedModelError
from .hf_model import observe_ffn
from .model_families import ModelShape

if TYPE_CHECKING:
    import torch

# Exact zeros of the activation vector and neurons at or below the threshold are the same set in a ReLU model; a gated
# product adds an accidental zero now and then (underflow in half precision).
ALLOWED_ZERO_SHARE_DIFFERENCE = 0.02
FEW_ZEROS = 0.05  # a smooth activation has accidental ones; squared ReLU has as many as ReLU


@dataclass(frozen=True)
class Recording:
    """Exact counts per layer, int64 [neurons], over *tokens* tokens."""

    counts: tuple[np.ndarray, ...]
    tokens: int
    seconds: float


def record_firings(
    model: Any, shape: ModelShape, batches: "Iterable[torch.Tensor]", advance: Callable[[int], None] = lambda _: None
) -> Recording:
    """Run *batches* of token ids [batch, window] through *model* and count firings on its device.

    The first batch also proves the activation. Raises ``UnsupportedModelError`` when neurons do not go to exactly zero
    as the config claims, and ``CorpusError`` when there is no token at all.
    """
    import torch

    device = next(model.parameters()).device
    counts = [torch.zeros(neurons, dtype=torch.int64, device=device) for neurons in shape.ffn_sizes]

    def count(layer: int, pre_activation: torch.Tensor) -> None:
        counts[layer] += (pre_activation > shape.activation_threshold).sum(dim=0)

    tokens, began = 0, time.perf_counter()
    with torch.inference_mode():
        for batch in batches:
            if tokens == 0:
                verify_activation(model, shape, batch[:1])
            with observe_ffn(model, shape, pre_activation=count):
                model.base_model(input_ids=batch.to(device), use_cache=False)
            tokens += batch.numel()
            advance(batch.numel())
    if tokens == 0:
        raise CorpusError("the corpus holds no text outside its held-out documents: give a longer one")
    return Recording(tuple(c.cpu().numpy() for c in counts), tokens, time.perf_counter() - began)


def verify_activation(model: Any, shape: ModelShape, batch: "torch.Tensor") -> None:
    """Compare the share of exact zeros in the FFN activations with the share of neurons that do not fire.

    Raises ``UnsupportedModelError`` for a model that is not ReLU by its config, stating the measured share, and for one
    whose data contradicts its config; ``CheckpointError`` for one that computes infinity or NaN, whose neurons would
    pass for silent ones.
    """
    import torch

    zeros, silent = [0.0] * shape.num_layers, [0.0] * shape.num_layers

    def measure(into: list[float], layer: int, values: torch.Tensor, at_zero: torch.Tensor) -> None:
        if not values.isfinite().all():
            raise CheckpointError(
                f"the FFN of layer {layer} computes values that are not finite, so its weights or those before it are "
                "damaged or the type is too narrow: download the model again, or use --dtype float32"
            )
        into[layer] = at_zero.float().mean().item()

    with (
        torch.inference_mode(),
        observe_ffn(
            model,
            shape,
            pre_activation=lambda layer, z: measure(silent, layer, z, z <= shape.activation_threshold),
            activation=lambda layer, h: measure(zeros, layer, h, h == 0),
        ),
    ):
        model.base_model(input_ids=batch.to(next(model.parameters()).device), use_cache=False)
    mean_zeros = sum(zeros) / len(zeros)
    if not shape.falls_silent:
        consequence = (
            "so no neuron can be skipped without loss"
            if mean_zeros < FEW_ZEROS
            else "but its maths is not implemented here"
        )
        raise UnsupportedModelError(
            f"the model's activation is {shape.activation!r} and {100 * mean_zeros:.2f} % of its FFN activations are "
            f"exactly zero over {batch.numel()} tokens, {consequence}: use a ReLU version of the model (OPT, ReluLLaMA, "
            "ProSparse, a Falcon with ReLU …)"
        )
    for layer, (zero, quiet) in enumerate(zip(zeros, silent, strict=True)):
        if abs(zero - quiet) > ALLOWED_ZERO_SHARE_DIFFERENCE:
            raise UnsupportedModelError(
                f"config.json says {shape.activation!r}, but in layer {layer} {100 * quiet:.2f} % of the neurons do not fire "
                f"while {100 * zero:.2f} % of the activations are zero: use config and code of the same model"
            )
