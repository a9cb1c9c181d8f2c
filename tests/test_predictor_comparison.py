"""Kinds of predictors are compared at equal density, and by what they really hold."""

import pytest
import torch

from pi_toolkit.predictor_training.comparison import compare_kinds, recall_at, rounded_to_bits
from pi_toolkit.predictor_training.firing_map import FiringMap
from pi_toolkit.predictor_training.sample import LayerSamples
from pi_toolkit.predictor_training.train import TrainingOptions
from test_predictor_training import samples_of

OPTIONS = TrainingOptions(epochs=2, batch_size=32, learning_rate=5e-3, recall=0.95, seed=0)


@pytest.fixture(scope="module")
def layer() -> tuple[FiringMap, tuple[LayerSamples, LayerSamples, LayerSamples]]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 32, generator=generator)
    firing = FiringMap(weight - weight.mean(dim=1, keepdim=True), torch.full((64,), -4.0), centred=False)

    def split(count: int) -> LayerSamples:
        inputs = (torch.randn(count, 32, generator=generator) + 2).bfloat16().float()
        return samples_of(inputs, inputs @ firing.weight.T + firing.bias * firing.magnitude(inputs)[:, None] > 0)

    return firing, (split(1000), split(300), split(300))


def test_kinds_are_compared_at_equal_density(layer: tuple[FiringMap, tuple[LayerSamples, ...]]) -> None:
    """A kind that wins because it names more, or is charged fewer bytes than it reads."""
    firing, splits = layer
    found = compare_kinds(splits, firing, 32, OPTIONS, candidates=1.2)  # type: ignore[arg-type]
    assert found["copy in 8 bits"][1] > 0.99
    assert (
        found["copy in 8 bits"][1] >= found["copy in 4 bits"][1] > found["copy in 2 bits"][1] > found["signs"][1] - 0.1
    )
    assert found["MLP from the map"][0] == 1.0
    mlp_bytes = 2 * 32 * (32 + 64)
    assert found["copy in 4 bits"][0] == pytest.approx(64 * 32 * 18 / 32 / mlp_bytes)
    assert found["signs"][0] == pytest.approx(64 * 32 / 8 / mlp_bytes)


def test_recall_counts_the_best_scores_alone(layer: tuple[FiringMap, tuple[LayerSamples, ...]]) -> None:
    """Recall at a threshold that names another number of neurons than asked for."""
    _, splits = layer
    _, fires = splits[2].batch(slice(0, 300))
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand(fires.shape, generator=generator)
    exact = iter([fires.float() + 0.001 * noise])
    assert recall_at(lambda _: next(exact), splits[2], 1.0) == 1.0
    chance = iter([noise])
    assert recall_at(lambda _: next(chance), splits[2], 1.0) == pytest.approx(float(fires.float().mean()), abs=0.05)


@pytest.mark.parametrize(("columns", "bits"), [(64, 8), (64, 4), (50, 2)])
def test_rounding_has_the_steps_of_its_bits(columns: int, bits: int) -> None:
    """Copies of more bits than they are charged for."""
    weight = torch.randn(3, columns, generator=torch.Generator().manual_seed(3))
    block = 32 if columns == 64 else columns
    rounded = rounded_to_bits(weight, bits).reshape(-1, block)
    assert all(len(row.abs().unique()) <= 2 ** (bits - 1) for row in rounded)
    torch.testing.assert_close(rounded.abs().amax(dim=1), weight.reshape(-1, block).abs().amax(dim=1))
