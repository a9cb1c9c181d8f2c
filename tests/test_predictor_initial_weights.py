"""The firing map says who fires, and predictors cut from it keep what it says."""

from pathlib import Path

import pytest
import torch

from pi_toolkit.predictor_training.comparison import rounded_to_bits
from pi_toolkit.predictor_training.firing_map import FiringMap, firing_map, neuron_impact
from pi_toolkit.predictor_training.initial_weights import cut_map, weights_of_map
from pi_toolkit.predictor_training.predictor import scores
from pi_toolkit.predictor_training.sample import LayerSamples
from pi_toolkit.predictor_training.train import balanced, gradients, typical_magnitude
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.hf_model import load_hf_model, observe_ffn
from test_predictor_training import samples_of
from tiny_models import CONFIGS, save_family

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", CONFIGS)
def test_firing_map_says_who_fires(tmp_path: Path, family: str) -> None:
    """A forgotten norm, bias or mean, which would leave training to find what the weights already say."""
    checkpoint = Checkpoint(save_family(tmp_path / "model", family))
    model = load_hf_model(checkpoint, CPU, torch.float32)
    inputs: dict[int, torch.Tensor] = {}
    fires: dict[int, torch.Tensor] = {}
    ids = torch.randint(0, 4096, (4, 32), generator=torch.Generator().manual_seed(0))
    with (
        torch.inference_mode(),
        observe_ffn(
            model,
            checkpoint.shape,
            predictor_input=lambda layer, x: inputs.update({layer: x}),
            pre_activation=lambda layer, z: fires.update({layer: z > 0}),
        ),
    ):
        model(ids)
    for layer in range(3):
        found = firing_map(checkpoint, layer)
        z = inputs[layer] @ found.weight.T + found.bias * found.magnitude(inputs[layer])[:, None]
        assert ((z > 0) == fires[layer]).float().mean() > 0.999, layer


@pytest.fixture(scope="module")
def linear_layer() -> tuple[FiringMap, LayerSamples]:
    """A layer of 50 neurons whose map has rank 16, and inputs with a mean."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(50, 16, generator=generator)
    inputs = (torch.randn(4000, 16, generator=generator) + 4).bfloat16()
    firing = FiringMap(weight - weight.mean(dim=1, keepdim=True), torch.zeros(50), centred=False)
    return firing, samples_of(inputs.float(), inputs.float() @ firing.weight.T > 0)


def agreement(weights: tuple[torch.Tensor, torch.Tensor], samples: LayerSamples, scale: float) -> float:
    inputs, fires = samples.batch(slice(0, len(samples)))
    return float(((scores(*weights, inputs / scale) >= 3.0) == fires).float().mean())


def test_map_of_full_rank_needs_no_training(linear_layer: tuple[FiringMap, LayerSamples]) -> None:
    """Directions, offsets or their way back through unit 0 that do not fit together."""
    firing, samples = linear_layer
    scale, generator = typical_magnitude(samples), torch.Generator().manual_seed(0)
    cut = cut_map(firing, samples, scale)
    assert cut.unexplained(17) < 1e-3 < cut.unexplained(9) < cut.unexplained(2) < 1
    one = torch.tensor(1.0)
    by_width = [
        agreement(weights_of_map(cut, samples, scale, w, one, generator), samples, scale) for w in (2, 9, 17, 33)
    ]
    assert by_width == sorted(by_width) and by_width[-1] > 0.99
    assert by_width[2] > 0.95


def test_gradients_are_those_of_autograd() -> None:
    """A slip in the gradients that are written out by hand."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    generator = torch.Generator().manual_seed(2)
    fc1, fc2 = torch.randn(6, 5, generator=generator), torch.randn(7, 6, generator=generator)
    inputs, fires = torch.randn(11, 5, generator=generator), torch.rand(11, 7, generator=generator) > 0.7
    weight = torch.tensor(2.5)
    a, b = fc1.clone().requires_grad_(), fc2.clone().requires_grad_()
    binary_cross_entropy_with_logits((inputs @ a.T).relu() @ b.T - 3.0, fires.float(), pos_weight=weight).backward()
    found = gradients(fc1, fc2, inputs, fires, weight, torch.float32)
    torch.testing.assert_close(found, (a.grad, b.grad))


@pytest.mark.parametrize("family", CONFIGS)
def test_impact_is_what_a_firing_adds_to_the_output(tmp_path: Path, family: str) -> None:
    """Weights of the loss that follow another model's activations: a forgotten factor, norm or bias."""
    checkpoint = Checkpoint(save_family(tmp_path / "model", family))
    model = load_hf_model(checkpoint, CPU, torch.float32)
    inputs: list[torch.Tensor] = []
    activations: list[torch.Tensor] = []
    ids = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(0))
    with (
        torch.inference_mode(),
        observe_ffn(
            model,
            checkpoint.shape,
            predictor_input=lambda _, x: inputs.append(x),
            activation=lambda _, h: activations.append(h),
        ),
    ):
        model(ids)
    h = activations[1].abs()
    firings = (h > 0).sum(dim=0)
    expected = h.sum(dim=0) / firings.clamp(min=1) * checkpoint.neuron_rows(1, "down.weight").norm(dim=1)
    expected = expected / expected[firings > 0].mean()
    found = neuron_impact(checkpoint, 1, inputs[1])
    torch.testing.assert_close(found[firings > 0], expected[firings > 0], atol=1e-3, rtol=1e-2)
    assert (found[firings == 0] == 1).all()


def test_balanced_predictor_scores_the_same_and_survives_eight_bits() -> None:
    """Columns of fc2 of so different sizes that one of them takes all the steps of a Q8_0 block."""
    generator = torch.Generator().manual_seed(4)
    fc1, fc2 = torch.randn(32, 16, generator=generator), torch.randn(50, 32, generator=generator)
    fc2[:, 0] *= 100
    fc2[:, 5] = 0
    inputs = torch.randn(200, 16, generator=generator)
    found = balanced(fc1, fc2)
    torch.testing.assert_close(scores(*found, inputs), scores(fc1, fc2, inputs), rtol=1e-4, atol=1e-3)

    def error(weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rounded = rounded_to_bits(weights[1], 8)
        return (scores(weights[0], rounded, inputs) - scores(fc1, fc2, inputs)).square().mean().sqrt()

    assert error(found) < 0.6 * error((fc1, fc2))
