"""Advantages within groups: against loops, absent rewards, process rewards, whitening."""

from __future__ import annotations

import math
import warnings
from itertools import product
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.objective import baselines, group, segments
from tests.objective import loops

NAN = float("nan")
SCALES: tuple[Literal["std", "batch", "none"], ...] = ("std", "batch", "none")
# Multiples of 1/4: sums are exact, so equal rewards are equal whatever the order.
REWARD = st.one_of(st.integers(-8, 8).map(lambda k: k / 4), st.just(NAN))
ROWS = st.lists(
    st.tuples(REWARD, st.sampled_from([-7, 0, 3, 10**12]), st.integers(1, 9)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS)
def test_against_the_loops(rows: list[tuple[float, int, int]]) -> None:
    rewards, groups, lengths = (list(column) for column in zip(*rows, strict=True))
    r, g, n = loops.tensor(rewards), loops.ints(groups), loops.ints(lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for scale, ddof in product(SCALES, (0, 1)):
            found = group.group_relative(r, g, scale=scale, epsilon=1e-4, ddof=ddof)
            loops.close(found, loops.group_relative(rewards, groups, scale, 1e-4, ddof))
        centred = loops.group_relative(rewards, groups, "none", 1e-4)
        loops.close(group.group_mean_baseline(r, g), centred)
        loops.close(group.leave_one_out(r, g), loops.leave_one_out(rewards, groups))
        loops.close(group.optimal(r, g, n), loops.optimal(rewards, groups, lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(dtype: torch.dtype) -> None:
    """0.1 and 0.7 have no exact mean in binary: only a test for equality gives 0."""
    reward = torch.tensor([0.1, 0.7, 0.1, 0.7, 0.1, 0.7, 1.0, 0.0], dtype=dtype)
    groups, lengths = loops.ints([0, 1, 0, 1, 0, 1, 2, 2]), loops.ints([1, 2, 3, 4, 5, 6, 7, 8])
    for scale in SCALES:
        out = group.group_relative(reward, groups, scale=scale, epsilon=0.0)
        assert out[:6].tolist() == [0.0] * 6
        assert out[6] > 0 > out[7]
    assert group.leave_one_out(reward, groups)[:6].tolist() == [0.0] * 6
    assert group.optimal(reward, groups, lengths)[:6].tolist() == [0.0] * 6


def test_a_group_of_one_warns_and_gets_zero() -> None:
    reward, groups = loops.tensor([0.3, 1.0, 2.0]), loops.ints([5, 6, 6])
    for function in (group.leave_one_out, group.group_mean_baseline):
        with pytest.warns(UserWarning, match="group of one"):
            assert float(function(reward, groups)[0]) == 0.0
    with pytest.warns(UserWarning, match="group of one"):
        out = group.group_relative(reward, groups, scale="std", epsilon=1e-4)
    assert float(out[0]) == 0.0
    # One answer is left where the other's reward is None.
    with pytest.warns(UserWarning, match="group of one"):
        left = group.leave_one_out(loops.tensor([1.0, NAN]), loops.ints([0, 0]))
    assert left.tolist() == [0.0, 0.0]


def test_a_whole_group_without_reward_is_zero_and_silent() -> None:
    reward, groups = loops.tensor([NAN, NAN, 1.0, 0.0]), loops.ints([0, 0, 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = group.group_relative(reward, groups, scale="batch", epsilon=0.0)
        nothing = group.leave_one_out(torch.zeros(0), loops.ints([]))
    loops.close(out, [0.0, 0.0, 0.5**0.5, -(0.5**0.5)])
    assert nothing.shape == (0,)


def test_greedy_baseline() -> None:
    out = baselines.greedy_baseline(loops.tensor([1.0, NAN, 0.5]), loops.tensor([0.3, 0.3, NAN]))
    loops.close(out, [0.7, 0.0, 0.0])


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, gamma=st.floats(0.5, 1.0), baseline=st.booleans(), kl=st.booleans())
def test_batch_normalised_against_the_loop(
    rows: list[tuple[float, int, int]], gamma: float, baseline: bool, kl: bool
) -> None:
    rewards, groups, lengths = (list(column) for column in zip(*rows, strict=True))
    penalty_N = loops.random(sum(lengths), 3, scale=0.1) * float(kl)
    centred = loops.group_relative(rewards, groups, "none", 0.0)
    parts, present = [], []
    for i, penalties in enumerate(loops.split(penalty_N, lengths)):
        if math.isnan(rewards[i]):
            parts.append(None)
            continue
        penalties[-1] += centred[i] if baseline else rewards[i]
        parts.append(loops.to_go(penalties, gamma))
        present.extend(parts[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        arguments = (loops.tensor(rewards), penalty_N, loops.ints(groups), loops.ints(lengths))
        options = {"gamma": gamma, "group_baseline": baseline}
        raw_N = baselines.baselined_returns(*arguments, **options)
        out_N = segments.whiten(raw_N, segments.spread(~arguments[0].isnan(), arguments[3]))
    zeros = [[0.0] * n if p is None else p for p, n in zip(parts, lengths, strict=True)]
    loops.close(raw_N, loops.join(zeros))
    white = iter(loops.whiten(present) if len(present) > 1 else [0.0] * len(present))
    # Where all returns are equal the variance is 0 and rounding is divided by √ε = 1e-4.
    expected = loops.join(
        [
            [0.0] * n if p is None else [next(white) for _ in p]
            for p, n in zip(parts, lengths, strict=True)
        ]
    )
    loops.close(out_N, expected, 1e-9)


def test_whiten() -> None:
    x_N = loops.random(50, 1) * 3 + 2
    out_N = segments.whiten(x_N)
    loops.close(out_N, loops.whiten(x_N.tolist()))
    loops.close(out_N.mean(), torch.tensor(0.0))
    wide = segments.whiten(x_N, epsilon=4.0)
    loops.close(wide, loops.whiten(x_N.tolist(), 4.0))
    present_N = torch.arange(50) % 3 != 0
    masked_N = segments.whiten(torch.where(present_N, x_N, NAN), present_N)
    loops.close(masked_N[present_N], loops.whiten(x_N[present_N].tolist()))
    assert masked_N[~present_N].tolist() == [0.0] * 17
    assert segments.whiten(loops.tensor([3.0])).tolist() == [0.0]
    assert segments.whiten(torch.zeros(0)).shape == (0,)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_process_rewards_against_the_loop(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    steps = [
        (i, end, data.draw(REWARD))
        for i, length in enumerate(lengths)
        for end in sorted(data.draw(st.sets(st.integers(0, length - 1))))
    ]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    normalised = loops.group_relative(
        [r for _, _, r in steps], [groups[i] for i, _, _ in steps], "std", 1e-4
    )
    expected = [
        sum(a for (j, end, _), a in zip(steps, normalised, strict=True) if j == i and end >= t)
        for i, length in enumerate(lengths)
        for t in range(length)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        actual = group.process_group_relative(
            loops.tensor([r for _, _, r in steps]),
            loops.ints([starts[i] + end for i, end, _ in steps]),
            loops.ints([i for i, _, _ in steps]),
            loops.ints(groups),
            loops.ints(lengths),
            epsilon=1e-4,
        )
    loops.close(actual, expected)
