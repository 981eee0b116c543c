"""Value functions and Q-learning, and the exact solutions of small Markov decision processes.

Transitions (B) of a replay buffer, actions (A). An environment that cuts an episode off
(truncation) does not terminate it: such a transition bootstraps. The return U_t itself is
`keel.objective.gae.returns_to_go`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot


def state_value(
    probability_BA: Float[Tensor, "B A"], q_BA: Float[Tensor, "B A"]
) -> Float[Tensor, " B"]:
    """The value of a state under a policy; its mean over states is the objective J.

        V_π(s) = Σ_a π(a|s) Q_π(s,a),   J = E_S[V_π(S)]

    Source: Sutton and Barto 2018 exercise 3.18.
    """
    return (probability_BA * q_BA).sum(-1)


def epsilon_greedy(q_BA: Float[Tensor, "B A"], *, epsilon: float) -> Float[Tensor, "B A"]:
    """The probabilities of the ε-greedy policy; of equal best actions the first is the greedy one.

        π(a|s) = (1−ε) [a = argmax_a Q(s,a)] + ε/|A|

    Source: Sutton and Barto 2018 §2.2; Mnih et al. 2015.
    """
    greedy_BA = one_hot(q_BA.argmax(-1), q_BA.shape[-1]).to(q_BA.dtype)
    return (1.0 - epsilon) * greedy_BA + epsilon / q_BA.shape[-1]


def td_target(
    reward_B: Float[Tensor, " B"],
    next_q_BA: Float[Tensor, "B A"],
    terminated_B: Bool[Tensor, " B"],
    *,
    gamma: float,
) -> Float[Tensor, " B"]:
    """What Q is regressed on, by the target network's values of the next state; no gradient.

        ŷ_j = r_j + γ (1 − terminated_j) max_a Q(s_{j+1}, a; w⁻)

    Source: DQN, Mnih et al. 2015, algorithm 1.
    """
    return _bootstrap(reward_B, next_q_BA.max(-1).values, terminated_B, gamma)


def double_td_target(
    reward_B: Float[Tensor, " B"],
    next_online_q_BA: Float[Tensor, "B A"],
    next_target_q_BA: Float[Tensor, "B A"],
    terminated_B: Bool[Tensor, " B"],
    *,
    gamma: float,
) -> Float[Tensor, " B"]:
    """The target network's value of the action that the online network prefers; no gradient.

        ŷ_j = r_j + γ (1 − terminated_j) Q(s_{j+1}, argmax_a Q(s_{j+1}, a; w); w⁻)

    Source: Double DQN, arXiv:1509.06461 eq. 4.
    """
    action_B1 = next_online_q_BA.argmax(-1, keepdim=True)
    return _bootstrap(
        reward_B, next_target_q_BA.gather(-1, action_B1).squeeze(-1), terminated_B, gamma
    )


def n_step_target(
    reward_BK: Float[Tensor, "B K"],
    terminated_BK: Bool[Tensor, "B K"],
    next_value_B: Float[Tensor, " B"],
    *,
    gamma: float,
    steps_B: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """k rewards, then the value of the state after them; nothing counts after a termination.

        ŷ_t = Σ_{l<k} γ^l r_{t+l} + γ^k max_a Q(s_{t+k}, a; w⁻)

    k is K, or what `steps_B` says where an environment cut the episode off before that.

    Source: Sutton and Barto 2018 eq. 7.1; arXiv:1710.02298 (Rainbow).
    """
    index_K = torch.arange(reward_BK.shape[-1], device=reward_BK.device)
    if steps_B is None:
        steps_B = torch.full_like(terminated_BK[:, 0], reward_BK.shape[-1], dtype=torch.long)
    within_BK = index_K < steps_B.unsqueeze(-1)
    alive_BK = torch.cumprod((~(terminated_BK & within_BK)).to(reward_BK.dtype), dim=-1)
    before_BK = torch.cat([torch.ones_like(alive_BK[:, :1]), alive_BK[:, :-1]], dim=-1)
    discount_K = gamma ** index_K.to(reward_BK.dtype)
    reward_B = (reward_BK * before_BK * discount_K * within_BK).sum(-1)
    behind_B = gamma ** steps_B.to(reward_BK.dtype) * alive_BK[:, -1]
    return (reward_B + behind_B * next_value_B).detach()


def q_error(
    q_BA: Float[Tensor, "B A"], action_B: Int[Tensor, " B"], target_B: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """The TD error of the action taken; the gradient goes through Q, not through the target.

        δ_j = Q(s_j, a_j; w) − ŷ_j

    Source: Mnih et al. 2015, algorithm 1.
    """
    return q_BA.gather(-1, action_B.unsqueeze(-1)).squeeze(-1) - target_B.detach()


def squared_loss(error_B: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Half the squared TD error.

        L = ½ δ²,   ∇L = δ ∇Q

    Source: Sutton and Barto 2018 §9.3; Mnih et al. 2015.
    """
    return 0.5 * error_B.square()


def huber(error_B: Float[Tensor, " B"], *, threshold: float = 1.0) -> Float[Tensor, " B"]:
    """Quadratic near 0 and linear beyond: a TD error whose gradient is clipped.

        L = ½ δ² if |δ| ≤ κ,   else κ (|δ| − ½ κ)

    Source: Huber 1964; the error clipping of Mnih et al. 2015.
    """
    size_B = error_B.abs()
    return torch.where(
        size_B <= threshold, 0.5 * error_B.square(), threshold * (size_B - 0.5 * threshold)
    )


def target_update(
    target: Float[Tensor, "*shape"], online: Float[Tensor, "*shape"], *, rate: float
) -> Float[Tensor, "*shape"]:
    """A weight of the target network, moved towards the online one; rate 1 is a bitwise copy.

        w⁻ ← τ w + (1 − τ) w⁻   (w⁻' = w at τ = 1)

    Source: τ = 1 every so many steps, Mnih et al. 2015; τ < 1, arXiv:1509.02971.
    """
    return online.detach().clone() if rate == 1.0 else torch.lerp(target, online, rate).detach()


def _bootstrap(reward_B: Tensor, value_B: Tensor, terminated_B: Tensor, gamma: float) -> Tensor:
    after_B = torch.where(terminated_B, torch.zeros_like(value_B), value_B)
    return (reward_B + gamma * after_B).detach()


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
