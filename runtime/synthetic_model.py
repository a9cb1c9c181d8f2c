"""A model of any shape with random weights, made where it will lie, without a file: for measurements of speed only.

Neurons fire as often as a power law says: the hottest 26 % make 80 % of the firings, as the PowerInfer paper reports of
ReLU models. A neuron's gate row is as long as it takes to exceed the threshold of FATReLU, 1, with that probability by a
random normed input; its predictor row likewise, by thresholds that one token sets layer by layer. Predictors and gates draw
independently, so in mode predicted every candidate is made to fire, as the candidates of perfect predictors do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from pi_toolkit.profiler.model_families import ModelShape, read_shape
from pi_toolkit.solver.memory import precise_dtype

from .bench_replay import replay
from .decoder import Decoder
from .kernels.packed_matrix import BLOCK, Kind, PackedMatrix, allocate, row_bytes
from .kernels.sparse_ffn_reference import Mode
from .overlap import Overlap, overlap_on
from .placed_ffn import NeuronTier, PlacedFfn
from .placed_predictor import MlpPredictor
from .tier_plan import TierPlan
from .weights import LayerWeights, Linear, ModelWeights, Norm

if TYPE_CHECKING:
    import torch

HOT_SHARE, HOT_FIRINGS = 0.26, 0.80
MOST_OFTEN = 0.45  # no gate row would be long enough for half of all tokens
MADE_AT_ONCE = 2**26  # values
PREDICTOR_SHARE = 4  # hidden size over a predictor's width
ALL_FIRE = -6e4  # far below any product, and a number that F16 can hold


@dataclass(frozen=True)
class SyntheticSize:
    """A ReGLU LLaMA; the defaults are those of Llama-2-7B."""

    hidden: int = 4096
    neurons: int = 11008
    layers: int = 32
    heads: int = 32
    vocabulary: int = 32000
    context: int = 512

    @property
    def predictor_width(self) -> int:
        return self.hidden // PREDICTOR_SHARE

    @property
    def shape(self) -> ModelShape:
        return read_shape(
            {
                "model_type": "llama",
                "vocab_size": self.vocabulary,
                "hidden_size": self.hidden,
                "intermediate_size": self.neurons,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "max_position_embeddings": self.context,
                "hidden_act": "fatrelu",
                "hidden_act_param": 1.0,
                "rms_norm_eps": 1e-5,
            }
        )


@cache
def firing_shares(neurons: int, mean: float) -> np.ndarray:
    """float64 [neurons], hottest first, with this mean: a power law cut at :data:`MOST_OFTEN`, with the exponent at which the
    hottest :data:`HOT_SHARE` make :data:`HOT_FIRINGS`."""
    places, hot = (np.arange(neurons) + 0.5) / neurons, round(HOT_SHARE * neurons)

    def law(exponent: float) -> np.ndarray:
        falling = places**-exponent
        factor = _bisect(lambda factor: np.minimum(factor * falling, MOST_OFTEN).mean() < mean, 0.0, 1.0)
        return np.minimum(factor * falling, MOST_OFTEN)

    exponent = _bisect(lambda exponent: law(exponent)[:hot].sum() < HOT_FIRINGS * mean * neurons, 0.0, 6.0)
    return law(exponent)


def _bisect(too_low: Callable[[float], bool], low: float, high: float) -> float:
    """The number at which *too_low* becomes false."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return high


@cache
def row_lengths(neurons: int, density: float) -> np.ndarray:
    """Standard deviations of normal variables that exceed 1 as often as the neurons fire."""
    normal = NormalDist()
    return np.array([1 / normal.inv_cdf(1 - share) for share in firing_shares(neurons, density)])


@dataclass(frozen=True)
class SyntheticModel:
    """Makes the weights; the same from the same ``seed`` on the same GPU. ``density``: share of the neurons that fire."""

    size: SyntheticSize
    kind: Kind
    plan: TierPlan
    density: float
    seed: int = 0

    def weights(self) -> ModelWeights:
        """Everything where the plan wants it; predictors name as many candidates as neurons fire."""
        import torch

        draw = _Draw(self.plan.hot, torch.Generator(self.plan.hot).manual_seed(self.seed))
        size, plan, hidden = self.size, self.plan, self.size.hidden
        attention = [plan.attention_device(layer) for layer in range(size.layers)]
        overlaps = {device: overlap_on(device) for device in {*attention} if device.type == "cuda"}
        weights = ModelWeights(
            kind=self.kind,
            embedding=draw.matrix(size.vocabulary, hidden, self.kind, plan.cold),
            positions=None,
            layers=tuple(self._layer(draw, layer, overlaps.get(attention[layer])) for layer in range(size.layers)),
            final_norm=_norm(hidden, plan.head_device()),
            head=draw.matrix(size.vocabulary, hidden, self._precise, plan.head_device()),
        )
        return self._with_thresholds(weights)

    @property
    def _precise(self) -> Kind:
        return precise_dtype(self.kind)  # type: ignore[return-value]

    @property
    def _lengths(self) -> np.ndarray:
        return row_lengths(self.size.neurons, self.density)

    def _layer(self, draw: "_Draw", layer: int, overlap: Overlap | None) -> LayerWeights:
        hidden, width, device = self.size.hidden, self.size.predictor_width, self.plan.attention_device(layer)
        places = self.plan.tiers(layer, self.size.neurons)
        order, where = np.concatenate([ids for _, ids in places]), self.plan.predictor_device(layer)
        predictor = MlpPredictor(
            fc1=draw.matrix(width, hidden, self._precise, where),
            fc2=draw.matrix(self.size.neurons, width, self._precise, where, self._lengths[order]),
            threshold=0.0,
        )
        return LayerWeights(
            attention_norm=_norm(hidden, device),
            query_key_value=Linear(draw.matrix(3 * hidden, hidden, self.kind, device), None),
            output=Linear(draw.matrix(hidden, hidden, self.kind, device), None),
            ffn_norm=_norm(hidden, device),
            ffn=PlacedFfn(
                tiers=tuple(self._tier(draw, on, self._lengths[ids]) for on, ids in places),
                down_bias=None,
                predictor=predictor,
                overlap=overlap if places[-1][0].type == "cpu" else None,
            ),
        )

    def _tier(self, draw: "_Draw", device: "torch.device", lengths: np.ndarray) -> NeuronTier:
        count, hidden, length = len(lengths), self.size.hidden, row_bytes(self.kind, self.size.hidden)
        first, pairs = draw.matrix(count, hidden, self.kind, device, lengths), allocate(count, 2 * length, device)
        up, down = (PackedMatrix(self.kind, hidden, half) for half in (pairs[:, :length], pairs[:, length:]))
        draw.fill(up)
        draw.fill(down)
        return NeuronTier(first, up, down, None, "fatrelu", self.size.shape.activation_threshold)

    def _with_thresholds(self, weights: ModelWeights) -> ModelWeights:
        """The same with the predictors' thresholds at the density, for what one token makes of the residual stream.

        Scores of a row of length s are s times a normal variable; they pass where that exceeds 1 / s deviations, as gates do.
        """
        import torch

        layers = list(weights.layers)

        def observe(number: int, ffn: PlacedFfn, normed: "torch.Tensor", residual: "torch.Tensor", _mode: Mode) -> None:
            assert ffn.predictor is not None, "every layer has one"
            order = np.concatenate([ids for _, ids in self.plan.tiers(number, self.size.neurons)])
            scores = ffn.predictor.scores(normed, residual)[0].cpu() / torch.from_numpy(self._lengths[order]).float()
            predictor = replace(ffn.predictor, threshold=float(scores.std()))
            layers[number] = replace(layers[number], ffn=replace(layers[number].ffn, predictor=predictor))

        replay(Decoder(self.size.shape, weights, 1, 1, "dense"), [1], observe)
        return replace(weights, layers=tuple(layers))


@dataclass(frozen=True)
class _Draw:
    """Random matrices, drawn on one device (the GPU, if there is one) and copied to where they belong."""

    device: "torch.device"
    generator: "torch.Generator"

    def matrix(
        self, rows: int, columns: int, kind: Kind, device: "torch.device", lengths: "np.ndarray | None" = None
    ) -> PackedMatrix:
        packed = PackedMatrix(kind, columns, allocate(rows, row_bytes(kind, columns), device))
        self.fill(packed, lengths)
        return packed

    def fill(self, packed: PackedMatrix, lengths: "np.ndarray | None" = None) -> None:
        """Values whose products with a normed vector have *lengths* [rows] as standard deviations, or 1."""
        import torch

        step = max(1, MADE_AT_ONCE // packed.columns)
        for first in range(0, packed.rows, step):
            rows = packed.data[first : first + step]
            scale = torch.ones(len(rows)) if lengths is None else torch.from_numpy(lengths[first : first + step])
            scale = scale.to(self.device, torch.float32)[:, None] / packed.columns**0.5
            rows.copy_(self._plain(packed, scale) if packed.head_bytes == 0 else self._blocks(packed, scale))

    def _plain(self, packed: PackedMatrix, scale: "torch.Tensor") -> "torch.Tensor":
        import torch

        values = torch.randn(len(scale), packed.columns, device=self.device, generator=self.generator)
        return (values * scale).to(getattr(torch, packed.kind)).view(torch.uint8)

    def _blocks(self, packed: PackedMatrix, scale: "torch.Tensor") -> "torch.Tensor":
        """Quants are uniform from −7 to 7 or −127 to 127: a mean other than 0 would grow from layer to layer."""
        import torch

        size = (len(scale), packed.data.shape[1])

        def draw(low: int, high: int, dtype: "torch.dtype") -> "torch.Tensor":
            return torch.randint(low, high + 1, size, dtype=dtype, device=self.device, generator=self.generator)

        if packed.kind == "q4_0":
            rows, values = draw(1, 15, torch.uint8) | (draw(1, 15, torch.uint8) << 4), 15
        else:
            rows, values = draw(-127, 127, torch.int8).view(torch.uint8), 255
        deviation = ((values**2 - 1) / 12) ** 0.5
        blocks = packed.columns // BLOCK
        rows[:, : packed.head_bytes] = 0  # blocks of padding count for nothing
        rows[:, : 2 * blocks] = (scale / deviation).half().expand(-1, blocks).contiguous().view(torch.uint8)
        return rows


def all_candidates_fire(weights: ModelWeights) -> ModelWeights:
    """The same weights with neurons that fire whenever they are computed."""
    layers = []
    for layer in weights.layers:
        tiers = tuple(replace(tier, activation_threshold=ALL_FIRE) for tier in layer.ffn.tiers)
        layers.append(replace(layer, ffn=replace(layer.ffn, tiers=tiers)))
    return replace(weights, layers=tuple(layers))


def counts_of(size: SyntheticSize, density: float) -> Sequence[np.ndarray]:
    """Firing counts that a profile of this model would hold."""
    return [np.round(1e6 * firing_shares(size.neurons, density)).astype(np.int64)] * size.layers


def _norm(size: int, device: "torch.device") -> Norm:
    import torch

    return Norm(torch.ones(size, device=device), None, 1e-5)
