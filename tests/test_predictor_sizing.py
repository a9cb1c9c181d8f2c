"""Widths: sparse layers need less, a share of the model is never exceeded, measured needs replace expected ones."""

from dataclasses import replace

import pytest

from pi_toolkit.predictor_training.adaptive_training import Target, train_adaptively
from pi_toolkit.predictor_training.predictor import Quality
from pi_toolkit.predictor_training.sizing import (
    LayerNeed,
    scale_from_sparsity,
    width_within_share,
    widths_for_accuracy,
    widths_for_candidates,
)
from test_predictor_training import opt_shape

SHAPE = opt_shape(256, (1024,) * 4, 4096)
FALLING = tuple(0.8 * 0.7**block for block in range(9))
TARGET = Target("perplexity", 0.001, 1.8, 0.5, 3)


def need(firing_share: float, unexplained: tuple[float, ...] = FALLING) -> LayerNeed:
    return LayerNeed(1024, firing_share, unexplained, scale_from_sparsity(firing_share))


def parameters(widths: list[int]) -> int:
    return sum(width * (256 + 1024) for width in widths)


def test_sparse_layers_get_narrower_predictors() -> None:
    """Widths that ignore sparsity, from which the paper begins."""
    widths = widths_for_candidates(SHAPE, [need(share) for share in (0.4, 0.2, 0.05, 0.01)], 0.98, 1.01)
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1]


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize(
    "choose", [widths_for_accuracy, lambda *args: widths_for_candidates(*args[:3], 1.0, *args[3:])]
)
def test_share_of_the_model_is_never_exceeded(share: float, choose) -> None:  # type: ignore[no-untyped-def]
    """Predictors that eat the memory they are meant to save."""
    widths = choose(SHAPE, [need(0.4)] * 4, 0.98, share)
    assert all(width % 32 == 0 and width >= 32 for width in widths)
    assert parameters(widths) <= max(share * SHAPE.num_parameters(), parameters([32] * 4))
    if share == 0.02:
        assert widths == [32] * 4


def test_no_width_beyond_what_is_asked_for() -> None:
    """A tenth of the model spent where a twentieth reaches the wanted candidates."""
    needs = [need(0.1)] * 4
    widths = [parameters(widths_for_candidates(SHAPE, needs, 0.98, candidates, 0.5)) for candidates in (1.2, 1.6, 9.0)]
    assert widths[0] > widths[1] > widths[2] == parameters([32] * 4)


def test_block_that_pays_for_itself_is_added() -> None:
    """Large models that stop at the wanted candidates although a wider predictor reads less in all."""
    large = opt_shape(4096, (16384,) * 4, 50272)
    needs = [replace(need(0.1), neurons=16384)] * 4
    widths = widths_for_candidates(large, needs, 0.98, 10.0)
    assert min(widths) > 32


def test_measured_need_replaces_the_expected_one() -> None:
    """A layer that turned out harder than its sparsity says and stays as narrow."""
    expected = need(0.1)
    harder = expected.measured(2, 2 * expected.excess(2))
    assert harder.excess(3) == pytest.approx(2 * expected.excess(3))
    first = widths_for_candidates(SHAPE, [expected, expected], 0.98, 1.5)
    then = widths_for_candidates(SHAPE, [harder, expected], 0.98, 1.5)
    assert then[0] > first[0]


def test_accuracy_rule_widens_until_it_is_expected() -> None:
    """Layers left below 95 % although the share allows more, or wider than that asks for."""
    needs = [need(share) for share in (0.4, 0.01)]
    widths = widths_for_accuracy(SHAPE, needs, 0.98)

    def wrong(layer: int, blocks: int) -> float:
        return needs[layer].firing_share * (needs[layer].excess(blocks) + 0.02)

    assert widths[1] == 32
    assert wrong(0, widths[0] // 32) <= 0.05 < wrong(0, widths[0] // 32 - 1)


def test_uniform_width_is_the_limit_of_the_share() -> None:
    """Two rules about the same tenth that disagree."""
    assert parameters([width_within_share(SHAPE)] * 4) <= 0.1 * SHAPE.num_parameters()


class FakeTrainer:
    """Layers whose candidates and perplexity follow a formula, so that rounds can be watched."""

    def __init__(self, excess: float) -> None:
        from types import SimpleNamespace

        self.store = SimpleNamespace(shape=SHAPE)
        self.options = SimpleNamespace(recall=0.98)
        self.excess, self.asked = excess, []  # type: ignore[var-annotated]

    def needs(self) -> list[LayerNeed]:
        return [need(0.2)] * 4

    def train(self, paths, recall):  # type: ignore[no-untyped-def]
        from types import SimpleNamespace

        self.asked.append((list(paths), recall))
        false = [int(20_000 * self.excess * need(0.2).excess(path[-1] // 32)) for path in paths]
        hits = int(20_000 * recall)
        return [SimpleNamespace(calibration=Quality(100_000, 20_000, hits + f, hits)) for f in false]


def test_rounds_end_when_the_target_is_reached() -> None:
    """Training that goes on although nothing is wanting."""
    trainer = FakeTrainer(excess=0.5)
    outcome = train_adaptively(trainer, TARGET, lambda _: 0.0005)  # type: ignore[arg-type]
    assert (outcome.rounds, outcome.reached) == (1, True)


def test_widths_grow_from_round_to_round_and_keep_their_past() -> None:
    """Rounds that repeat the same widths, or begin every layer anew."""
    trainer = FakeTrainer(excess=1.4)
    outcome = train_adaptively(trainer, TARGET, lambda _: 0.0005)  # type: ignore[arg-type]
    first, second = trainer.asked[0][0], trainer.asked[1][0]
    assert all(later[: len(earlier)] == earlier for earlier, later in zip(first, second, strict=True))
    assert sum(path[-1] for path in second) > sum(path[-1] for path in first)
    assert outcome.rounds <= 3


def test_higher_recall_is_what_remains() -> None:
    """A target that is missed without a try, or rounds without end."""
    trainer = FakeTrainer(excess=0.5)
    outcome = train_adaptively(trainer, replace(TARGET, share=0.05), lambda _: 0.01)  # type: ignore[arg-type]
    assert (outcome.rounds, outcome.reached) == (3, False)
    recalls = [recall for _, recall in trainer.asked]
    assert recalls[0] == 0.98 and recalls[-1] > 0.98
