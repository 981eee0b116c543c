"""Advantages of turns and of roles against loops written apart, and where they are simpler ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.objective import baselines, gae, group, segments, turns
from tests.objective import loops

RAGGED = st.lists(st.lists(st.integers(1, 3), max_size=4), min_size=1, max_size=7)
"""For each sequence the tokens of its turns."""
SEED = st.integers(0, 1000)
EPSILON = 1e-4


class Made:
    """Random rewards of the tokens of ragged turns, in interleaved groups; one sequence in five has
    none, one in two states is shared."""

    def __init__(self, shape: Sequence[Sequence[int]], seed: int) -> None:
        self.shape = [list(one) for one in shape]
        self.lengths = [sum(one) for one in self.shape]
        self.groups = [i % 2 for i in range(len(self.shape))]
        count = sum(self.lengths)
        self.rewards = [list(x) for x in loops.split(loops.random(count, seed), self.lengths)]
        for i, own in enumerate(self.rewards):
            if own and (i + seed) % 5 == 0:
                own[-1] = math.nan
        self.values = loops.split(loops.random(count, seed + 1), self.lengths)
        self.states = [[(seed + 3 * i + 2 * k) % 2 for k, _ in enumerate(one)]
                       for i, one in enumerate(self.shape)]  # fmt: skip

    @property
    def reward_N(self) -> Tensor:
        return loops.tensor(loops.join(self.rewards))

    @property
    def value_N(self) -> Tensor:
        return loops.tensor(loops.join(self.values))

    @property
    def lengths_S(self) -> Tensor:
        return loops.ints(self.lengths)

    @property
    def groups_S(self) -> Tensor:
        return loops.ints([7 - g for g in self.groups])

    @property
    def turn_N(self) -> Tensor:
        return loops.ints([k for one in self.shape for k, n in enumerate(one) for _ in range(n)])

    @property
    def anchor_N(self) -> Tensor:
        pairs = zip(self.shape, self.states, self.groups, strict=True)
        return loops.ints(
            [5 * g + s for one, own, g in pairs for n, s in zip(one, own, strict=True)
             for _ in range(n)])  # fmt: skip

    def turn_rewards(self) -> list[list[float]]:
        """NaN in all turns of a sequence without reward."""
        found = []
        for one, own in zip(self.shape, self.rewards, strict=True):
            left, sums = list(own), []
            for n in one:
                sums.append(sum(left[:n]))
                left = left[n:]
            found.append([math.nan] * len(one) if math.isnan(sum(own)) else sums)
        return found

    def spread(self, values: Sequence[Sequence[float]]) -> list[float]:
        """A number of each turn, at each of its tokens."""
        return [x for one, own in zip(self.shape, values, strict=True)
                for n, x in zip(one, own, strict=True) for _ in range(n)]  # fmt: skip


@pytest.fixture(autouse=True)
def _groups_of_one_warn() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@settings(max_examples=40, deadline=None)
@given(shape=RAGGED, seed=SEED)
def test_turn_lengths_are_those_of_the_loops(shape: list[list[int]], seed: int) -> None:
    made = Made(shape, seed)
    lengths_U, turns_S = turns.turn_lengths(made.turn_N, made.lengths_S)
    assert lengths_U.tolist() == [n for one in shape for n in one]
    assert turns_S.tolist() == [len(one) for one in shape]


@pytest.mark.parametrize("scale", ["std", "none"])
@settings(max_examples=40, deadline=None)
@given(shape=RAGGED, seed=SEED)
def test_group_in_group_is_the_loop(
    scale: Literal["std", "none"], shape: list[list[int]], seed: int
) -> None:
    made = Made(shape, seed)
    rewards = made.turn_rewards()
    whole = [sum(own) for own in rewards]
    for i, own in enumerate(made.rewards):
        whole[i] = whole[i] if own else 0.0  # without a token, with the reward 0
    episode = loops.group_relative(whole, made.groups, scale, EPSILON)
    returns = [
        [sum(0.9 ** (j - k) * own[j] for j in range(k, len(own))) for k in range(len(own))]
        for own in rewards
    ]
    flat = [(i, k) for i, own in enumerate(rewards) for k in range(len(own))]
    states = [5 * made.groups[i] + made.states[i][k] for i, k in flat]
    step = loops.group_relative([returns[i][k] for i, k in flat], states, scale, EPSILON)
    together: list[list[float]] = [[] for _ in shape]
    for (i, _), one in zip(flat, step, strict=True):
        together[i].append(episode[i] + 0.7 * one)
    found = turns.group_in_group(
        made.reward_N, made.turn_N, made.anchor_N, made.groups_S, made.lengths_S,
        omega=0.7, gamma=0.9, scale=scale, epsilon=EPSILON,
    )  # fmt: skip
    loops.close(found, made.spread(together))


@settings(max_examples=40, deadline=None)
@given(shape=RAGGED, seed=SEED)
def test_turn_relative_is_the_loop(shape: list[list[int]], seed: int) -> None:
    made = Made(shape, seed)
    rewards = made.turn_rewards()
    outcomes = [own[-1] if own else math.nan for own in rewards]
    outcome = loops.group_relative(outcomes, made.groups, "std", EPSILON)
    expected = []
    for i, own in enumerate(rewards):
        expected.append([0.7 * outcome[i]] * (len(own) - 1) + [outcome[i]] * bool(own))
    for k in range(4):
        peers = [i for i, own in enumerate(rewards) if len(own) > k + 1]
        normalised = loops.group_relative(
            [rewards[i][k] for i in peers], [made.groups[i] for i in peers], "std", EPSILON
        )
        for i, one in zip(peers, normalised, strict=True):
            expected[i][k] += one
    found = turns.turn_relative(
        made.reward_N, made.turn_N, made.groups_S, made.lengths_S,
        outcome_weight=0.7, epsilon=EPSILON,
    )  # fmt: skip
    loops.close(found, made.spread(expected))


@settings(max_examples=40, deadline=None)
@given(shape=RAGGED, seed=SEED)
def test_turn_gae_is_the_loop(shape: list[list[int]], seed: int) -> None:
    made = Made(shape, seed)
    expected = []
    for one, own, values in zip(shape, made.rewards, made.values, strict=True):
        ends = [sum(one[: k + 1]) for k in range(len(one))]
        starts = [0, *ends[:-1]]
        turn, at_start = 0.0, [0.0] * len(one)
        for k in reversed(range(len(one))):
            after = values[ends[k]] if k + 1 < len(one) else 0.0
            delta = sum(own[starts[k] : ends[k]]) + 0.7 * after - values[starts[k]]
            turn = delta + 0.7 * 0.6 * turn
            at_start[k] = turn
        advantages = [0.0] * len(own)
        for k in range(len(one)):
            for t in reversed(range(starts[k], ends[k])):
                if t + 1 < ends[k]:
                    ahead = 0.9 * values[t + 1] + 0.9 * 0.8 * advantages[t + 1]
                elif k + 1 < len(one):
                    ahead = 0.7 * values[t + 1] + 0.7 * 0.6 * at_start[k + 1]
                else:
                    ahead = 0.0
                advantages[t] = own[t] + ahead - values[t]
        expected += advantages
    next_N = segments.shift(made.value_N, made.lengths_S)
    found = turns.turn_gae(
        made.reward_N, made.value_N, next_N, made.turn_N, made.lengths_S,
        gamma=0.9, lam=0.8, turn_gamma=0.7, turn_lam=0.6,
    )  # fmt: skip
    absent = loops.tensor(expected).isnan()
    assert torch.equal(found.isnan(), absent)
    loops.close(found[~absent], loops.tensor(expected)[~absent])


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 9), seed=SEED, decay=st.sampled_from([0.0, 0.9, 1.0]))
def test_role_relative_is_the_loop(size: int, seed: int, decay: float) -> None:
    """Rewards of a role that are all equal move it as single updates would."""
    rewards = loops.random(size, seed).tolist()
    rewards[seed % size] = math.nan
    roles = [(i + seed) % 3 for i in range(size)]
    before = loops.random(3, seed + 1).tolist()
    expected = [
        0.0 if math.isnan(r) else r - before[k] for r, k in zip(rewards, roles, strict=True)
    ]
    found_S, after_R = baselines.role_relative(
        loops.tensor(rewards), loops.ints(roles), loops.tensor(before), decay=decay
    )
    loops.close(found_S, expected)
    for role in range(3):
        own = [r for r, k in zip(rewards, roles, strict=True) if k == role and not math.isnan(r)]
        b = before[role]
        for _ in own:
            b = decay * b + (1 - decay) * sum(own) / len(own)
        assert float(after_R[role]) == pytest.approx(b, abs=1e-12)


# ---------------- where they are simpler ones, bit for bit


def test_group_in_group_without_omega_is_grpo() -> None:
    made = Made([[2, 1], [1], [3, 1, 1], [2], [1, 2], [1]], 1)
    reward_S = segments.segment_sum(made.reward_N, made.lengths_S)
    plain = group.group_relative(reward_S, made.groups_S, scale="std", epsilon=EPSILON)
    found = turns.group_in_group(
        made.reward_N, made.turn_N, made.anchor_N, made.groups_S, made.lengths_S,
        omega=0.0, gamma=0.9, scale="std", epsilon=EPSILON,
    )  # fmt: skip
    assert torch.equal(found, segments.spread(plain, made.lengths_S))


def test_turn_relative_of_one_turn_is_grpo() -> None:
    made = Made([[2], [1], [3], [2], [4], [1]], 1)
    reward_S = segments.segment_sum(made.reward_N, made.lengths_S)
    plain = group.group_relative(reward_S, made.groups_S, scale="std", epsilon=EPSILON)
    found = turns.turn_relative(
        made.reward_N, made.turn_N, made.groups_S, made.lengths_S,
        outcome_weight=0.3, epsilon=EPSILON,
    )  # fmt: skip
    assert torch.equal(found, segments.spread(plain, made.lengths_S))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_turn_gae_of_one_turn_is_gae(dtype: torch.dtype) -> None:
    """Also of the values of a model in float32."""
    made = Made([[2], [1], [3], [2], [4], [1]], 2)
    value_N = made.value_N.to(dtype)
    next_N = segments.shift(value_N, made.lengths_S)
    delta_N = gae.td_error(made.reward_N, value_N, next_N, gamma=0.9)
    plain_N = gae.gae(delta_N, segments.continues(made.lengths_S), gamma=0.9, lam=0.8)
    found_N = turns.turn_gae(
        made.reward_N, value_N, next_N, made.turn_N, made.lengths_S,
        gamma=0.9, lam=0.8, turn_gamma=0.7, turn_lam=0.6,
    )  # fmt: skip
    assert torch.equal(found_N.isnan(), plain_N.isnan())
    assert torch.equal(found_N.nan_to_num(9.0), plain_N.nan_to_num(9.0))


def test_role_relative_that_never_moves_is_the_reward() -> None:
    reward_S, zero_R = loops.random(5, 1), torch.zeros(2, dtype=torch.float64)
    found_S, after_R = baselines.role_relative(
        reward_S, loops.ints([0, 1, 1, 0, 0]), zero_R, decay=1.0
    )
    assert torch.equal(found_S, reward_S)
    assert torch.equal(after_R, zero_R)


def test_turn_alone_at_its_state_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = turns.group_in_group(
            loops.tensor([1.0, 0.0, 3.0]), loops.ints([0, 1, 0]), loops.ints([0, 1, 0]),
            loops.ints([0, 0]), loops.ints([2, 1]), omega=1.0, gamma=1.0, scale="none", epsilon=0.0,
        )  # fmt: skip
    # Episodes 1 and 3; the first turns return 1 and 3; the second turn is alone.
    assert found.tolist() == [-2.0, -1.0, 2.0]
