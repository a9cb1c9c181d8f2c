"""Layers predicted by copies of their rows, on every path: against a slow reference that computes with the same mask."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_cases import LateStream, gpu_step_of, greedy_tokens, step_of
from pi_toolkit.predictor_training.firing_copy import firing_copy
from pi_toolkit.predictor_training.masked_perplexity import masked_ffn
from pi_toolkit.predictor_training.masks import CopyMask, Mask, MlpMask
from pi_toolkit.predictor_training.predictor_file import MlpWeights, PredictorSet, RowsCopy
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.hf_model import load_hf_model
from pi_toolkit.runtime.bench_bytes import touched, weight_bytes
from pi_toolkit.runtime.bench_density import MadeUpDensity
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.generate import generate
from pi_toolkit.runtime.kernels.packed_matrix import Kind
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.placed_predictor import CopyPredictor
from pi_toolkit.runtime.sampling import Sampler, SamplingOptions
from pi_toolkit.runtime.tier_plan import TierPlan, all_cold
from pi_toolkit.runtime.weights import load_weights
from test_runtime_decoder import PLACEMENTS, TOKENS, all_logits, plan_for
from tiny_models import BAMBOO, CONFIGS, PROSPARSE, VOCABULARY, save_family

CPU = torch.device("cpu")
ISA = ["portable", "avx2", "avx512", "avx512_vnni", "torch"]
PROMPT = (1, 7, 30, 99)


@pytest.fixture(scope="module", params=[*CONFIGS, BAMBOO, PROSPARSE])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(save_family(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(save_family(tmp_path_factory.mktemp("llama"), "llama"))


def mixed(checkpoint: Checkpoint, threshold: float = 0.4) -> PredictorSet:
    """Copies with a threshold that leaves firings out, and an MLP in the middle layer."""
    shape, generator = checkpoint.shape, torch.Generator().manual_seed(8)
    fc1 = torch.randn(32, shape.hidden_size, generator=generator)
    fc2 = torch.randn(shape.ffn_sizes[1], 32, generator=generator)
    return PredictorSet((RowsCopy(threshold), MlpWeights(fc1, fc2), RowsCopy(threshold)), 0.5, None, None)


def masks(checkpoint: Checkpoint, predictors: PredictorSet) -> list[Mask]:
    return [
        CopyMask(firing_copy(checkpoint, number, CPU), layer.threshold)
        if isinstance(layer, RowsCopy)
        else MlpMask(layer.fc1, layer.fc2, predictors.threshold)
        for number, layer in enumerate(predictors.layers)
    ]


def decoder_of(
    checkpoint: Checkpoint,
    predictors: PredictorSet | None,
    kind: Kind = "float32",
    mode: Mode = "predicted",
    plan: TierPlan | None = None,
) -> Decoder:
    weights = load_weights(checkpoint, plan or all_cold(checkpoint.shape, CPU, CPU), predictors, kind)
    return Decoder(checkpoint.shape, weights, slots=3, context=TOKENS + 24, mode=mode)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (3, TOKENS), generator=torch.Generator().manual_seed(0))


def reference_logits(checkpoint: Checkpoint, predictors: PredictorSet, ids: torch.Tensor) -> torch.Tensor:
    """The ``transformers`` model in which neurons that no predictor names add nothing."""
    model = load_hf_model(checkpoint, CPU, torch.float32)
    with torch.inference_mode(), masked_ffn(model, checkpoint.shape, masks(checkpoint, predictors)):
        return model(ids).logits


@pytest.mark.parametrize("placement", list(PLACEMENTS))
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_logits_are_those_of_the_same_mask(
    checkpoint: Checkpoint, placement: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the wrong rows, without its bias, of another tier's neurons, or fed with the residual stream."""
    if kernels == "torch":
        monkeypatch.setenv("PI_CPU_ISA", "torch")
    predictors, plan = mixed(checkpoint), plan_for(placement, checkpoint.shape.ffn_sizes)
    got = all_logits(decoder_of(checkpoint, predictors, plan=plan), tokens())
    want = reference_logits(checkpoint, predictors, tokens())
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    dense = all_logits(decoder_of(checkpoint, None, mode="dense"), tokens())
    assert (got - dense).abs().max() > 0.01, "nothing was left out"


@pytest.mark.parametrize("isa", ISA)
def test_steps_name_the_same_neurons(checkpoint: Checkpoint, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruction set, or the step as a whole, whose scores are others than those of a prompt: they round the input to
    eight bits, and so may disagree about single neurons only."""
    monkeypatch.setenv("PI_CPU_ISA", isa)
    try:
        decoder = decoder_of(checkpoint, mixed(checkpoint))
    except (ValueError, RuntimeError) as error:
        pytest.skip(f"this machine has no {isa}: {error}")
    want = reference_logits(checkpoint, mixed(checkpoint), tokens()[:1])[0]
    slot = torch.tensor([0])
    stepped = [decoder.step(tokens()[:1, t : t + 1], torch.tensor([[t]]), slot)[0] for t in range(TOKENS)]
    difference = (torch.stack(stepped) - want).norm(dim=1) / want.norm(dim=1)
    assert float(difference.median()) < 1e-3 or isa != "torch"
    assert float(difference.median()) < 0.03 and float(difference.max()) < 0.3


def test_a_low_threshold_is_exact(checkpoint: Checkpoint) -> None:
    """A copy that leaves out firings whose score is far above its threshold."""
    every = PredictorSet((RowsCopy(-1e30),) * 3, 0.0, None, None)
    for plan in (None, plan_for("50 %", checkpoint.shape.ffn_sizes)):
        got = greedy_tokens(step_of(decoder_of(checkpoint, every, plan=plan)), PROMPT, 16)
        assert got == greedy_tokens(step_of(decoder_of(checkpoint, None, mode="exact", plan=plan)), PROMPT, 16)


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "graph"])
def test_the_gpus_step(checkpoint: Checkpoint, captures: bool) -> None:
    """The step of a GPU, emulated: the copy on the hot tier, and cold neurons beside it."""
    plan = dataclasses.replace(
        plan_for("50 %", checkpoint.shape.ffn_sizes), attention_hot=(True,) * 3, predictor_hot=(True,) * 3
    )
    decoder = decoder_of(checkpoint, mixed(checkpoint), plan=plan)
    gpu = gpu_step_of(decoder, LateStream(captures))
    want = all_logits(decoder_of(checkpoint, mixed(checkpoint)), tokens())[0]
    for t in range(TOKENS):
        hidden = gpu.run(tokens()[0, t : t + 1], torch.tensor([t]), 0, "predicted")
        torch.testing.assert_close(decoder.logits(hidden)[0], want[t], atol=1e-4, rtol=0)


def ids_of(decoder: Decoder, mode: Mode) -> list[int]:
    decoder.mode = mode
    return generate(decoder, list(PROMPT), 12, Sampler(SamplingOptions())).token_ids


@pytest.mark.parametrize("placement", ["0 %", "50 %"])
def test_a_model_of_q4_0_shares_its_rows(checkpoint: Checkpoint, placement: str) -> None:
    """Memory for rows that are there already, or a copy whose rows are in another order than the tiers'."""
    shape, plan = checkpoint.shape, plan_for(placement, checkpoint.shape.ffn_sizes)
    copies = PredictorSet((RowsCopy(shape.activation_threshold),) * 3, 0.0, None, None)
    shared = decoder_of(checkpoint, copies, "q4_0", "exact", plan)
    alone = decoder_of(checkpoint, None, "q4_0", "exact", plan)
    biases = 4 * sum(shape.ffn_sizes)
    assert weight_bytes(shared.weights) == weight_bytes(alone.weights) + biases
    for mine, other in zip(shared.weights.layers, alone.weights.layers, strict=True):
        for tier, twin in zip(mine.ffn.tiers, other.ffn.tiers, strict=True):
            assert torch.equal(tier.first.data, twin.first.data)
            copy = mine.ffn.predictor
            assert isinstance(copy, CopyPredictor) and copy.is_part(tier.first) and not copy.is_part(tier.down)
    assert ids_of(shared, "dense") == ids_of(alone, "dense")
    assert ids_of(shared, "predicted") == ids_of(alone, "exact"), "scores are what decides on firing"
    read = touched(shared, list(PROMPT), ids_of(shared, "predicted"))
    row = shared.weights.layers[0].ffn.tiers[0].down.data.shape[1]
    assert read.predictor_bytes == sum(shape.ffn_sizes) * (row + 4)
    if shape.activation != "drelu":
        later = shape.neuron_matrices - 1
        assert read.neuron_bytes == pytest.approx(later * row * sum(shape.ffn_sizes) * read.firing_share)


def test_rows_are_shared_on_a_device_that_tensors_call_otherwise(llama: Checkpoint) -> None:
    """ "cuda" and "cuda:0", and twice the memory; here "meta:0" and "meta"."""
    plan, device = plan_for("50 %", llama.shape.ffn_sizes), torch.device("meta", 0)
    plan = dataclasses.replace(plan, hot=device, predictor_hot=(True,) * 3)
    weights = load_weights(llama, plan, PredictorSet((RowsCopy(0.0),) * 3, 0.0, None, None), "q4_0")
    for layer in weights.layers:
        copy, hot = layer.ffn.predictor, layer.ffn.tiers[0].first
        assert isinstance(copy, CopyPredictor) and copy.rows.device != device
        assert hot.data.untyped_storage()._cdata == copy.rows.data.untyped_storage()._cdata


def test_bytes_of_a_copy_of_its_own(llama: Checkpoint) -> None:
    """A copy that is read for nothing in what pi-bench counts."""
    decoder = decoder_of(llama, PredictorSet((RowsCopy(0.0),) * 3, 0.0, None, None), "float16")
    read, neurons = touched(decoder, list(PROMPT), ids_of(decoder, "predicted")), sum(llama.shape.ffn_sizes)
    copy = decoder.weights.layers[0].ffn.predictor
    assert isinstance(copy, CopyPredictor)
    assert read.predictor_bytes == neurons * (copy.rows.data.shape[1] + 4)
    assert read.candidate_share is not None and read.neuron_bytes >= 2 * 32 * neurons * read.candidate_share


@pytest.mark.parametrize("kind", ["float16", "q4_0"])
@pytest.mark.parametrize("family", ["llama", "opt", PROSPARSE])
def test_made_up_densities(tmp_path: Path, family: str, kind: Kind) -> None:
    """Copies that go on naming what their neurons no longer do."""
    checkpoint = Checkpoint(save_family(tmp_path, family))
    threshold = checkpoint.shape.activation_threshold - 0.05
    decoder = decoder_of(checkpoint, PredictorSet((RowsCopy(threshold),) * 3, 0.0, None, None), kind)
    densities, before = MadeUpDensity(decoder), ids_of(decoder, "predicted")
    for density in (0.05, 0.2):
        densities.choose(density, PROMPT)
        read = touched(decoder, list(PROMPT), ids_of(decoder, "predicted"))
        assert read.candidate_share is not None and read.candidate_share < 1.5 * density
    densities.choose(1.0, PROMPT)
    assert touched(decoder, list(PROMPT), ids_of(decoder, "predicted")).candidate_share == 1.0
    densities.choose(None, PROMPT)
    assert ids_of(decoder, "predicted") == before


def test_neurons_on_three_tiers(llama: Checkpoint) -> None:
    """A second GPU's neurons that get the first one's scores."""
    from pi_toolkit.solver.token_time import UnitDevices

    sizes, generator = llama.shape.ffn_sizes, np.random.default_rng(2)
    devices = UnitDevices(
        np.zeros(3, np.int64), np.zeros(3, np.int64), 0, tuple(generator.integers(-1, 2, n) for n in sizes)
    )
    plan = dataclasses.replace(plan_for("50 %", sizes), gpus=(CPU, CPU), devices=devices)
    got: Any = all_logits(decoder_of(llama, mixed(llama), plan=plan), tokens())
    torch.testing.assert_close(got, reference_logits(llama, mixed(llama), tokens()), atol=1e-4, rtol=0)
