"""Training: planted problems are learned, thresholds are folded exactly, extreme layers and short runs are legal."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pi_toolkit.predictor_training.predictor import Quality, measure_quality, scores, threshold_for_recall
from pi_toolkit.predictor_training.sample import LayerSamples
from pi_toolkit.predictor_training.sizing import SHARE_OF_MODEL, width_within_share
from pi_toolkit.predictor_training.train import TrainedLayer, TrainingOptions, train_layer, typical_magnitude
from pi_toolkit.profiler.model_families import ModelShape, Rotary

CPU = torch.device("cpu")
HIDDEN, NEURONS = 16, 50
OPTIONS = TrainingOptions(epochs=4, batch_size=32, learning_rate=5e-3, recall=0.95, seed=0)
Splits = tuple[LayerSamples, LayerSamples, LayerSamples]


def samples_of(inputs: torch.Tensor, fires: torch.Tensor) -> LayerSamples:
    """Samples as the store keeps them: bfloat16 and bits, packed here by arithmetic."""
    tokens, neurons = fires.shape
    padded = torch.zeros(tokens, -(-neurons // 8) * 8, dtype=torch.uint8)
    padded[:, :neurons] = fires
    powers = 2 ** torch.arange(8)
    bits = (padded.view(tokens, -1, 8) * powers).sum(dim=2).to(torch.uint8)
    return LayerSamples(inputs.bfloat16(), bits, neurons, CPU)


def planted(tokens: tuple[int, int, int] = (2000, 400, 400), scale: float = 1.0, bias: float = -0.7) -> Splits:
    """A random ReLU layer on inputs of rank four with a mean, as residual streams have one: its firing can be predicted."""
    generator = torch.Generator().manual_seed(3)
    mixing, mean = torch.randn(4, HIDDEN, generator=generator), torch.randn(HIDDEN, generator=generator)
    gate = torch.randn(NEURONS, HIDDEN, generator=generator) / HIDDEN**0.5

    def split(count: int) -> LayerSamples:
        inputs = (torch.randn(count, 4, generator=generator) @ mixing + 2 * mean).bfloat16().float()
        return samples_of(inputs * scale, inputs @ gate.T + bias > 0)

    training, calibration, held_out = (split(count) for count in tokens)
    return training, calibration, held_out


def constant(fires: bool) -> Splits:
    """A layer none or all of whose neurons fire on every token."""
    generator = torch.Generator().manual_seed(4)
    parts = [torch.randn(count, HIDDEN, generator=generator) for count in (200, 50, 50)]
    training, calibration, held_out = (samples_of(x, torch.full((len(x), NEURONS), fires)) for x in parts)
    return training, calibration, held_out


def brute_force_quality(fc1: torch.Tensor, fc2: torch.Tensor, threshold: float, samples: LayerSamples) -> Quality:
    """Token by token, neuron by neuron, over the same scores."""
    inputs, fires = samples.batch(slice(0, len(samples)))
    named = ((inputs @ fc1.T).clamp(min=0) @ fc2.T).tolist()
    decisions = firings = candidates = hits = 0
    for token, truth in enumerate(fires.tolist()):
        for neuron, fired in enumerate(truth):
            candidate = named[token][neuron] >= threshold
            decisions, firings, candidates = decisions + 1, firings + fired, candidates + candidate
            hits += fired and candidate
    return Quality(decisions, firings, candidates, hits)


@pytest.fixture(scope="module")
def trained() -> TrainedLayer:
    return train_layer(*planted(), 32, OPTIONS)


def test_planted_problem_is_learned(trained: TrainedLayer) -> None:
    """Prevents a training loop that runs and learns nothing: recall comes from skill, not from naming everything."""
    quality = trained.quality
    assert 0.15 < quality.firing_share < 0.5
    assert quality.recall >= 0.9
    assert quality.density < 1.35 * quality.firing_share


def test_reported_quality_is_that_of_the_stored_weights(trained: TrainedLayer) -> None:
    """Prevents numbers measured before folding or rounding, which the files then do not have."""
    stored = [weight.half() for weight in (trained.fc1, trained.fc2)]
    assert all(
        torch.equal(half.float(), weight) for half, weight in zip(stored, (trained.fc1, trained.fc2), strict=True)
    )
    fc1, fc2 = (weight.float() for weight in stored)
    held_out = planted()[2]
    expected = brute_force_quality(fc1, fc2, 1.0, held_out)
    assert trained.quality == expected
    assert expected.recall == expected.hits / expected.firings
    assert expected.precision == expected.hits / expected.candidates
    assert expected.density == expected.candidates / (len(held_out) * NEURONS)


@pytest.mark.parametrize("recall", [0.5, 0.9, 0.95, 0.98, 0.999])
def test_recall_is_reached_on_the_calibration_documents(recall: float) -> None:
    """Prevents a threshold that rounding to F16 pushes below what the user asked for."""
    training, calibration, held_out = planted((800, 300, 100))
    layer = train_layer(training, calibration, held_out, 32, replace(OPTIONS, recall=recall))
    assert measure_quality(layer.fc1, layer.fc2, 1.0, calibration.batches(64)).recall >= recall


@pytest.mark.parametrize("recall", [0.01, 0.5, 0.9, 0.98, 0.9999])
def test_threshold_is_the_largest_that_reaches_the_recall(recall: float) -> None:
    """Prevents an off-by-one among the scores, which costs either recall or speed."""
    generator = torch.Generator().manual_seed(5)
    fc1, fc2 = torch.rand(4, HIDDEN, generator=generator), torch.rand(NEURONS, 4, generator=generator)
    calibration = planted((1, 37, 1))[1]
    threshold = threshold_for_recall(fc1, fc2, recall, calibration.batches(10))
    inputs, fires = calibration.batch(slice(0, 37))
    of_firings = sorted(scores(fc1, fc2, inputs)[fires].tolist())
    reaching = [t for t in of_firings if sum(score >= t for score in of_firings) >= recall * len(of_firings)]
    assert threshold == max([*[t for t in reaching if t > 0], 1e-3])


def test_batches_do_not_change_the_threshold() -> None:
    """Prevents a threshold over the last batch alone."""
    generator = torch.Generator().manual_seed(6)
    fc1, fc2 = torch.rand(4, HIDDEN, generator=generator), torch.rand(NEURONS, 4, generator=generator)
    calibration = planted((1, 64, 1))[1]
    thresholds = [threshold_for_recall(fc1, fc2, 0.9, calibration.batches(size)) for size in (1, 7, 64)]
    assert thresholds == pytest.approx([thresholds[0]] * 3, rel=1e-6)


def test_layer_that_never_fires_names_almost_nothing() -> None:
    """Prevents a division by zero firings, and a silent layer that is computed in full."""
    layer = train_layer(*constant(False), 32, OPTIONS)
    assert (layer.quality.firings, layer.quality.recall) == (0, 1.0)
    assert layer.quality.density < 0.05
    assert layer.fc1.isfinite().all() and layer.fc2.isfinite().all()


def test_layer_that_always_fires_names_everything() -> None:
    """Prevents infinities from the logarithm of a share of one."""
    layer = train_layer(*constant(True), 32, OPTIONS)
    assert layer.quality.firing_share == 1.0
    assert layer.quality.recall >= 0.9
    assert layer.quality.precision == 1.0
    assert layer.fc1.half().isfinite().all() and layer.fc2.half().isfinite().all()


def test_inputs_that_are_all_zero_are_legal() -> None:
    """Prevents a division by the magnitude of nothing."""
    zeros = [samples_of(torch.zeros(n, HIDDEN), torch.zeros(n, NEURONS, dtype=torch.bool)) for n in (64, 8, 8)]
    layer = train_layer(*zeros, 32, OPTIONS)
    assert layer.fc1.isfinite().all() and layer.fc2.isfinite().all()


@pytest.mark.parametrize("scale", [2.0**-7, 2.0**7])
def test_magnitude_of_the_inputs_does_not_matter(scale: float, trained: TrainedLayer) -> None:
    """Prevents deep layers, whose residual stream is a hundred times larger, from being learned worse."""
    layer = train_layer(*planted(scale=scale), 32, OPTIONS)
    assert layer.quality.recall == pytest.approx(trained.quality.recall, abs=0.02)
    assert layer.quality.density == pytest.approx(trained.quality.density, abs=0.03)


def test_typical_magnitude_is_the_root_mean_square() -> None:
    """Prevents a scale over the first batch alone or one that overflows."""
    inputs = torch.tensor([[3e18, -4e18], [0.0, 0.0]]).bfloat16()
    samples = LayerSamples(inputs, torch.zeros(2, 1, dtype=torch.uint8), 3, CPU)
    expected = (sum(value**2 for value in inputs.double().flatten().tolist()) / 4) ** 0.5
    assert typical_magnitude(samples) == pytest.approx(expected)


def test_same_seed_gives_identical_weights(trained: TrainedLayer) -> None:
    """Prevents results that cannot be reproduced, and a seed without effect."""
    again = train_layer(*planted(), 32, OPTIONS)
    other = train_layer(*planted(), 32, replace(OPTIONS, seed=1))
    assert torch.equal(again.fc1, trained.fc1) and torch.equal(again.fc2, trained.fc2)
    assert not torch.equal(other.fc1, trained.fc1)


@pytest.mark.parametrize("steps", range(1, 22))
def test_any_number_of_steps_is_legal(steps: int) -> None:
    """Prevents the learning-rate schedule's division by zero at ten steps, and others like it."""
    tokens, advanced = 32 * steps, []
    layer = train_layer(*planted((tokens, 20, 20)), 32, replace(OPTIONS, epochs=1), advanced.append)
    assert sum(advanced) == tokens
    assert layer.fc2.isfinite().all()


def test_last_batch_of_one_sample_is_used() -> None:
    """Prevents samples that are dropped because they do not fill a batch."""
    advanced: list[int] = []
    train_layer(*planted((65, 20, 20)), 32, replace(OPTIONS, epochs=2), advanced.append)
    assert sorted(advanced) == [1, 1, 32, 32, 32, 32]


@pytest.mark.parametrize("neurons", [1, 7, 8, 9, 50])
def test_bits_are_unpacked_per_neuron(neurons: int) -> None:
    """Prevents masks that are shifted by the padding of the last byte."""
    fires = torch.rand(13, neurons, generator=torch.Generator().manual_seed(7)) > 0.5
    inputs = torch.arange(13.0)[:, None].expand(13, HIDDEN)
    samples = samples_of(inputs, fires)
    rows = torch.tensor([4, 0, 12])
    assert torch.equal(samples.batch(rows)[1], fires[rows])
    assert torch.equal(torch.cat([mask for _, mask in samples.batches(5)]), fires)
    assert torch.equal(torch.cat([x for x, _ in samples.batches(5)]), inputs)


def test_measured_quality_equals_counting_by_hand() -> None:
    """Prevents recall and precision from being swapped or averaged over batches of different size."""
    generator = torch.Generator().manual_seed(8)
    fc1, fc2 = torch.randn(4, HIDDEN, generator=generator), torch.randn(NEURONS, 4, generator=generator)
    held_out = planted((1, 1, 37))[2]
    expected = brute_force_quality(fc1, fc2, 1.0, held_out)
    assert measure_quality(fc1, fc2, 1.0, held_out.batches(10)) == expected
    assert 0 < expected.hits < min(expected.firings, expected.candidates)


def test_score_at_the_threshold_names_the_neuron() -> None:
    """Prevents > where PowerInfer computes ≥: folded thresholds put scores exactly at 1."""
    inputs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    samples = samples_of(inputs, torch.tensor([[True, False], [False, True]]))
    quality = measure_quality(torch.eye(2), torch.eye(2), 1.0, samples.batches(2))
    assert quality == Quality(decisions=4, firings=2, candidates=2, hits=2)


def opt_shape(hidden: int, ffn_sizes: tuple[int, ...], vocabulary: int) -> ModelShape:
    heads = hidden // 64
    attention = dict(num_heads=heads, num_kv_heads=heads, head_dim=64, max_positions=2048, attention_bias=True)
    flags = dict(gated=False, norm="layer", norm_epsilon=1e-5, ffn_bias=True, tied_embeddings=True, rotary=None)
    sizes = dict(vocabulary_size=vocabulary, hidden_size=hidden, ffn_sizes=ffn_sizes)
    return ModelShape(family="opt", activation="relu", position_offset=2, **sizes, **attention, **flags)  # type: ignore[arg-type]


REAL_SHAPES: dict[str, Callable[[], ModelShape]] = {
    "opt-6.7b": lambda: opt_shape(4096, (16384,) * 32, 50272),
    "opt-175b": lambda: opt_shape(12288, (49152,) * 96, 50272),
    "llama-7b": lambda: replace(
        opt_shape(4096, (11008,) * 32, 32000), gated=True, rotary=Rotary(1e4), attention_bias=False, ffn_bias=False
    ),
    "uneven": lambda: opt_shape(1024, (512, 4096, 8192), 5000),
}


@pytest.mark.parametrize("name", REAL_SHAPES)
def test_width_stays_within_a_tenth_of_the_model(name: str) -> None:
    """Prevents predictors that eat the memory they are meant to save, or that are narrower than they may be."""
    shape = REAL_SHAPES[name]()
    width = width_within_share(shape)
    assert width % 32 == 0 and width > 0

    def share(width: int) -> float:
        return sum(width * (shape.hidden_size + neurons) for neurons in shape.ffn_sizes) / shape.num_parameters()

    assert share(width) <= SHARE_OF_MODEL < share(width + 32)


def test_width_of_the_smallest_models_is_one_block() -> None:
    """Prevents a width of zero where a tenth of the model is less than one block."""
    assert width_within_share(replace(opt_shape(64, (64,), 10), max_positions=1)) == 32
