"""One layer's FFN with its neurons spread over tiers, each tier a device, and the predictor that names candidates."""

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pi_toolkit.profiler.model_families import Activation

from .kernels import sparse_ffn_reference as kernel
from .kernels.native import ACTIVATIONS, MODES, Products, address, extension, matrix, products
from .kernels.packed_matrix import PackedMatrix, row_tiles
from .kernels.sparse_ffn_reference import Mode, NeuronRows, activate, up_factor
from .kernels.triton_kernels import triton_kernels
from .overlap import Overlap
from .placed_predictor import PlacedPredictor

if TYPE_CHECKING:
    import torch


# Up to so many tokens each reads its own neurons' rows; beyond, their union is most of the rows anyway.
TOKENS_ONE_BY_ONE = 4


@dataclass(frozen=True, eq=False)
class NeuronTier:
    """Weights of k neurons on one device, a row of ``hidden`` values each.

    ``first`` decides whether a neuron fires (gate, or up of ungated neurons); ``up`` is that of gated neurons, else None;
    ``up_bias`` float32 [k] or None. Rows of ``up`` and ``down`` of one neuron lie side by side.
    """

    first: PackedMatrix
    up: PackedMatrix | None
    down: PackedMatrix
    up_bias: "torch.Tensor | None"
    activation: Activation
    activation_threshold: float

    def __len__(self) -> int:
        return self.first.rows

    @property
    def device(self) -> "torch.device":
        return self.first.device

    def native(self, module: ModuleType) -> Any:
        """What the native kernels see of these neurons."""
        parts = [matrix(module, part) for part in (self.first, self.up, self.down)]
        return module.Neurons(
            *parts, address(self.up_bias), ACTIVATIONS.index(self.activation), self.activation_threshold
        )

    def __call__(
        self, x: "torch.Tensor", mode: Mode, scores: "torch.Tensor | None", threshold: float
    ) -> "torch.Tensor":
        """What these neurons add: float32 [tokens, hidden] from *x* [tokens, hidden]; *scores* [tokens, k] are those of mode
        predicted."""
        x = x.to(self.device)
        scores = None if scores is None else scores.to(self.device)
        gpu = triton_kernels(self.device)
        if gpu is not None and len(x) <= gpu.MAX_TOKENS:
            return gpu.sparse_ffn(self, x, mode, scores, threshold)
        if self.device.type == "cuda" and len(x) > TOKENS_ONE_BY_ONE:
            return self.whole_products(x, scores, threshold)
        native = products(self.device)
        if native is None:
            return self._by_reference(x, mode, scores, threshold)
        if len(x) <= TOKENS_ONE_BY_ONE:
            return self._one_by_one(native, x, mode, scores, threshold)
        return self._all_at_once(native, x, scores, threshold)

    def _one_by_one(
        self, native: Products, x: "torch.Tensor", mode: Mode, scores: "torch.Tensor | None", threshold: float
    ) -> "torch.Tensor":
        """Each token reads the rows of its own neurons."""
        import torch

        x, y = x.float().contiguous(), torch.empty(x.shape, dtype=torch.float32)
        module = extension()
        assert module is not None, "there are native products only with native kernels"
        neurons = self.native(module)
        for token in range(len(x)):
            mine = None if scores is None else scores[token].contiguous()
            where = address(x[token]), address(mine), threshold, address(y[token])
            native.native.sparse_ffn(neurons, MODES.index(mode), *where)
        return y

    def _all_at_once(
        self, native: Products, x: "torch.Tensor", scores: "torch.Tensor | None", threshold: float
    ) -> "torch.Tensor":
        """All rows are read once, and each token's own mask is applied; modes dense and exact are the same here."""
        side_by_side = native.columns(x)
        h = native.multiply(self.first, side_by_side)
        if self.up_bias is not None:
            h += self.up_bias[:, None]
        h = activate(h, self.activation, self.activation_threshold)
        if self.up is not None:
            h *= up_factor(native.multiply(self.up, side_by_side), self.activation)
        if scores is not None:
            h[:, : len(x)].masked_fill_(threshold > scores.T, 0.0)
        return native.multiply_transposed(self.down, h)[:, : len(x)].T

    def whole_products(self, x: "torch.Tensor", scores: "torch.Tensor | None", threshold: float) -> "torch.Tensor":
        """What a call computes, by torch's products of all rows, with each token's own mask: for prompts on a GPU, which
        waits for nothing here. *x* and *scores* are on the tier's device.

        Plain weights are read in place; blocks are converted tile by tile.
        """
        import torch

        dtype = self.first.product_dtype
        output, x = torch.zeros(x.shape, dtype=torch.float32, device=self.device), x.to(dtype)
        for first, end in [(0, len(self))] if self.first.is_plain else row_tiles(len(self), x.shape[1]):
            rows = self._rows(first, end, dtype)
            if scores is None:
                output += kernel.dense(x, rows)
            else:
                output += kernel.masked(x, rows, scores[:, first:end], threshold)
        return output

    def _by_reference(
        self, x: "torch.Tensor", mode: Mode, scores: "torch.Tensor | None", threshold: float
    ) -> "torch.Tensor":
        """Plain weights are read in place; those that have to be converted are taken tile by tile."""
        import torch

        dtype = self.first.product_dtype
        x, plain = x.to(dtype), self.first.is_plain
        output = torch.zeros(x.shape, dtype=torch.float32, device=self.device)
        for first, end in [(0, len(self))] if plain else row_tiles(len(self), x.shape[1]):
            rows = self._rows(first, end, dtype)
            if mode == "predicted":
                assert scores is not None, "predictors name candidates in mode predicted"
                output += kernel.predicted(x, rows, scores[:, first:end], threshold)
            else:
                output += kernel.dense(x, rows) if mode == "dense" else kernel.exact(x, rows)
        return output

    def _rows(self, first: int, end: int, dtype: "torch.dtype") -> NeuronRows:
        firing = self.first.values(first, end).to(dtype)
        down = self.down.values(first, end).to(dtype)
        up_bias = None if self.up_bias is None else self.up_bias[first:end].to(dtype)
        if self.up is None:
            return NeuronRows(firing, down, None, up_bias, self.activation, self.activation_threshold)
        up = self.up.values(first, end).to(dtype)
        return NeuronRows(up, down, firing, None, self.activation, self.activation_threshold)


@dataclass(frozen=True, eq=False)
class PlacedFfn:
    """The tiers of one layer, none of them empty, and the float32 bias [hidden] that is added once.

    With an ``overlap``, the last tier is computed on the CPU while the others are computed where they are.
    """

    tiers: tuple[NeuronTier, ...]
    down_bias: "torch.Tensor | None"
    predictor: PlacedPredictor | None
    overlap: Overlap | None = None

    def __call__(self, normed: "torch.Tensor", residual: "torch.Tensor", mode: Mode) -> "torch.Tensor":
        """The FFN's output float32 [tokens, hidden] on the device of *normed*.

        *normed* [tokens, hidden] is what the neurons and copies of their rows read, *residual* [tokens, hidden] what other
        predictors read.
        """
        scores: list[torch.Tensor | None] = [None] * len(self.tiers)
        threshold = 0.0
        if mode == "predicted":
            assert self.predictor is not None, "the engine opens mode predicted only with predictors"
            threshold = self.predictor.threshold
            named = self.predictor.scores(normed, residual)
            scores = list(named.split([len(tier) for tier in self.tiers], dim=1))
        each = list(zip(self.tiers, scores, strict=True))

        def sum_of(parts: "list[tuple[NeuronTier, torch.Tensor | None]]") -> "torch.Tensor | None":
            # A GPU's part is queued, not awaited, so that tiers compute side by side; only then is anything fetched.
            started = [tier(normed, mode, mine, threshold) for tier, mine in parts]
            output = self.down_bias
            for part in started:
                output = part.to(normed.device) if output is None else output + part.to(normed.device)
            return output

        if self.overlap is None:
            output = sum_of(each)
            assert output is not None, "a layer has at least one neuron"
            return output
        cold, cold_scores = each[-1]
        on_device = None if cold_scores is None else cold_scores.to(normed.device)
        return self.overlap(lambda: sum_of(each[:-1]), cold, normed, on_device, mode, threshold)
