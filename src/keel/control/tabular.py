"""The table of an environment that publishes it (toy text), as what `objective.tabular` solves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Outcome = tuple[float, int, float, bool]
"""Probability, next state, reward, and whether the episode terminates there."""
Table = Mapping[int, Mapping[int, Sequence[Outcome]]]
"""What may come of an action (inner key) in a state (outer key), each numbered from 0."""


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
