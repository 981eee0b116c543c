"""Temporal advantages: MATH's fifth law, and each function against its loop."""

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


def test_monte_carlo_reads_the_value_behind_the_last_action_alone() -> None:
    lengths_S = loops.ints([2, 0, 3, 1, 2])
    reward_N, value_N = loops.random(8, 1), loops.random(8, 2)
    reward_N[6] = float("nan")
    last_N = ~segments.continues(lengths_S)
    next_N = loops.random(8, 3)
    plain_N = gae.monte_carlo(reward_N, lengths_S, value_N, next_N, gamma=0.9)
    for other in (99.0, float("nan")):
        changed_N = torch.where(last_N, next_N, torch.full_like(next_N, other))
        again_N = gae.monte_carlo(reward_N, lengths_S, value_N, changed_N, gamma=0.9)
        assert torch.equal(again_N, plain_N)
    # None is an end of its own everywhere.
    none_N = gae.monte_carlo(reward_N, lengths_S, value_N, gamma=0.9)
    zero_N = gae.monte_carlo(reward_N, lengths_S, value_N, next_N.masked_fill(last_N, 0), gamma=0.9)
    assert torch.equal(none_N, zero_N)
    differs_N = none_N != plain_N
    # All but the last two: their sequence has a reward that is absent, and so no advantage.
    assert differs_N.tolist() == [True] * 6 + [False] * 2
    assert plain_N[6:].tolist() == [0.0, 0.0]
