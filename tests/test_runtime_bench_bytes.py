"""What a token reads, counted, against the same by hand; and densities that are made up."""

from pathlib import Path

import pytest
import torch

from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.hf_model import load_hf_model
from pi_toolkit.runtime.bench_bytes import touched, weight_bytes
from pi_toolkit.runtime.bench_density import MadeUpDensity
from pi_toolkit.runtime.bench_replay import replay
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.generate import generate
from pi_toolkit.runtime.kernels.packed_matrix import Kind
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.sampling import Sampler, SamplingOptions
from pi_toolkit.runtime.tier_plan import TierPlan, all_cold
from pi_toolkit.runtime.weights import load_weights
from tiny_models import BAMBOO, PROSPARSE, save_family

CPU = torch.device("cpu")
PROMPT, STEPS = [1, 7, 30, 99], 6


def open_decoder(folder: Path, family: str, kind: Kind, plan: TierPlan | None = None) -> Decoder:
    """A tiny model with random predictors of width 32."""
    checkpoint = Checkpoint(save_family(folder / family, family))
    shape, generator = checkpoint.shape, torch.Generator().manual_seed(0)
    fc1 = tuple(torch.randn(32, shape.hidden_size, generator=generator) for _ in shape.ffn_sizes)
    fc2 = tuple(torch.randn(neurons, 32, generator=generator) for neurons in shape.ffn_sizes)
    predictors = PredictorSet.of_mlps(fc1, fc2, 1.0, None, None)
    weights = load_weights(checkpoint, plan or all_cold(shape, CPU, CPU), predictors, kind)
    return Decoder(shape, weights, 1, 64, "dense", threads=1)


def decode(decoder: Decoder, mode: Mode) -> list[int]:
    decoder.mode = mode
    return generate(decoder, PROMPT, 1 + STEPS, Sampler(SamplingOptions())).token_ids


def test_dense_reads_every_weight(tmp_path: Path) -> None:
    """A part of the model that is forgotten, or counted twice."""
    decoder = open_decoder(tmp_path, "llama", "float32")
    read = touched(decoder, PROMPT, decode(decoder, "dense"))
    shape = decoder.shape
    embedding = 4 * shape.vocabulary_size * shape.hidden_size
    predictors = 4 * sum(32 * (shape.hidden_size + neurons) for neurons in shape.ffn_sizes)
    weights = 4 * shape.num_parameters() - embedding + 4 * shape.hidden_size
    assert read.dense_bytes + read.neuron_bytes == weights
    assert weight_bytes(decoder.weights) == 4 * shape.num_parameters() + predictors
    positions = [len(PROMPT) + step + 1 for step in range(STEPS)]
    per_position = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    assert read.cache_bytes == per_position * sum(positions) / STEPS
    assert (read.predictor_bytes, read.candidate_share) == (0, None)


@pytest.mark.parametrize("family", ["llama", "opt", PROSPARSE])
@pytest.mark.parametrize("kind", ["float32", "q8_0"])
def test_rows_that_are_read(tmp_path: Path, family: str, kind: Kind) -> None:
    """Up and down rows of silent neurons, or of neurons that are no candidates, among what was read."""
    decoder = open_decoder(tmp_path, family, kind)
    shape = decoder.shape
    row = {"float32": 4 * shape.hidden_size, "q8_0": 64 + 128}[kind]
    neurons, later = sum(shape.ffn_sizes), shape.neuron_matrices - 1
    exact = touched(decoder, PROMPT, decode(decoder, "exact"))
    assert 0.2 < exact.firing_share < 0.8
    assert exact.neuron_bytes == pytest.approx(row * neurons * (1 + later * exact.firing_share))
    predicted = touched(decoder, PROMPT, decode(decoder, "predicted"))
    assert predicted.candidate_share is not None
    least, most = row * neurons * predicted.candidate_share, row * neurons * predicted.candidate_share * (1 + later)
    assert least < predicted.neuron_bytes < most
    assert predicted.predictor_bytes == sum(
        matrix.data.numel()
        for layer in decoder.weights.layers
        if (predictor := layer.ffn.predictor)
        for matrix in predictor.matrices
    )


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_rows_that_a_drelu_model_reads(tmp_path: Path, kind: Kind) -> None:
    """Down rows of neurons whose up product is negative, or no up rows of those, among what was read: counted from the
    products in transformers' own modules."""
    decoder = open_decoder(tmp_path, BAMBOO, kind)
    ids = decode(decoder, "exact")
    twin = load_hf_model(Checkpoint(tmp_path / BAMBOO), CPU, torch.float32)
    gates: list[torch.Tensor] = []
    ups: list[torch.Tensor] = []
    for layer in twin.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _module, _inputs, z: gates.append(z[0, -STEPS:] > 0))
        layer.mlp.up_proj.register_forward_hook(lambda _module, _inputs, z: ups.append(z[0, -STEPS:] > 0))
    with torch.inference_mode():
        twin(torch.tensor([PROMPT + ids[:-1]]))
    gate, up = torch.stack(gates), torch.stack(ups)
    firing, rows = int((gate & up).sum()), gate.numel() + int(gate.sum()) + int((gate & up).sum())
    exact, slack = touched(decoder, PROMPT, ids), 0 if kind == "float32" else 0.02
    row = decoder.shape.hidden_size * {"float32": 4, "float16": 2}[kind]
    assert exact.firing_share == pytest.approx(firing / gate.numel(), rel=1e-9 + slack)
    assert exact.neuron_bytes == pytest.approx(row * rows / STEPS, rel=1e-9 + slack)
    dense = touched(decoder, PROMPT, decode(decoder, "dense"))
    assert dense.neuron_bytes == row * 3 * sum(decoder.shape.ffn_sizes)
    predicted = touched(decoder, PROMPT, decode(decoder, "predicted"))
    assert predicted.candidate_share is not None
    assert predicted.candidate_share < predicted.neuron_bytes / (row * sum(decoder.shape.ffn_sizes)) < 3


def test_a_drelu_model_at_another_density(tmp_path: Path) -> None:
    """Rows that are turned although the other product decides as well."""
    decoder = open_decoder(tmp_path, BAMBOO, "q4_0")
    densities, ids = MadeUpDensity(decoder), decode(decoder, "exact")
    natural = touched(decoder, PROMPT, ids).firing_share
    assert 0.15 < natural < 0.35
    for density in (0.05, 0.4):
        densities.choose(density, tuple(PROMPT))
        assert touched(decoder, PROMPT, decode(decoder, "exact")).firing_share == pytest.approx(density, rel=0.25)
    densities.choose(None, tuple(PROMPT))
    assert decode(decoder, "exact") == ids


def test_a_replay_changes_nothing(tmp_path: Path) -> None:
    """Counting that leaves the decoder with another FFN or another text."""
    decoder = open_decoder(tmp_path, "llama", "float32")
    before, ids = decoder.weights, decode(decoder, "predicted")
    seen: list[int] = []
    replay(decoder, PROMPT, lambda layer, *_: seen.append(layer))
    assert seen == list(range(decoder.shape.num_layers))
    assert decoder.weights is before and decode(decoder, "predicted") == ids


@pytest.mark.parametrize("family", ["llama", "opt", PROSPARSE])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q8_0", "q4_0"])
def test_made_up_density(tmp_path: Path, family: str, kind: Kind) -> None:
    """Figures at 5 % that were measured at another density, or a model that stays changed."""
    decoder = open_decoder(tmp_path, family, kind)
    densities = MadeUpDensity(decoder)
    ids = {mode: decode(decoder, mode) for mode in ("exact", "predicted")}
    natural = touched(decoder, PROMPT, ids["exact"]).firing_share
    for density in (0.05, 0.2, 0.9 * natural):
        densities.choose(density, tuple(PROMPT))
        exact = touched(decoder, PROMPT, decode(decoder, "exact"))
        assert exact.firing_share == pytest.approx(density, rel=0.4)
        predicted = touched(decoder, PROMPT, decode(decoder, "predicted"))
        assert predicted.candidate_share is not None and predicted.candidate_share < 1.5 * density
    densities.choose(1.0, tuple(PROMPT))
    raised = touched(decoder, PROMPT, decode(decoder, "predicted"))
    assert raised.candidate_share == 1.0
    densities.choose(None, tuple(PROMPT))
    assert {mode: decode(decoder, mode) for mode in ("exact", "predicted")} == ids


def test_turned_rows_compute_the_negative(tmp_path: Path) -> None:
    """A block format whose scales lie elsewhere than the change of sign expects."""
    for kind in ("q8_0", "q4_0", "float16"):
        decoder = open_decoder(tmp_path, "llama", kind)
        first = decoder.weights.layers[0].ffn.tiers[0].first
        before = first.values().clone()
        densities = MadeUpDensity(decoder)
        densities.choose(1.0, tuple(PROMPT))
        turned = (first.values() == -before).all(dim=1)
        same = (first.values() == before).all(dim=1)
        assert bool((turned | same).all()) and int(turned.sum()) > len(before) // 2


def test_counting_over_two_tiers(tmp_path: Path) -> None:
    """Scores of the first tier's neurons applied to the second's."""
    import numpy as np

    whole = open_decoder(tmp_path, "llama", "float32")
    ids = decode(whole, "predicted")
    hot = tuple(np.arange(0, neurons, 3) for neurons in whole.shape.ffn_sizes)
    layers = whole.shape.num_layers
    plan = TierPlan(CPU, CPU, hot, (True,) * layers, (True,) * layers, True)
    split = open_decoder(tmp_path, "llama", "float32", plan)
    split.mode = "predicted"
    one, two = touched(whole, PROMPT, ids), touched(split, PROMPT, ids)
    assert two.neuron_bytes == one.neuron_bytes
    assert two.candidate_share == one.candidate_share
