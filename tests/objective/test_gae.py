"""Temporal advantages: MATH's fifth law, and each function against its loop; the value loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.objective import gae, segments
from tests.objective import loops

RAGGED = st.lists(st.integers(1, 12), min_size=1, max_size=6)
UNIT = st.floats(0.0, 1.0)


def deltas(lengths: list[int], gamma: float, seed: int) -> tuple[torch.Tensor, ...]:
    reward_N, value_N = loops.random(sum(lengths), seed), loops.random(sum(lengths), seed + 1)
    lengths_S = loops.ints(lengths)
    next_N = segments.shift(value_N, lengths_S)
    delta_N = gae.td_error(reward_N, value_N, next_N, gamma=gamma)
    return reward_N, value_N, delta_N, segments.continues(lengths_S)


@settings(max_examples=25, deadline=None)
@given(lengths=RAGGED, gamma=UNIT, lam=UNIT, steps=st.integers(1, 15))
def test_against_the_loops(lengths: list[int], gamma: float, lam: float, steps: int) -> None:
    reward_N, value_N, delta_N, go_N = deltas(lengths, gamma, 5)
    per_token = loops.random(sum(lengths), 9).sigmoid()
    carries = [float(c) for c in go_N]
    values = loops.split(value_N, lengths)
    expected = [
        r + gamma * v_next - v
        for part, rewards in zip(values, loops.split(reward_N, lengths), strict=True)
        for r, v, v_next in zip(rewards, part, [*part[1:], 0.0], strict=True)
    ]
    loops.close(delta_N, expected)
    fixed = loops.gae(delta_N.tolist(), carries, gamma, [lam] * sum(lengths))
    varied = loops.gae(delta_N.tolist(), carries, gamma, per_token.tolist())
    loops.close(gae.gae(delta_N, go_N, gamma=gamma, lam=lam), fixed)
    loops.close(gae.gae(delta_N, go_N.double(), gamma=gamma, lam=per_token), varied)
    loops.close(
        gae.n_step(delta_N, go_N, gamma=gamma, steps=steps),
        loops.join([loops.n_step(d, gamma, steps) for d in loops.split(delta_N, lengths)]),
    )
    to_go = loops.join([loops.to_go(r, gamma) for r in loops.split(reward_N, lengths)])
    loops.close(gae.returns_to_go(reward_N, loops.ints(lengths), gamma=gamma), to_go)


def test_adaptive_lambda() -> None:
    lam_S = gae.adaptive_lambda(loops.ints([1, 19, 20, 40, 1000]), alpha=0.05)
    loops.close(lam_S, [0.0, 0.0, 0.0, 0.5, 1 - 1 / 50])
    assert gae.adaptive_lambda(loops.ints([0, 40]), alpha=0.05).tolist() == [0.0, 0.5]


def test_a_value_baseline_is_the_reward_less_the_first_value() -> None:
    lengths = [2, 3, 0, 1]
    reward, value_N = [0.5, -1.0, 2.0, float("nan")], loops.random(6, 4)
    found = gae.value_baseline(loops.tensor(reward), value_N, loops.ints(lengths))
    values, expected, at = value_N.tolist(), [], 0
    for one, length in zip(reward, lengths, strict=True):
        start = values[at] if length else 0.0
        expected.append(0.0 if one != one else one - start)
        at += length
    loops.close(found, expected)


def test_monte_carlo_baselines_and_absent_rewards() -> None:
    lengths_S = loops.ints([2, 3, 0, 1])
    reward_N = loops.tensor([0.5, 1.0, 0.0, 0.0, 3.0, float("nan")])
    plain_N = gae.monte_carlo(reward_N, lengths_S, gamma=0.5, baseline="none")
    loops.close(plain_N, [1.0, 1.0, 0.75, 1.5, 3.0, 0.0])
    mean = (1.0 + 0.75) / 2
    less_N = gae.monte_carlo(reward_N, lengths_S, gamma=0.5, baseline="batch_mean")
    loops.close(less_N, [*(plain_N[:5] - mean).tolist(), 0.0])
    value_N = loops.random(6, 4)
    with_value_N = gae.monte_carlo(reward_N, lengths_S, value_N, gamma=0.5)
    loops.close(with_value_N, [*(plain_N - value_N)[:5].tolist(), 0.0])
    with pytest.raises(ValueError, match="value_N"):
        gae.monte_carlo(reward_N, lengths_S, gamma=0.5)
    # Values behind other actions than the last are not read, whatever they are.
    next_N = loops.random(6, 5).masked_fill(segments.continues(lengths_S), float("nan"))
    found_N = gae.monte_carlo(reward_N, lengths_S, value_N, next_N, gamma=0.5)
    last = [0.5 * float(next_N[1]), 0.5 * float(next_N[4])]
    after = [0.5 * last[0], last[0], 0.25 * last[1], 0.5 * last[1], last[1], 0.0]
    loops.close(found_N, with_value_N + loops.tensor(after))


@settings(max_examples=25, deadline=None)
@given(lengths=RAGGED, gamma=UNIT, seed=st.integers(0, 10_000))
def test_lambda_1_is_monte_carlo_where_episodes_are_truncated_too(
    lengths: list[int], gamma: float, seed: int
) -> None:
    lengths_S = loops.ints(lengths)
    reward_N, value_N = loops.random(sum(lengths), seed), loops.random(sum(lengths), seed + 1)
    # Every other episode is cut off, and V of where it was cut is not 0.
    following = [0.0 if i % 2 else 5.0 + i for i in range(len(lengths))]
    next_N = segments.shift(value_N, lengths_S) + segments.on_last(
        loops.tensor(following), lengths_S
    )
    delta_N = gae.td_error(reward_N, value_N, next_N, gamma=gamma)
    full_N = gae.monte_carlo(reward_N, lengths_S, value_N, next_N, gamma=gamma)
    loops.close(gae.gae(delta_N, segments.continues(lengths_S), gamma=gamma, lam=1.0), full_N)
    parts = zip(
        loops.split(reward_N, lengths), loops.split(value_N, lengths), following, strict=True
    )
    # One more reward in the loop: the value after the last action.
    expected = [
        [u - v for u, v in zip(loops.to_go([*rewards, after], gamma), values, strict=False)]
        for rewards, values, after in parts
    ]
    loops.close(full_N, loops.join(expected))


# ---------------- the value model


@pytest.mark.parametrize(
    ("v", "old", "target", "loss", "slope", "clipped"),
    [
        # within the band: plain
        (1.1, 1.0, 2.0, 0.5 * 0.9**2, -0.9, False),
        # past the band towards the target: the clipped error is the larger one, no gradient
        (1.5, 1.0, 2.0, 0.5 * 0.8**2, 0.0, True),
        (0.5, 1.0, 0.0, 0.5 * 0.8**2, 0.0, True),
        # past the band away from the target: the plain error is the larger one
        (0.5, 1.0, 2.0, 0.5 * 1.5**2, -1.5, False),
        (1.5, 1.0, 0.0, 0.5 * 1.5**2, 1.5, False),
        # past the target by far: plain again
        (3.0, 1.0, 1.5, 0.5 * 1.5**2, 1.5, False),
    ],
)
def test_value_loss_table(
    v: float, old: float, target: float, loss: float, slope: float, clipped: bool
) -> None:
    value_N = loops.tensor([v]).requires_grad_()
    loss_N, clipped_N = gae.value_loss(
        value_N, loops.tensor([old]), loops.tensor([target]), clip=0.2
    )
    (slope_N,) = torch.autograd.grad(loss_N.sum(), value_N)
    loops.close(loss_N, [loss])
    loops.close(slope_N, [slope])
    assert clipped_N.tolist() == [clipped]


def test_a_wide_clip_is_half_the_squared_error() -> None:
    value_N, old_N, return_N = loops.random(20, 1), loops.random(20, 2), loops.random(20, 3)
    plain = 0.5 * (value_N - return_N) ** 2
    for clip in (1e6, None):
        loss_N, clipped_N = gae.value_loss(value_N, old_N, return_N, clip=clip)
        loops.close(loss_N, plain)
        assert not clipped_N.any()


@pytest.mark.parametrize(
    ("values", "wanted"), [([1.0, 2.0, 4.0], 1.0), ([3.0, 3.0, 3.0], 0.0), ([2.0, 1.0, -1.0], -3.0)]
)
def test_explained_variance_is_the_share_of_the_returns_variance(
    values: list[float], wanted: float
) -> None:
    return_N = torch.tensor([3.0, 4.0, 6.0], dtype=torch.float64)
    found = gae.explained_variance(torch.tensor(values, dtype=torch.float64), return_N)
    assert found == pytest.approx(wanted, abs=1e-12)
    assert gae.explained_variance(return_N, torch.ones(3)) == 0.0  # returns that do not vary
