"""The weights of a model in the form the decoder computes with, each on the device its placement names.

They are read tensor by tensor from the memory-mapped checkpoint, converted and copied, so that loading needs the memory
of the result and of one tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi_toolkit.predictor_training.predictor_file import MlpWeights, PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.quantisation import QuantisedKind, QuantisedMatrix, SelectedRows, TurnedMatrix, select_rows

from .gpu_memory import allocating
from .kernels.native import multiply
from .kernels.packed_matrix import Kind, PackedMatrix, allocate, fill, pack, row_bytes
from .overlap import Overlap, overlap_on
from .placed_ffn import NeuronTier, PlacedFfn
from .placed_predictor import CopyPredictor, MlpPredictor, PlacedPredictor
from .tier_plan import TierPlan

if TYPE_CHECKING:
    import torch

    Rows = torch.Tensor | QuantisedMatrix | TurnedMatrix | SelectedRows


@dataclass(frozen=True, eq=False)
class Linear:
    """y = weight · x + bias; ``weight`` [outputs, inputs], ``bias`` float32 [outputs] or None."""

    weight: PackedMatrix
    bias: "torch.Tensor | None"

    def __call__(self, x: "torch.Tensor") -> "torch.Tensor":
        product = multiply(self.weight, x)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm without a bias, layer norm with one; float32."""

    weight: "torch.Tensor"
    bias: "torch.Tensor | None"
    epsilon: float

    def __call__(self, x: "torch.Tensor") -> "torch.Tensor":
        from torch.nn.functional import layer_norm, rms_norm

        if self.bias is None:
            return rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer; ``query_key_value`` stacks the rows of the three maps, ``ffn_norm`` is None where attention and FFN share
    a norm (Falcon-7B)."""

    attention_norm: Norm
    query_key_value: Linear
    output: Linear
    ffn_norm: Norm | None
    ffn: PlacedFfn

    @property
    def device(self) -> "torch.device":
        """Where the attention is, and with it the residual stream."""
        return self.output.weight.device


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """A whole model; the embedding [vocabulary, hidden] and learned positions stay on the cold tier, where reading one row
    per token costs nothing."""

    kind: Kind
    embedding: PackedMatrix
    positions: PackedMatrix | None
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: PackedMatrix


def load_weights(
    checkpoint: Checkpoint,
    plan: TierPlan,
    predictors: PredictorSet | None,
    kind: Kind,
    advance: Callable[[int], None] = lambda _: None,
) -> ModelWeights:
    """All weights of *checkpoint* as *kind*, placed by *plan*; calls *advance* once per layer.

    Vectors (norms, biases) are float32 in every kind. Raises ``CheckpointError`` for tensors that are absent or of
    another shape than the config says, and ``PartDoesNotFit`` where a GPU's memory ends.
    """
    shape = checkpoint.shape
    gpus = {device for layer in range(shape.num_layers) if (device := plan.attention_device(layer)).type == "cuda"}
    loader = _Loader(checkpoint, plan, predictors, kind, {device: overlap_on(device) for device in gpus})
    embedding = loader.matrix(checkpoint.shared("embedding.weight"), plan.cold)
    head_device = plan.head_device()
    tied = shape.tied_embeddings and head_device == plan.cold
    layers = []
    for layer in range(shape.num_layers):
        layers.append(loader.layer(layer))
        checkpoint.drop_pages()
        advance(1)
    with allocating("the output head"):
        head = embedding if tied else loader.precise(checkpoint.shared("head.weight"), head_device)
        final_norm = loader.norm(checkpoint.shared, "final_norm", head_device)
    return ModelWeights(
        kind=kind,
        embedding=embedding,
        positions=None if shape.rotary else loader.precise(checkpoint.shared("positions.weight"), plan.cold),
        layers=tuple(layers),
        final_norm=final_norm,
        head=head,
    )


@dataclass(frozen=True)
class _Loader:
    """Reads the parts of a model one by one, each to where the plan wants it."""

    checkpoint: Checkpoint
    plan: TierPlan
    predictors: PredictorSet | None
    kind: Kind
    overlaps: "dict[torch.device, Overlap]"  # of the GPUs that hold attention

    def matrix(self, source: "Rows", device: "torch.device") -> PackedMatrix:
        """*source* as a matrix of its own; blocks stay of their type in a model of blocks, whichever the others have."""
        blocks = _block_kind(source)
        if blocks and self.kind in ("q8_0", "q4_0"):
            return pack(source, blocks, device)
        return pack(source, self.kind, device)

    def precise(self, source: "Rows", device: "torch.device") -> PackedMatrix:
        """Output head, learned positions and predictors: in a model of q4_0 they are q8_0, unless they come as q4_0.

        With a head of four bits the perplexity of a file by PowerInfer moves by 1.8 %, with predictors of four bits that of
        the ReGLU demo model by 3 %, because they name other neurons; with eight bits by 0.1 %.
        """
        plain_in_q4_0 = self.kind == "q4_0" and not _block_kind(source)
        return pack(source, "q8_0", device) if plain_in_q4_0 else self.matrix(source, device)

    def norm(self, tensor: "Callable[[str], torch.Tensor]", role: str, device: "torch.device") -> Norm:
        shape = self.checkpoint.shape
        bias = _vector(tensor(f"{role}.bias"), device) if shape.norm == "layer" else None
        return Norm(_vector(tensor(f"{role}.weight"), device), bias, shape.norm_epsilon)

    def layer(self, layer: int) -> LayerWeights:
        with allocating(f"the attention of layer {layer}"):
            return self._layer(layer)

    def _layer(self, layer: int) -> LayerWeights:
        import torch

        device = self.plan.attention_device(layer)
        attention = self.checkpoint.attention_rows(layer)
        maps = [attention[f"{role}.weight"] for role in ("query", "key", "value")]
        biases = [attention[f"{role}.bias"] for role in ("query", "key", "value") if f"{role}.bias" in attention]
        ffn_norm = None
        if self.checkpoint.shape.separate_ffn_norm:
            ffn_norm = self.norm(lambda role: self.checkpoint.layer(layer, role), "ffn_norm", device)
        return LayerWeights(
            attention_norm=self.norm(attention.__getitem__, "attention_norm", device),
            query_key_value=Linear(self._stacked(maps, device), _vector(torch.cat(biases), device) if biases else None),
            output=Linear(
                self.matrix(attention["output.weight"], device),
                _vector(attention["output.bias"], device) if "output.bias" in attention else None,
            ),
            ffn_norm=ffn_norm,
            ffn=self._ffn(layer, device),
        )

    def _stacked(self, maps: "Sequence[Rows]", device: "torch.device") -> PackedMatrix:
        """The rows of several matrices, one below the other."""
        rows, columns = sum(len(part) for part in maps), maps[0].shape[1]
        data = allocate(rows, row_bytes(self.kind, columns), device)
        first = 0
        for part in maps:
            fill(data[first : first + len(part)], self.kind, part)
            first += len(part)
        return PackedMatrix(self.kind, columns, data)

    def _ffn(self, layer: int, device: "torch.device") -> PlacedFfn:
        import torch

        checkpoint, shape = self.checkpoint, self.checkpoint.shape
        places = [(where, torch.from_numpy(ids)) for where, ids in self.plan.tiers(layer, shape.ffn_sizes[layer])]
        predictor = self._predictor(layer, torch.cat([ids for _, ids in places])) if self.predictors else None
        tiers, first = [], 0
        for where, ids in places:
            shared = self._shared_rows(layer, predictor, where, first, len(ids))
            tiers.append(self._tier(layer, where, ids, shared))
            first += len(ids)
        return PlacedFfn(
            tiers=tuple(tiers),
            down_bias=_vector(checkpoint.layer(layer, "down.bias"), device) if shape.ffn_bias else None,
            predictor=predictor,
            overlap=self.overlaps.get(device) if places[-1][0].type == "cpu" else None,
        )

    def _predictor(self, layer: int, order: "torch.Tensor") -> PlacedPredictor:
        """The predictor of *layer* for its neurons in this *order*, int64 [neurons]."""
        import torch

        assert self.predictors is not None, "asked for only with predictors"
        device, given = self.plan.predictor_device(layer), self.predictors.layers[layer]
        with allocating(f"the predictor of layer {layer}"):
            if isinstance(given, MlpWeights):
                fc1, fc2 = self.precise(given.fc1, device), self.precise(select_rows(given.fc2, order.numpy()), device)
                return MlpPredictor(fc1, fc2, self.predictors.threshold)
            checkpoint, shape = self.checkpoint, self.checkpoint.shape
            rows = select_rows(checkpoint.neuron_rows(layer, shape.deciding_role), order.numpy())
            bias = checkpoint.layer(layer, "up.bias")[order] if shape.ffn_bias else torch.zeros(len(order))
            return CopyPredictor(pack(rows, "q4_0", device), _vector(bias, device), given.threshold)

    def _shared_rows(
        self, layer: int, predictor: PlacedPredictor | None, device: "torch.device", first: int, count: int
    ) -> PackedMatrix | None:
        """Rows *first* … of a copy, where they are just what a tier of *count* neurons on *device* would hold itself."""
        # By the plan's names of devices: a tensor on "cuda" says that it is on "cuda:0".
        if not isinstance(predictor, CopyPredictor) or self.plan.predictor_device(layer) != device:
            return None
        shape, rows = self.checkpoint.shape, predictor.rows
        stored = None if shape.gated else _block_kind(self.checkpoint.neuron_rows(layer, shape.deciding_role))
        if self.kind != rows.kind or stored not in (None, rows.kind):
            return None
        return PackedMatrix(rows.kind, rows.columns, rows.data[first : first + count])

    def _tier(self, layer: int, device: "torch.device", ids: "torch.Tensor", shared: PackedMatrix | None) -> NeuronTier:
        with allocating(f"{len(ids)} neurons of layer {layer}"):
            return self._neurons(layer, device, ids, shared)

    def _neurons(
        self, layer: int, device: "torch.device", ids: "torch.Tensor", shared: PackedMatrix | None
    ) -> NeuronTier:
        """The rows of neurons *ids*, int64 [k]; up and down of gated neurons interleaved. Those that decide on firing are
        *shared*, where they are there already."""
        checkpoint, shape = self.checkpoint, self.checkpoint.shape
        length, activation = row_bytes(self.kind, shape.hidden_size), shape.known_activation()

        def rows(role: str) -> "Rows":
            source = checkpoint.neuron_rows(layer, role)
            if len(ids) == shape.ffn_sizes[layer]:  # all of them, in order
                return source
            return select_rows(source, ids.numpy())

        up_bias = _vector(checkpoint.layer(layer, "up.bias")[ids], device) if shape.ffn_bias else None
        if not shape.gated:
            up, down = shared or self.matrix(rows("up.weight"), device), self.matrix(rows("down.weight"), device)
            return NeuronTier(up, None, down, up_bias, activation, shape.activation_threshold)
        pairs = allocate(len(ids), 2 * length, device)
        return NeuronTier(
            # of one type with up: both meet the same prepared vector
            first=shared or pack(rows("gate.weight"), self.kind, device),
            up=fill(pairs[:, :length], self.kind, rows("up.weight")),
            down=fill(pairs[:, length:], self.kind, rows("down.weight")),
            up_bias=up_bias,
            activation=activation,
            activation_threshold=shape.activation_threshold,
        )


def _block_kind(source: "Rows") -> "QuantisedKind | None":
    """The type of the blocks that *source* is stored as, in rows; None for floating point and what has to become it."""
    stored = source.stored if isinstance(source, SelectedRows) else source
    return stored.kind if isinstance(stored, QuantisedMatrix) else None


def _vector(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    import torch

    return tensor.to(device, torch.float32)
