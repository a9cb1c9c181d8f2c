"""The decoder against ``transformers`` for every family, under placements, batches and cut prompts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.hf_model import observe_ffn
from pi_toolkit.runtime import decoder as decoder_module
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.kernels.packed_matrix import Kind
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.tier_plan import TierPlan, all_cold
from pi_toolkit.runtime.weights import load_weights
from tiny_models import BAMBOO, CONFIGS, PROSPARSE, PROSPARSE_THRESHOLD, VOCABULARY, save_family

CPU = torch.device("cpu")
TOKENS = 24
PLACEMENTS = {"0 %": 0.0, "one": -1, "50 %": 0.5, "all but one": -2, "100 %": 1.0}


@pytest.fixture(scope="module", params=[*CONFIGS, BAMBOO, PROSPARSE])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(save_family(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(autouse=True, params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything twice: with the native kernels and without."""
    if request.param == "torch":
        monkeypatch.setenv("PI_CPU_ISA", "torch")


def thresholded_llama(directory: Path) -> Any:
    """A LLaMA whose gates at or below the threshold are set to zero before its ReLU."""
    config = transformers.LlamaConfig.from_pretrained(directory, hidden_act="relu")
    model = transformers.LlamaForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _module, _inputs, z: z * (z > PROSPARSE_THRESHOLD))
    return model.eval()


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Any:
    if checkpoint.shape.activation == "fatrelu":
        return thresholded_llama(checkpoint.directory)
    if checkpoint.shape.family != BAMBOO:
        return transformers.AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=torch.float32).eval()
    config = transformers.MistralConfig.from_pretrained(checkpoint.directory)
    model = transformers.MistralForCausalLM.from_pretrained(checkpoint.directory, config=config, dtype=torch.float32)
    for layer in model.model.layers:  # for good: the other factor's ReLU, which Mistral does not have
        layer.mlp.up_proj.register_forward_hook(lambda _module, _inputs, output: output.relu())
    return model.eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (3, TOKENS), generator=torch.Generator().manual_seed(0))


def hot_neurons(placement: str, sizes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Ids per layer; "one" and "all but one" count over the whole model."""
    generator = np.random.default_rng(1)
    share = PLACEMENTS[placement]
    if share >= 0:
        return tuple(np.sort(generator.permutation(n)[: round(share * n)]) for n in sizes)
    chosen = [np.arange(n) if share == -2 else np.arange(0) for n in sizes]
    chosen[1] = np.delete(np.arange(sizes[1]), 7) if share == -2 else np.array([7])
    return tuple(chosen)


def plan_for(placement: str, sizes: tuple[int, ...]) -> TierPlan:
    half = tuple(layer % 2 == 0 for layer in range(len(sizes)))
    return TierPlan(CPU, CPU, hot_neurons(placement, sizes), half, half, True)


def decoder_for(
    checkpoint: Checkpoint,
    mode: Mode,
    plan: TierPlan | None = None,
    predictors: PredictorSet | None = None,
    kind: Kind = "float32",
) -> Decoder:
    shape = checkpoint.shape
    weights = load_weights(checkpoint, plan or all_cold(shape, CPU, CPU), predictors, kind)
    return Decoder(shape, weights, slots=4, context=TOKENS + 8, mode=mode)


def all_logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    rows, length = tokens.shape
    positions = torch.arange(length).expand(rows, length)
    return decoder.logits(decoder.hidden_states(tokens, positions, torch.arange(rows)))


@pytest.mark.parametrize("placement", list(PLACEMENTS))
@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_logits_equal_transformers(
    checkpoint: Checkpoint, reference: Any, tokens: torch.Tensor, mode: Mode, placement: str
) -> None:
    """Wrong maths in a family, or a neuron lost or counted twice by a split."""
    decoder = decoder_for(checkpoint, mode, plan_for(placement, checkpoint.shape.ffn_sizes))
    with torch.inference_mode():
        want = reference(tokens).logits
    torch.testing.assert_close(all_logits(decoder, tokens), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "silu"}),
        ("mistral", {"hidden_act": "gelu"}),
        ("opt", {"activation_function": "gelu"}),
        ("falcon-7b", {"activation": "gelu"}),
        ("falcon-40b", {"activation": "silu"}),
    ],
)
def test_dense_logits_of_smooth_activations(
    tmp_path: Path, tokens: torch.Tensor, family: str, changes: dict[str, Any]
) -> None:
    """A model that is run with another activation than it was trained with, in a prompt or in a single step."""
    smooth = Checkpoint(save_family(tmp_path, family, **changes))
    with torch.inference_mode():
        want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(tokens).logits
    decoder = decoder_for(smooth, "dense", plan_for("50 %", smooth.shape.ffn_sizes))
    torch.testing.assert_close(all_logits(decoder, tokens), want, atol=1e-4, rtol=0)
    for t in range(TOKENS):
        got = decoder.step(tokens[:, t : t + 1], torch.full((3, 1), t), torch.arange(3))
        torch.testing.assert_close(got, want[:, t], atol=1e-4, rtol=0)


def test_token_by_token_equals_the_whole_prompt(checkpoint: Checkpoint, tokens: torch.Tensor) -> None:
    """A cache, a rotation or a sliding window that is off by one."""
    want = all_logits(decoder_for(checkpoint, "exact"), tokens)
    decoder = decoder_for(checkpoint, "exact")
    slots = torch.tensor([2, 0, 3])
    for t in range(TOKENS):
        got = decoder.step(tokens[:, t : t + 1], torch.full((3, 1), t), slots)
        torch.testing.assert_close(got, want[:, t], atol=1e-4, rtol=0)


@pytest.mark.parametrize("cut", [1, 5, 9, 23])
def test_a_prompt_may_be_cut_anywhere(checkpoint: Checkpoint, tokens: torch.Tensor, cut: int) -> None:
    """Text that depends on how a prompt is cut into pieces."""
    want = all_logits(decoder_for(checkpoint, "dense"), tokens[:1])[0, -1]
    decoder, slot = decoder_for(checkpoint, "dense"), torch.tensor([1])
    positions = torch.arange(TOKENS)[None]
    decoder.step(tokens[:1, :cut], positions[:, :cut], slot)
    got = decoder.step(tokens[:1, cut:], positions[:, cut:], slot)[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_both_ways_through_a_prompt_agree(
    checkpoint: Checkpoint, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt whose continuation depends on whether it was short enough to go token by token."""
    positions, slots = torch.arange(TOKENS).expand(3, TOKENS), torch.tensor([2, 0, 3])
    logits = []
    for limit in (0.0, math.inf):
        monkeypatch.setitem(decoder_module.ONE_BY_ONE_BYTES, "exact", limit)
        decoder = decoder_for(checkpoint, "exact")
        logits += [decoder.step(tokens, positions, slots), decoder.step(tokens[:, :1], positions[:, :1], slots)]
    for at_once, one_by_one in zip(logits[:2], logits[2:], strict=True):
        torch.testing.assert_close(one_by_one, at_once, atol=1e-4, rtol=0)


def test_sequences_of_different_length_share_a_step(checkpoint: Checkpoint, tokens: torch.Tensor) -> None:
    """A sequence seeing another slot's keys, or keys beyond its own length."""
    decoder, alone = decoder_for(checkpoint, "exact"), decoder_for(checkpoint, "exact")
    lengths = [20, 3, 11]
    for row, length in enumerate(lengths):
        positions = torch.arange(length)[None]
        decoder.step(tokens[row : row + 1, :length], positions, torch.tensor([row]))
        alone.step(tokens[row : row + 1, :length], positions, torch.tensor([row]))
    following = torch.stack([tokens[row, length] for row, length in enumerate(lengths)])[:, None]
    together = decoder.step(following, torch.tensor(lengths)[:, None], torch.arange(3))
    for row, length in enumerate(lengths):
        got = alone.step(following[row : row + 1], torch.tensor([[length]]), torch.tensor([row]))[0]
        torch.testing.assert_close(together[row], got, atol=1e-4, rtol=0)


def all_candidates(checkpoint: Checkpoint, threshold: float) -> PredictorSet:
    """Predictors whose every score is 0."""
    shape = checkpoint.shape
    fc1 = tuple(torch.zeros(32, shape.hidden_size) for _ in shape.ffn_sizes)
    fc2 = tuple(torch.zeros(neurons, 32) for neurons in shape.ffn_sizes)
    return PredictorSet.of_mlps(fc1, fc2, threshold, None, None)


def test_predicted_with_every_candidate_equals_dense(checkpoint: Checkpoint, tokens: torch.Tensor) -> None:
    """The sparse path computing something else than the dense one."""
    plan = plan_for("50 %", checkpoint.shape.ffn_sizes)
    decoder = decoder_for(checkpoint, "predicted", plan, all_candidates(checkpoint, threshold=0.0))
    want = all_logits(decoder_for(checkpoint, "dense"), tokens)
    torch.testing.assert_close(all_logits(decoder, tokens), want, atol=1e-4, rtol=0)


def test_predicted_without_candidates_is_the_model_without_ffn(
    checkpoint: Checkpoint, reference: Any, tokens: torch.Tensor
) -> None:
    """Silent neurons that still contribute; a down bias that is lost with them."""
    decoder = decoder_for(checkpoint, "predicted", None, all_candidates(checkpoint, threshold=1.0))
    got = all_logits(decoder, tokens)

    def silence(_layer: int, activation: torch.Tensor) -> None:
        activation.zero_()

    with torch.inference_mode(), observe_ffn(reference, checkpoint.shape, activation=silence):
        want = reference(tokens).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_predicted_does_not_depend_on_the_placement(
    checkpoint: Checkpoint, tokens: torch.Tensor, placement: str
) -> None:
    """Scores that reach the wrong neuron once neurons are reordered by tier."""
    shape, generator = checkpoint.shape, torch.Generator().manual_seed(8)
    fc1 = tuple(torch.randn(32, shape.hidden_size, generator=generator) for _ in shape.ffn_sizes)
    fc2 = tuple(torch.randn(neurons, 32, generator=generator) for neurons in shape.ffn_sizes)
    predictors = PredictorSet.of_mlps(fc1, fc2, 0.5, None, None)
    want = all_logits(decoder_for(checkpoint, "predicted", None, predictors), tokens)
    plan = plan_for(placement, shape.ffn_sizes)
    got = all_logits(decoder_for(checkpoint, "predicted", plan, predictors), tokens)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


TOLERANCE: dict[Kind, float] = {"bfloat16": 0.03, "float16": 0.005, "q8_0": 0.08, "q4_0": 0.8}


@pytest.mark.parametrize("kind", list(TOLERANCE))
def test_every_weight_type_stays_close(checkpoint: Checkpoint, tokens: torch.Tensor, kind: Kind) -> None:
    """A type in which some part of the decoder computes nonsense (the logits of random models differ by their own size)."""
    want = all_logits(decoder_for(checkpoint, "dense"), tokens)
    decoder = decoder_for(checkpoint, "exact", kind=kind)
    got = all_logits(decoder, tokens)
    # With FATReLU a gate near the threshold makes its neuron jump.
    tolerance = TOLERANCE[kind] + (0.1 if checkpoint.shape.activation == "fatrelu" else 0.0)
    assert float((got - want).norm() / want.norm()) < tolerance
    slots = torch.tensor([0])
    stepped = [decoder.step(tokens[:1, t : t + 1], torch.tensor([[t]]), slots)[0] for t in range(TOKENS)]
    assert float((torch.stack(stepped) - want[0]).norm() / want[0].norm()) < tolerance


def test_weights_need_no_second_copy_of_the_embedding(tmp_path: Path) -> None:
    """A tied head stored twice."""
    tied = Checkpoint(save_family(tmp_path / "tied", "opt"))
    weights = load_weights(tied, all_cold(tied.shape, CPU, CPU), None, "float32")
    assert weights.head is weights.embedding
