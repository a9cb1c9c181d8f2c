"""What tests of the GPU's step share: a stream that is late, decoders with a part of their neurons on a hot tier."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.gpu_step import GpuStep
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.overlap import ColdPart, Overlap
from pi_toolkit.runtime.tier_plan import TierPlan
from pi_toolkit.runtime.weights import load_weights

CPU = torch.device("cpu")
# Behind it the best of the demo models' logits are 0.04 or more apart, in every mode: no tie for rounding to decide.
PROMPT, CLEAR_TOKENS = (414, 136, 1099, 230, 1237, 60, 761, 1067), 40


class LateStream:
    """A side stream that puts everything off: until the host waits for the copies, as an eager stream may, or until the
    join, as a graph may. What is not yet copied holds NaN, which no later sum gets rid of."""

    pinned = False

    def __init__(self, captures: bool) -> None:
        self.captures = captures
        self.log: list[str] = []
        self._queue: list[Callable[[], object]] = []

    def fork(self) -> None:
        self.log.append("fork")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.log.append("copy")
        target.view(torch.uint8).fill_(255)  # NaN in every floating-point type
        self._queue.append(lambda: target.copy_(source))

    def call(self, part: ColdPart) -> None:
        self.log.append("call")
        part.partial.fill_(torch.nan)
        self._queue.append(part)
        if not self.captures:
            self._drain()

    def join(self) -> None:
        self.log.append("join")
        self._drain()

    def mark(self) -> Callable[[], None]:
        return self._drain

    def take_captured(self) -> list[object]:
        return []

    def _drain(self) -> None:
        for queued in self._queue:
            queued()
        self._queue = []


def random_predictors(checkpoint: Checkpoint) -> PredictorSet:
    shape, generator = checkpoint.shape, torch.Generator().manual_seed(8)
    fc1 = tuple(torch.randn(32, shape.hidden_size, generator=generator) for _ in shape.ffn_sizes)
    fc2 = tuple(torch.randn(neurons, 32, generator=generator) for neurons in shape.ffn_sizes)
    return PredictorSet.of_mlps(fc1, fc2, 0.5, None, None)


def drawn(sizes: Sequence[int], share: float) -> tuple[np.ndarray, ...]:
    """This share of each layer's neurons, at random: ascending ids."""
    generator = np.random.default_rng(0)
    return tuple(np.sort(generator.permutation(n)[: round(share * n)]) for n in sizes)


def five_placements(sizes: Sequence[int]) -> dict[str, tuple[np.ndarray, ...]]:
    """Neurons on the GPU; "one" and "all but one" count over the whole model."""
    nothing, everything = drawn(sizes, 0.0), drawn(sizes, 1.0)
    return {
        "none": nothing,
        "one neuron": (*nothing[:2], np.array([sizes[2] - 1]), *nothing[3:]),
        "half": drawn(sizes, 0.5),
        "all but one": (*everything[:2], everything[2][:-1], *everything[3:]),
        "all": everything,
    }


def decoder_for(
    checkpoint: Checkpoint,
    mode: Mode,
    hot_neurons: tuple[np.ndarray, ...],
    context: int,
    hot: torch.device = CPU,
    slots: int = 3,
) -> Decoder:
    """A decoder with these neurons on a hot tier, and everything else of the model with them; predictors are random."""
    everywhere = (True,) * checkpoint.shape.num_layers
    plan = TierPlan(hot, CPU, hot_neurons, everywhere, everywhere, True)
    predictors = random_predictors(checkpoint) if mode == "predicted" else None
    weights = load_weights(checkpoint, plan, predictors, "float32")
    return Decoder(checkpoint.shape, weights, slots=slots, context=context, mode=mode)


def gpu_step_of(decoder: Decoder, side: LateStream) -> GpuStep:
    """The step a GPU would run on the same weights and a cache of its own, cold tiers beside hot ones."""
    other = Decoder(decoder.shape, decoder.weights, len(decoder.cache.keys[0]), decoder.cache.context, decoder.mode)
    overlap = Overlap(side)
    layers = tuple(
        dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, overlap=overlap))
        for layer in other.weights.layers
    )
    weights = dataclasses.replace(other.weights, layers=layers)
    return GpuStep(decoder.shape, weights, other.cache, other._rotations, None)


def greedy_tokens(step: Callable[[int, int], torch.Tensor], prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What follows *prompt*, token by token: *step* makes logits [vocabulary] of a token at a position."""
    text = list(prompt)
    for position in range(len(prompt) + new_tokens - 1):
        logits = step(text[position], position)
        if position + 1 == len(text):
            text.append(int(logits.argmax()))
    return text[len(prompt) :]


def step_of(decoder: Decoder) -> Callable[[int, int], torch.Tensor]:
    """Steps of one token in the first slot."""
    slot = torch.zeros(1, dtype=torch.int64)
    return lambda token, position: decoder.step(torch.tensor([[token]]), torch.tensor([[position]]), slot)[0]
