"""Perplexity, divergence and agreement of the modes against ``transformers`` and against sums made one by one."""

import math
from pathlib import Path

import pytest
import torch

from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import WorkspaceError
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.eval_reference import load_reference, open_other
from pi_toolkit.runtime.eval_text import with_mode
from pi_toolkit.runtime.eval_windows import ScoredWindow, WindowOptions, cut_windows
from pi_toolkit.runtime.perplexity import POSITIONS_AT_ONCE, Score, compare, of_decoder
from pi_toolkit.runtime.tier_plan import all_cold
from pi_toolkit.runtime.weights import load_weights
from tiny_models import CONFIGS, VOCABULARY, save_family

CPU = torch.device("cpu")
LENGTH = 24


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(save_family(tmp_path_factory.mktemp(request.param), request.param))


def decoder_of(checkpoint: Checkpoint, context: int = LENGTH) -> Decoder:
    """With predictors that name some of the neurons."""
    shape, generator = checkpoint.shape, torch.Generator().manual_seed(8)
    fc1 = tuple(torch.randn(32, shape.hidden_size, generator=generator) for _ in shape.ffn_sizes)
    fc2 = tuple(torch.randn(neurons, 32, generator=generator) for neurons in shape.ffn_sizes)
    weights = load_weights(
        checkpoint, all_cold(shape, CPU, CPU), PredictorSet.of_mlps(fc1, fc2, 0.5, None, None), "float32"
    )
    return Decoder(shape, weights, slots=3, context=context, mode="predicted")


def windows_of(tokens: int, length: int = LENGTH, stride: int = LENGTH, score_from: int = 0) -> list[ScoredWindow]:
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(5)).tolist()
    return cut_windows(ids, WindowOptions(length, stride, score_from), 0)


def test_every_mode_beside_transformers(checkpoint: Checkpoint) -> None:
    """A perplexity that is not the model's, or modes whose figures are mixed up."""
    decoder, windows = decoder_of(checkpoint), windows_of(7 * LENGTH)
    models = {mode: of_decoder(with_mode(decoder, mode)) for mode in ("dense", "exact", "predicted")}  # type: ignore[arg-type]
    models["transformers"] = load_reference(checkpoint, "cpu")
    scores = compare(models, windows, 3, VOCABULARY)
    dense = scores["dense"]
    assert {score.predictions for score in scores.values()} == {7 * (LENGTH - 1)}
    for name in ("exact", "transformers"):
        assert scores[name].perplexity == pytest.approx(dense.perplexity, rel=1e-4)
        assert abs(scores[name].change_from(dense)) < 1e-4
        assert abs(scores[name].kl) < 1e-6 and scores[name].top1_agreement == 1.0
    assert scores["predicted"].kl > 1e-3 and scores["predicted"].top1_agreement < 1.0
    assert scores["predicted"].perplexity != pytest.approx(dense.perplexity, rel=1e-3)
    assert decoder.mode == "predicted", "the caller's decoder is left as it was"


@pytest.mark.parametrize(("length", "stride", "score_from"), [(LENGTH, LENGTH, 12), (LENGTH, 5, 0), (LENGTH, 5, 9)])
def test_stride_and_score_from_equal_sums_made_one_by_one(
    checkpoint: Checkpoint, length: int, stride: int, score_from: int
) -> None:
    """Logits of one position scored against the token of another."""
    decoder, windows = decoder_of(checkpoint), windows_of(60, length, stride, score_from)
    models = {mode: of_decoder(with_mode(decoder, mode)) for mode in ("dense", "predicted")}  # type: ignore[arg-type]
    scores = compare(models, windows, 2, VOCABULARY)
    logits = {mode: [one_by_one(with_mode(decoder, mode), window) for window in windows] for mode in models}  # type: ignore[arg-type]
    losses, divergence, agreements = dict.fromkeys(models, 0.0), 0.0, 0
    for number, window in enumerate(windows):
        for position in range(window.first_scored, length - 1):
            shares = {mode: logits[mode][number][position].double().log_softmax(dim=0) for mode in models}
            for mode in models:
                losses[mode] -= float(shares[mode][window.token_ids[position + 1]])
            divergence += float((shares["dense"].exp() * (shares["dense"] - shares["predicted"])).sum())
            agreements += int(shares["dense"].argmax() == shares["predicted"].argmax())
    count = sum(window.scored for window in windows)
    for mode in models:
        assert scores[mode].perplexity == pytest.approx(math.exp(losses[mode] / count), rel=1e-4)
    assert scores["predicted"].kl == pytest.approx(divergence / count, rel=1e-3)
    assert scores["predicted"].top1_agreement == agreements / count


def one_by_one(decoder: Decoder, window: ScoredWindow) -> list[torch.Tensor]:
    """Logits [vocabulary] after each token, from steps of a single token."""
    return [
        decoder.step(torch.tensor([[token]]), torch.tensor([[position]]), torch.tensor([0]))[0]
        for position, token in enumerate(window.token_ids)
    ]


def test_windows_longer_than_a_piece(tmp_path: Path) -> None:
    """Predictions at the seams of the pieces that bound the memory, lost or counted twice."""
    length = POSITIONS_AT_ONCE + 30
    checkpoint = Checkpoint(save_family(tmp_path, "llama", max_position_embeddings=length))
    decoder, (window,) = decoder_of(checkpoint, length), windows_of(length, length, length)
    score = compare({"predicted": of_decoder(decoder)}, [window], 1, VOCABULARY)["predicted"]
    ids = torch.tensor([window.token_ids])
    logits = of_decoder(decoder).logits(of_decoder(decoder).read(ids))[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
    assert score.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    assert score.predictions == length - 1


def test_the_change_has_an_error() -> None:
    """A difference below the noise that is taken for one of the modes."""
    generator = torch.Generator().manual_seed(0)
    counts = [100] * 400
    first = Score([300.0] * 400, counts)
    differences = (0.5 + torch.randn(400, generator=generator)).tolist()
    other = Score([300.0 + difference for difference in differences], counts)
    assert other.change_from(first) == pytest.approx(math.expm1(sum(differences) / 40_000))
    assert other.change_error(first) == pytest.approx(0.01 / math.sqrt(400), rel=0.1)
    assert Score([1.0], [2]).change_error(Score([1.0], [2])) is None
    absurd = Score([1e9, 2e9], [2, 2])
    assert absurd.perplexity == absurd.change_from(Score([1.0, 1.0], [2, 2])) == math.inf
    assert absurd.change_error(Score([1.0, 1.0], [2, 2])) == math.inf


def test_a_reference_of_another_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A difference between two models taken for one between two programs."""
    other = save_family(tmp_path, "llama", num_hidden_layers=2)
    with pytest.raises(WorkspaceError, match="a model of other sizes"):
        open_other(str(other), checkpoint.shape)
