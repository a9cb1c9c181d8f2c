"""A model as the simulation knows it: its shape, how often each neuron fires, and predictors of some size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi_toolkit.predictor_training.predictor_size import PredictorSize
from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.profiler.model_families import ModelShape, read_shape

from .firing_law import firing_shares_by_law
from .model_presets import MEAN_PREDICTOR_SHARE, REGLU, RELU, SWIGLU, Locality80, ModelPreset, presets
from .token_time import firing_shares

# The paper does not say in which type its predictors are kept. In F16 those of Falcon-40B (Table 6) and its attention would
# leave nothing of 24 GB for neurons, of which it reports that they are there (Figures 12 and 15).
PREDICTOR_DTYPE = "q8_0"
# Tokens of KV cache that engines are given room for before they start. The paper's longest measurements (Table 4, 1.5K tokens
# of prompt and 256 of output) need nearly as many, and OPT and Falcon can take no more.
CONTEXT = 2048
_WIDTH_MULTIPLE = 32
LAWS: dict[str, Locality80] = {"relu": RELU, "reglu": REGLU, "swiglu": SWIGLU}


@dataclass(frozen=True)
class SimulatedModel:
    """``firing_shares``: per layer float64 [neurons], the share of tokens on which each neuron fires; ``context``: tokens of
    KV cache that have room, of which a token reads ``tokens_read`` (None: all); ``predictor_sizes``: of each layer's
    predictor."""

    shape: ModelShape
    firing_shares: tuple[np.ndarray, ...]
    dtype: str
    context: int
    predictor_sizes: tuple[PredictorSize, ...]
    predictor_dtype: str = PREDICTOR_DTYPE
    tokens_read: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """What a name or path stands for, before a type and a context are chosen. ``firing_shares``: measured ones, of a
    workspace's profile; ``preset``: what the paper says of the model; ``predictor_sizes``: of trained predictors."""

    shape: ModelShape
    preset: ModelPreset | None = None
    firing_shares: tuple[np.ndarray, ...] | None = None
    predictor_sizes: tuple[PredictorSize, ...] | None = None


def model_facts(name: str) -> ModelFacts:
    """Of a preset, a workspace or model file with a profile, or a Hugging Face directory (its config alone is read).

    Raises ``PlacementError`` for a name that is none of these, and what the readers raise.
    """
    if name in presets():
        return ModelFacts(presets()[name].shape, presets()[name])
    path = Path(name)
    if (path / "config.json").is_file() and not (path / "model.json").exists():
        from pi_toolkit.profiler.checkpoint import read_config

        return ModelFacts(read_shape(read_config(path)))
    if not path.exists():
        raise PlacementError(
            f"{name!r} is neither a workspace, a Hugging Face directory nor a preset: give one of {', '.join(presets())}"
        )
    return _of_workspace(path)


def simulated_model(
    facts: ModelFacts,
    dtype: str,
    context: int,
    density: float | None = None,
    locality: Locality80 | None = None,
    predictor_share: float | None = None,
    predictor_dtype: str = PREDICTOR_DTYPE,
    tokens_read: int | None = None,
) -> SimulatedModel:
    """*facts* completed: what is given here comes before what the facts say.

    Raises ``PlacementError`` where nothing says how many neurons fire.
    """
    shape, preset = facts.shape, facts.preset
    shares = None if density is not None or locality is not None else facts.firing_shares
    if shares is None:
        if density is None and preset is None and facts.firing_shares is None:
            raise PlacementError(
                "nothing says how many of this model's neurons fire: give --density, or a profiled workspace"
            )
        mean = density if density is not None else preset.density if preset else _mean(facts.firing_shares or ())
        law = locality or (preset.locality if preset else REGLU if shape.gated else RELU)
        shares = firing_shares_by_law(shape.ffn_sizes, mean, law)
    sizes = facts.predictor_sizes if predictor_share is None else None
    if sizes is None:
        share = (
            predictor_share
            if predictor_share is not None
            else preset.predictor_share
            if preset
            else MEAN_PREDICTOR_SHARE
        )
        sizes = predictor_widths(shape, share)
    return SimulatedModel(shape, shares, dtype, context, sizes, predictor_dtype, tokens_read)


def predictor_widths(shape: ModelShape, share: float) -> tuple[int, ...]:
    """Equal widths at which the predictors have *share* times the model's parameters; a multiple of 32, at least 32."""
    per_unit_of_width = sum(shape.hidden_size + neurons for neurons in shape.ffn_sizes)
    width = share * shape.num_parameters() / per_unit_of_width
    return (max(1, round(width / _WIDTH_MULTIPLE)) * _WIDTH_MULTIPLE,) * shape.num_layers


def _mean(shares: Sequence[np.ndarray]) -> float:
    return float(np.mean([share.mean() for share in shares]))


def _of_workspace(path: Path) -> ModelFacts:
    from pi_toolkit.predictor_training.predictor_file import read_sizes
    from pi_toolkit.profiler import activation_stats
    from pi_toolkit.profiler.model_gguf import GgufModel
    from pi_toolkit.profiler.workspace import Workspace, read_model

    workspace = Workspace(path)
    record = read_model(workspace)
    sizes = record.shape.ffn_sizes
    stats = activation_stats.read(workspace.activation, sizes, record.fingerprint)
    predictors: Sequence[PredictorSize] | None = None
    if workspace.is_file:
        predictors = GgufModel(path).predictor_sizes()
    elif workspace.predictor.exists():
        predictors = read_sizes(workspace.predictor, record.shape.hidden_size, sizes, record.fingerprint)
    shares = firing_shares(stats.counts, stats.tokens)
    return ModelFacts(record.shape, None, shares, tuple(predictors) if predictors else None)
