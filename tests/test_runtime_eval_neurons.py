"""Recall, precision and density against counts made with hooks on ``transformers``, candidates applied there too."""

from pathlib import Path

import pytest
import torch

from pi_toolkit.predictor_training.predictor import Quality
from pi_toolkit.predictor_training.predictor_file import MlpWeights, PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.hf_model import load_hf_model, observe_ffn
from pi_toolkit.runtime.bench_replay import watched
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.eval_neurons import GenerationOptions, NeuronCounts, count_while_generating, spread
from pi_toolkit.runtime.eval_windows import ScoredWindow
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.perplexity import of_decoder
from pi_toolkit.runtime.tier_plan import all_cold
from pi_toolkit.runtime.weights import load_weights
from tiny_models import BAMBOO, CONFIGS, PROSPARSE, VOCABULARY, save_family

CPU = torch.device("cpu")
THRESHOLD = 0.5


@pytest.fixture(scope="module", params=[*CONFIGS, BAMBOO, PROSPARSE])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(save_family(tmp_path_factory.mktemp(request.param), request.param))


def predictors_of(checkpoint: Checkpoint) -> PredictorSet:
    shape, generator = checkpoint.shape, torch.Generator().manual_seed(8)
    fc1 = tuple(torch.randn(32, shape.hidden_size, generator=generator) for _ in shape.ffn_sizes)
    fc2 = tuple(torch.randn(neurons, 32, generator=generator) for neurons in shape.ffn_sizes)
    return PredictorSet.of_mlps(fc1, fc2, THRESHOLD, None, None)


def decoder_of(checkpoint: Checkpoint, mode: Mode = "predicted") -> Decoder:
    weights = load_weights(checkpoint, all_cold(checkpoint.shape, CPU, CPU), predictors_of(checkpoint), "float32")
    return Decoder(checkpoint.shape, weights, slots=3, context=64, mode=mode)


def counted_by_hooks(checkpoint: Checkpoint, tokens: torch.Tensor, first: int = 0) -> list[Quality]:
    """Of the tokens from position *first* on, in a ``transformers`` model that computes candidates only."""
    shape, predictors = checkpoint.shape, predictors_of(checkpoint)
    model = load_hf_model(checkpoint, CPU, torch.float32)
    named: dict[int, torch.Tensor] = {}
    fires: dict[int, torch.Tensor] = {}

    def name(layer: int, residual: torch.Tensor) -> None:
        mlp = predictors.layers[layer]
        assert isinstance(mlp, MlpWeights)
        named[layer] = (residual @ mlp.fc1.T).relu() @ mlp.fc2.T >= THRESHOLD

    def fire(layer: int, z: torch.Tensor) -> None:
        fires[layer] = z > shape.activation_threshold

    def silence(layer: int, activation: torch.Tensor) -> None:
        activation[~named[layer]] = 0

    with (
        torch.inference_mode(),
        observe_ffn(model, shape, pre_activation=fire, activation=silence, predictor_input=name),
    ):
        model(tokens)
    qualities = []
    for layer in range(shape.num_layers):
        size = (*tokens.shape, -1)
        f, n = (mask[layer].reshape(size)[:, first:] for mask in (fires, named))
        qualities.append(Quality(f.numel(), int(f.sum()), int(n.sum()), int((f & n).sum())))
    return qualities


def assert_close(found: list[Quality], wanted: list[Quality]) -> None:
    """Equal but for neurons whose sums are within rounding of where they fire."""
    assert len(found) == len(wanted) > 0
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.decisions == theirs.decisions
        for name in ("firings", "candidates", "hits"):
            assert abs(getattr(mine, name) - getattr(theirs, name)) <= 2, name
        assert 0 < mine.recall < 1 and 0 < mine.precision < 1 and mine.density == mine.candidates / mine.decisions


def test_on_windows(checkpoint: Checkpoint) -> None:
    """Candidates compared with what another run fires, or layers and tiers mixed up."""
    tokens = torch.randint(0, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(2))
    decoder, counts = decoder_of(checkpoint), NeuronCounts(checkpoint.shape.num_layers)
    before = of_decoder(decoder).read(tokens)
    seen = of_decoder(watched(decoder, counts.observe)).read(tokens)
    torch.testing.assert_close(seen, before, rtol=0, atol=0)
    assert_close(counts.qualities(), counted_by_hooks(checkpoint, tokens))


def test_while_generating(checkpoint: Checkpoint) -> None:
    """The prompt's tokens, or a token that was never read, among the decoding steps."""
    decoder, prompt = decoder_of(checkpoint), (5, 6, 7, 8, 9)
    window = ScoredWindow((*prompt, 1, 2, 3), 0)
    options = GenerationOptions(prompts=1, prompt_tokens=len(prompt), new_tokens=12, bos_id=3)
    done: list[int] = []
    counts, steps = count_while_generating(decoder, [window], options, frozenset(), done.append)
    assert steps == 12 and done == [1]
    text = [3, *prompt[1:]]
    for _ in range(12):  # the greedy text once more, one whole prompt per token
        states = of_decoder(decoder).read(torch.tensor([text]))
        text.append(int(decoder.logits(states[0, -1]).argmax()))
    assert_close(counts.qualities(), counted_by_hooks(checkpoint, torch.tensor([text]), first=len(prompt)))


def test_without_predictors_candidates_are_what_fires(tmp_path: Path) -> None:
    """A model without predictors that seems to have bad ones."""
    checkpoint = Checkpoint(save_family(tmp_path, "llama"))
    counts = NeuronCounts(checkpoint.shape.num_layers)
    of_decoder(watched(decoder_of(checkpoint, "exact"), counts.observe)).read(torch.arange(9)[None])
    for quality in counts.qualities():
        assert quality.recall == quality.precision == 1.0
        assert 0.2 < quality.density == quality.firing_share < 0.8


def test_a_text_that_ends_at_once() -> None:
    """Shares of no decision at all."""
    assert NeuronCounts(2).qualities() == []


def test_prompts_are_spread_over_the_text() -> None:
    """Prompts of one document alone."""
    windows = [ScoredWindow((number,), 0) for number in range(10)]
    assert [window.token_ids[0] for window in spread(windows, 4)] == [0, 2, 5, 7]
    assert len(spread(windows, 99)) == 10 and spread(windows, 0) == []
