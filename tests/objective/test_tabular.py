"""Exact solutions: by hand, by every policy there is, and by the laws of Bellman's operator."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn.functional import one_hot

from keel.objective import background
from tests.objective import loops

STATES, ACTIONS = 4, 3


def random_process(seed: int, stays: float = 0.9) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and transitions; an action ends the episode with 1 - `stays`."""
    reward_XA = loops.random(STATES * ACTIONS, seed).reshape(STATES, ACTIONS)
    logit_XAY = loops.random(STATES * ACTIONS * STATES, seed + 1, 2.0)
    return reward_XA, stays * logit_XAY.reshape(STATES, ACTIONS, STATES).softmax(-1)


@pytest.mark.parametrize("gamma", [0.5, 0.95])
def test_no_policy_is_better_and_one_is_as_good(gamma: float) -> None:
    """The values of all 81 policies, in loops of their own."""
    reward_XA, transition_XAY = random_process(7)
    q_XA = background.value_iteration(reward_XA, transition_XAY, gamma=gamma)
    best = [-float("inf")] * STATES
    for choices in product(range(ACTIONS), repeat=STATES):
        # 0.9 of an episode's mass goes on: 0.9^200 of order 1 is below 1e-9.
        values = loops.values_of(choices, reward_XA.tolist(), transition_XAY.tolist(), gamma, 200)
        best = [max(pair) for pair in zip(best, values, strict=True)]
        probability_XA = one_hot(loops.ints(choices), ACTIONS).double()
        solved_X = background.policy_values(probability_XA, reward_XA, transition_XAY, gamma=gamma)
        loops.close(solved_X, values, tolerance=1e-8)
    loops.close(q_XA.max(-1).values, best, tolerance=1e-8)


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_one_sweep_is_the_loop(gamma: float) -> None:
    reward_XA, transition_XAY = random_process(4)
    q_XA = loops.random(STATES * ACTIONS, 9).reshape(STATES, ACTIONS)
    values = [max(row) for row in q_XA.tolist()]
    expected = loops.bellman(values, reward_XA.tolist(), transition_XAY.tolist(), gamma)
    actual = background.bellman_optimal(q_XA, reward_XA, transition_XAY, gamma=gamma)
    loops.close(actual, torch.tensor(expected, dtype=torch.float64))


def test_without_end_or_discount_there_is_no_solution() -> None:
    reward_XA, transition_XAY = random_process(5, stays=1.0)
    with pytest.raises(ValueError, match="did not settle in 500 sweeps"):
        background.value_iteration(reward_XA.abs() + 0.1, transition_XAY, gamma=1.0, sweeps=500)
    # γ = 1 is no fault in itself: a corridor whose steps cost 1 has values that count them.
    corridor_XAY = torch.zeros(3, 1, 3, dtype=torch.float64)
    corridor_XAY[0, 0, 1] = corridor_XAY[1, 0, 2] = 1.0
    cost_XA = -torch.ones(3, 1, dtype=torch.float64)
    counted = background.value_iteration(cost_XA, corridor_XAY, gamma=1.0, sweeps=5)
    loops.close(counted, loops.tensor([-3.0, -2.0, -1.0])[:, None])
