"""Which tokens a mask keeps, against loops written apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.objective import masks
from tests.objective import loops

RAGGED = st.lists(st.integers(1, 9), min_size=1, max_size=6)
SHARES = (0.1, 0.25, 0.5, 1.0)


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 1000))
def test_quantile_and_top_entropy_are_numpys(count: int, seed: int) -> None:
    entropy_N = loops.random(count, seed).abs()
    for share in SHARES:
        wanted = float(np.quantile(entropy_N.numpy(), 1 - share))
        loops.close(masks.quantile(entropy_N, 1 - share), torch.tensor(wanted, dtype=torch.float64))
        found = masks.top_entropy(entropy_N, share=share)
        assert found.tolist() == [h >= wanted for h in entropy_N.tolist()]


@settings(max_examples=20, deadline=None)
@given(lengths=RAGGED, seed=st.integers(0, 1000))
def test_off_policy_sequences_are_the_loops(lengths: list[int], seed: int) -> None:
    size = sum(lengths)
    engine_N, log_prob_N = loops.random(size, seed), loops.random(size, seed + 1)
    advantage_N = loops.random(len(lengths), seed + 2).repeat_interleave(loops.ints(lengths))
    found = masks.off_policy_sequences(
        log_prob_N, engine_N, advantage_N, loops.ints(lengths), bound=0.1
    ).tolist()
    gaps = loops.split(engine_N - log_prob_N, lengths)
    near = loops.join([[float(sum(p) / len(p) <= 0.1)] * len(p) for p in gaps])
    assert found == [bool(n) or a >= 0 for n, a in zip(near, advantage_N.tolist(), strict=True)]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 30), seed=st.integers(0, 1000), bound=st.floats(0.001, 2.0))
def test_second_moment_keeps_as_many_as_it_may(count: int, seed: int, bound: float) -> None:
    new_N, old_N = loops.random(count, seed), loops.random(count, seed + 1)
    found = masks.second_moment(new_N, old_N, bound=bound)
    squares = (new_N - old_N).square()
    if found.any():
        assert squares[found].mean() <= bound + 1e-12
    if not found.all():  # one more, the smallest of the rest, would be too many
        more = torch.cat([squares[found], squares[~found].min().view(1)])
        assert more.mean() > bound
        assert squares[~found].min() >= (squares[found].max() if found.any() else 0.0)


def test_second_moment_of_nothing_moved_keeps_all() -> None:
    same_N = loops.random(5, 1)
    assert masks.second_moment(same_N, same_N, bound=1e-9).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_bounds_on_probabilities_are_the_loops(seed: int) -> None:
    old_N, advantage_N = -loops.random(20, seed).abs() - 0.01, loops.random(20, seed + 2)
    new_N = -(old_N.abs() + loops.random(20, seed + 1, 0.5)).abs() - 0.01
    rows = list(zip(new_N.tolist(), old_N.tolist(), advantage_N.tolist(), strict=True))
    tv = masks.total_variation(new_N, old_N, advantage_N, low=0.05, high=0.1)
    assert tv.tolist() == [
        math.exp(n) - math.exp(o) <= 0.1 if a > 0 else math.exp(n) - math.exp(o) >= -0.05
        for n, o, a in rows
    ]

    def kl(n: float, o: float) -> float:
        p, q = math.exp(o), math.exp(n)
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    found = masks.binary_kl(new_N, old_N, advantage_N, low=0.02, high=0.03)
    assert found.tolist() == [
        kl(n, o) <= 0.03 or n <= o if a > 0 else kl(n, o) <= 0.02 or n >= o for n, o, a in rows
    ]


def test_binary_kl_of_a_sure_token_is_finite() -> None:
    """π = 1 leaves nothing for the others."""
    sure_N, likely_N = torch.zeros(2), torch.full((2,), -0.1)
    advantage_N = torch.tensor([1.0, -1.0])
    assert masks.binary_kl(sure_N, likely_N, advantage_N, low=0.05, high=0.05).tolist() == [
        False,
        True,
    ]


def test_covariance_and_what_is_chosen_by_it() -> None:
    log_prob_N, advantage_N = loops.random(50, 1), loops.random(50, 2)
    ell, a = log_prob_N.tolist(), advantage_N.tolist()
    cov = [(x - sum(a) / 50) * (y - sum(ell) / 50) for x, y in zip(a, ell, strict=True)]
    loops.close(masks.covariance(log_prob_N, advantage_N), cov)
    highest = masks.highest(loops.tensor(cov), share=0.1)
    assert highest.sum() == 5
    assert min(c for c, h in zip(cov, highest, strict=True) if h) >= sorted(cov)[-5]
    assert masks.highest(loops.tensor(cov), share=1e-6).sum() == 1


@pytest.mark.parametrize("seed", [0, 7])
def test_clip_covariance_draws_among_the_high_ones(seed: int) -> None:
    log_prob_N, advantage_N = loops.random(200, 1), loops.random(200, 2)
    cov_N = masks.covariance(log_prob_N, advantage_N)
    clipped_N = loops.random(200, 3) > 0.5
    bounds = {"share": 0.02, "floor": 0.5, "cap": 2.0}
    kept_N = masks.clip_cov(log_prob_N, advantage_N, clipped_N, **bounds, seed=seed)
    left_N = ~kept_N
    assert left_N.sum() == 4
    assert ((cov_N > 0.5) & (cov_N < 2.0) & ~clipped_N)[left_N].all()
    again = masks.clip_cov(log_prob_N, advantage_N, clipped_N, **bounds, seed=seed)
    other = masks.clip_cov(log_prob_N, advantage_N, clipped_N, **bounds, seed=seed + 1)
    assert torch.equal(kept_N, again)
    assert not torch.equal(kept_N, other)
    nothing = masks.clip_cov(
        log_prob_N, advantage_N, clipped_N, share=0.02, floor=50.0, cap=60.0, seed=seed
    )
    assert nothing.all()
