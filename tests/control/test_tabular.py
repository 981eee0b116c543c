"""FrozenLake solved from its table, and learned from experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import gymnasium as gym
import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from keel.config.control import QLearningStage, load_control
from keel.control.q_learning import QLearning
from keel.objective import background

STATES, ACTIONS, GOAL, GAMMA = 16, 4, 15, 0.99
MOVES = 6
"""From the start to the goal by the shortest way, around the holes."""

Outcome = tuple[float, int, float, bool]
"""Probability, next state, reward, and whether the episode terminates there."""
Table = Mapping[int, Mapping[int, Sequence[Outcome]]]
"""The outcomes of an action (inner key) in a state (outer key), each numbered from 0."""


def from_table(
    table: Table, states: int, actions: int
) -> tuple[Float[Tensor, "X A"], Float[Tensor, "X A X"]]:
    """Expected rewards and transitions, in float64, of Gymnasium's `env.unwrapped.P`.

    A terminating outcome pays its reward and leads nowhere: its probability is left out of the
    transitions, so that a row of them sums to the probability that the episode goes on.
    """
    reward_XA = torch.zeros(states, actions, dtype=torch.float64)
    transition_XAY = torch.zeros(states, actions, states, dtype=torch.float64)
    for state in range(states):
        for action in range(actions):
            for probability, after, reward, terminated in table[state][action]:
                reward_XA[state, action] += probability * reward
                if not terminated:
                    transition_XAY[state, action, after] += probability
    return reward_XA, transition_XAY


def lake() -> Table:
    env = gym.make("FrozenLake-v1", map_name="4x4", is_slippery=False)
    table: Table = env.unwrapped.P
    env.close()
    return table


def solved(table: Table) -> Tensor:
    return background.value_iteration(*from_table(table, STATES, ACTIONS), gamma=GAMMA)


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


@pytest.mark.slow
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
    best_XA = solved(lake())
    torch.testing.assert_close(q_XA[path], best_XA[path], atol=2e-3, rtol=0)
