"""Choosing tokens: greedy, and each option of sampling against its definition."""

import pytest
import torch

from pi_toolkit.runtime.sampling import Sampler, SamplingOptions

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.2, 0.05]))


def draws(options: SamplingOptions, logits: torch.Tensor = LOGITS, count: int = 4000) -> torch.Tensor:
    """Share of each token among *count* draws."""
    sampler = Sampler(options)
    return torch.bincount(torch.tensor([sampler(logits) for _ in range(count)]), minlength=len(logits)) / count


def test_temperature_zero_is_the_most_likely_token() -> None:
    """Greedy text that is drawn, or ties that go to the later token (transformers takes the first)."""
    assert Sampler(SamplingOptions())(LOGITS) == 1
    assert Sampler(SamplingOptions())(torch.tensor([0.0, 3.0, 3.0])) == 1


def test_temperature_one_draws_by_probability() -> None:
    """A distribution that is not the model's."""
    assert (draws(SamplingOptions(temperature=1.0)) - LOGITS.exp()).abs().max() < 0.03


def test_temperature_sharpens() -> None:
    """Temperature applied the wrong way round."""
    want = (LOGITS / 0.5).softmax(dim=0)
    assert (draws(SamplingOptions(temperature=0.5)) - want).abs().max() < 0.03


@pytest.mark.parametrize(("top_k", "allowed"), [(1, {1}), (2, {1, 2}), (99, {0, 1, 2, 3, 4})])
def test_top_k_keeps_the_k_most_likely(top_k: int, allowed: set[int]) -> None:
    """Tokens outside the k best, or a k beyond the vocabulary."""
    shares = draws(SamplingOptions(temperature=1.0, top_k=top_k))
    assert {token for token, share in enumerate(shares.tolist()) if share > 0} == allowed


@pytest.mark.parametrize(("top_p", "allowed"), [(0.01, {1}), (0.4, {1}), (0.41, {1, 2}), (0.71, {1, 2, 3})])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, allowed: set[int]) -> None:
    """A nucleus that is one token too small (none left) or too large."""
    shares = draws(SamplingOptions(temperature=1.0, top_p=top_p), count=1000)
    assert {token for token, share in enumerate(shares.tolist()) if share > 0} == allowed


@pytest.mark.parametrize(
    "options",
    [SamplingOptions(temperature=1e-40), SamplingOptions(temperature=1.0, top_p=1e-300)],
    ids=["cold", "narrow"],
)
def test_extreme_options_are_greedy(options: SamplingOptions) -> None:
    """An infinity, or a nucleus of no token, where only the most likely one is meant."""
    assert {Sampler(options)(LOGITS * 50) for _ in range(20)} == {1}


def test_the_seed_decides() -> None:
    """Text that cannot be reproduced."""
    options = [SamplingOptions(temperature=1.0, seed=seed) for seed in (7, 7, 8)]
    flat = torch.zeros(1000)
    first, again, other = ([sampler(flat) for _ in range(20)] for sampler in map(Sampler, options))
    assert first == again != other
