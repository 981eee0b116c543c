"""FrozenLake solved from its table, and learned from experience."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from keel.config.control import QLearningStage
from keel.config.control_load import load_control
from keel.control.environments import Table, from_table
from keel.control.q_learning import QLearning
from keel.objective import background

STATES, ACTIONS, GOAL, GAMMA = 16, 4, 15, 0.99
MOVES = 6
"""From the start to the goal by the shortest way, around the holes."""


def lake(slippery: bool) -> Table:
    env = gym.make("FrozenLake-v1", map_name="4x4", is_slippery=slippery)
    table: Table = env.unwrapped.P
    env.close()
    return table


def solved(table: Table) -> Tensor:
    return background.value_iteration(*from_table(table, STATES, ACTIONS), gamma=GAMMA)


def test_a_table_of_two_states() -> None:
    """Outcomes to one state add up; a terminating one pays, and leads nowhere."""
    table: Table = {
        0: {
            0: [(0.25, 0, 4.0, False), (0.25, 1, 0.0, False), (0.5, 1, 2.0, False)],
            1: [(0.75, 1, 8.0, True), (0.25, 1, 0.0, False)],
        },
        1: {0: [(1.0, 1, 0.0, True)], 1: [(1.0, 0, -1.0, False)]},
    }
    reward_XA, transition_XAY = from_table(table, 2, 2)
    assert reward_XA.dtype == transition_XAY.dtype == torch.float64
    assert reward_XA.tolist() == [[2.0, 6.0], [0.0, -1.0]]
    assert transition_XAY.tolist() == [[[0.25, 0.75], [0.0, 0.25]], [[0.0, 0.0], [1.0, 0.0]]]


@pytest.mark.parametrize("slippery", [False, True])
def test_the_lakes_table(slippery: bool) -> None:
    reward_XA, transition_XAY = from_table(lake(slippery), STATES, ACTIONS)
    holes_and_goal = [5, 7, 11, 12, 15]
    # There the episode is over: nothing leads out of them, and what leads into them is left out.
    assert transition_XAY[holes_and_goal].count_nonzero() == 0
    assert transition_XAY[:, :, holes_and_goal].count_nonzero() == 0
    # Only state 14 is next to the goal (11 is a hole): to the right, or slipping there.
    expected = torch.zeros(STATES, ACTIONS, dtype=torch.float64)
    expected[14, 1:] = 1 / 3 if slippery else torch.tensor([0.0, 1.0, 0.0])
    # Gymnasium's thirds differ in their last bit.
    torch.testing.assert_close(reward_XA, expected, atol=1e-12, rtol=0)


def test_the_deterministic_lakes_optimum() -> None:
    q_XA = solved(lake(slippery=False))
    # The reward comes with the last of six moves, and so after five discounts.
    assert float(q_XA[0].max()) == pytest.approx(GAMMA ** (MOVES - 1), abs=1e-12)
    # Down and right both lead on from the start; left and up bump into the edge and cost a move.
    wasted = GAMMA**MOVES
    assert q_XA[0].tolist() == pytest.approx([wasted, GAMMA**5, GAMMA**5, wasted], abs=1e-12)
    assert q_XA[14].tolist() == pytest.approx([GAMMA**2, GAMMA, 1.0, GAMMA**2], abs=1e-12)


def simulated(table: Table, choices: list[int], episodes: int, seed: int) -> np.ndarray:
    """Discounted returns from the start, straight from the table's outcomes."""
    rng = np.random.default_rng(seed)
    outcomes = [table[state][choice] for state, choice in enumerate(choices)]
    width = max(len(rows) for rows in outcomes)
    bound = np.ones((STATES, width))
    after = np.zeros((STATES, width), dtype=np.int64)
    reward, ended = np.zeros((STATES, width)), np.ones((STATES, width), dtype=np.bool_)
    for state, rows in enumerate(outcomes):
        bound[state, : len(rows) - 1] = np.cumsum([row[0] for row in rows])[:-1]
        for at, (_, next_state, paid, terminated) in enumerate(rows):
            after[state, at], reward[state, at] = next_state, paid
            ended[state, at] = terminated
    total, discount = np.zeros(episodes), 1.0
    state, on = np.zeros(episodes, dtype=np.int64), np.ones(episodes, dtype=np.bool_)
    # What is past 2000 steps counts for less than 0.99^2000, 2e-9.
    for _ in range(2000):
        drawn = (rng.random(episodes)[:, None] >= bound[state, :-1]).sum(1)
        total += on * discount * reward[state, drawn]
        on &= ~ended[state, drawn]
        state = after[state, drawn]
        discount *= GAMMA
        if not on.any():
            break
    return total


def test_the_slippery_lakes_optimum_is_what_its_greedy_policy_earns() -> None:
    table = lake(slippery=True)
    q_XA = solved(table)
    value = float(q_XA[0].max())
    episodes = 4000
    returns = simulated(table, q_XA.argmax(-1).tolist(), episodes, seed=1)
    error = returns.std(ddof=1) / episodes**0.5
    assert abs(returns.mean() - value) < 4 * error
    # The bound means something: four deviations are less than a tenth of the value.
    assert 4 * error < 0.1 * value
    # Nor would another policy have done: always down and right earn next to nothing.
    assert simulated(table, [1] * STATES, episodes, seed=1).mean() < 0.5 * value


SHORT = (
    "environment.options={is_slippery=false}",
    "steps=6000",
    "row_every=6000",
    # A linear layer on one-hot states is a table, and a bias for each action.
    "network.hidden=[]",
    "exploration={initial=1.0, final=0.3, share=0.3}",
    "replay={capacity=6000, warmup=500, batch_size=64}",
    "target.every=50",
    "update_every=2",
    "optimizer={learning_rate=0.02, schedule='linear', min_lr_ratio=0.0}",
)


@pytest.mark.quick("False")
@pytest.mark.parametrize("double", [False, True])
def test_q_learning_comes_to_the_optimum(double: bool) -> None:
    stage = load_control("dqn", "FrozenLake-v1", [*SHORT, f"double={str(double).lower()}"]).stage
    assert isinstance(stage, QLearningStage)
    learner = QLearning(stage, seed=1)
    learner.iterate(1)
    learner.environments.close()
    with torch.no_grad():
        q_XA = learner.online(torch.eye(STATES)).double()
    choose = learner.greedy()
    env = gym.make("FrozenLake-v1", is_slippery=False)
    state, _ = env.reset(seed=0)
    path, terminated = [], False
    while not terminated and len(path) < MOVES:
        path.append(int(state))
        action = choose(np.eye(STATES, dtype=np.float32)[[state]])[0]
        state, reward, terminated, _, _ = env.step(int(action))
    env.close()
    assert (int(state), float(reward), len(path)) == (GOAL, 1.0, MOVES)
    # One discount more or less would be 0.0096 off; seeds 0 to 7 were within 1e-4. Every action of
    # these states, those into holes too: exploration takes them all.
    best_XA = solved(lake(slippery=False))
    torch.testing.assert_close(q_XA[path], best_XA[path], atol=2e-3, rtol=0)
