"""Exact solutions of small Markov decision processes: what Q-learning must come to.

States (X), actions (A), next states (Y, as many as X). What is left of a row of `transition_XAY`
under 1 is the probability that the episode terminates; nothing counts after that.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def bellman_optimal(
    q_XA: Float[Tensor, "X A"],
    reward_XA: Float[Tensor, "X A"],
    transition_XAY: Float[Tensor, "X A X"],
    *,
    gamma: float,
) -> Float[Tensor, "X A"]:
    """One sweep of Bellman's optimality operator, a contraction by γ.

        (T Q)(s,a) = r(s,a) + γ Σ_{s'} P(s'|s,a) max_{a'} Q(s',a')

    Source: Bellman 1957; Sutton and Barto 2018 eq. 3.20.
    """
    return reward_XA + gamma * transition_XAY @ q_XA.max(-1).values


def value_iteration(
    reward_XA: Float[Tensor, "X A"],
    transition_XAY: Float[Tensor, "X A X"],
    *,
    gamma: float,
    tolerance: float = 1e-12,
    sweeps: int = 1_000_000,
) -> Float[Tensor, "X A"]:
    """The optimal action values, by sweeps until none moves by more than `tolerance`.

        Q* = T Q*,   V*(s) = max_a Q*(s,a)

    Raises ValueError where that does not happen within `sweeps` (γ = 1 and no termination).

    Source: Sutton and Barto 2018 §4.4.
    """
    q_XA = torch.zeros_like(reward_XA)
    for _ in range(sweeps):
        next_XA = bellman_optimal(q_XA, reward_XA, transition_XAY, gamma=gamma)
        if float((next_XA - q_XA).detach().abs().max()) <= tolerance:
            return next_XA
        q_XA = next_XA
    raise ValueError(f"value iteration did not settle in {sweeps} sweeps: is gamma = {gamma} < 1?")


def policy_values(
    probability_XA: Float[Tensor, "X A"],
    reward_XA: Float[Tensor, "X A"],
    transition_XAY: Float[Tensor, "X A X"],
    *,
    gamma: float,
) -> Float[Tensor, " X"]:
    """The values of the states under a policy, by solving their linear equations.

        V_π = (I − γ P_π)⁻¹ r_π,   P_π(s'|s) = Σ_a π(a|s) P(s'|s,a)

    Source: Sutton and Barto 2018 eq. 4.4.
    """
    reward_X = (probability_XA * reward_XA).sum(-1)
    transition_XY = torch.einsum("xa,xay->xy", probability_XA, transition_XAY)
    identity_XY = torch.eye(len(reward_X), dtype=reward_X.dtype, device=reward_X.device)
    solution_X: Tensor = torch.linalg.solve(identity_XY - gamma * transition_XY, reward_X)
    return solution_X
