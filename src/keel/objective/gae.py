"""Advantages per token: temporal differences, n-step, Monte Carlo, GAE between them; and the
loss of the value model that they read.

A state is what the model has read before it writes a token, so the recursion steps from one written
token to the next and tool output in between decays nothing. `next_value_N` is V of the state after
the token: 0 after the end of an episode, V of the last observation where an environment cut it off.
`continues_N` is 0 (false) at both kinds of end.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keel.objective.segments import continues, linear_recurrence, segment_sum, spread


def td_error(
    reward_N: Float[Tensor, " N"],
    value_N: Float[Tensor, " N"],
    next_value_N: Float[Tensor, " N"],
    *,
    gamma: float,
) -> Float[Tensor, " N"]:
    """The one-step advantage.

        δ_t = r_t + γ V(s_{t+1}) − V(s_t)

    Source: Sutton and Barto 2018 eq. 6.5; arXiv:1506.02438 §3.
    """
    return reward_N + gamma * next_value_N - value_N


def gae(
    td_error_N: Float[Tensor, " N"],
    continues_N: Float[Tensor, " N"] | Bool[Tensor, " N"],
    *,
    gamma: float,
    lam: float | Float[Tensor, " N"],
) -> Float[Tensor, " N"]:
    """Generalised advantage estimation.

        A_t = Σ_k (γλ)^k δ_{t+k} = δ_t + γ λ_t c_t A_{t+1} = (1−λ) Σ_{k≥1} λ^{k−1} A^k_t

    `lam` may differ from token to token (length-adaptive λ). λ = 0 is TD, λ = 1 Monte Carlo.

    Source: arXiv:1506.02438 eq. 16.
    """
    decay_N = gamma * lam * continues_N.to(td_error_N.dtype)
    return linear_recurrence(decay_N.to(td_error_N.dtype), td_error_N)


def n_step(
    td_error_N: Float[Tensor, " N"],
    continues_N: Float[Tensor, " N"] | Bool[Tensor, " N"],
    *,
    gamma: float,
    steps: int,
) -> Float[Tensor, " N"]:
    """The advantage of looking `steps` tokens ahead, or to the end if that is nearer.

        A^k_t = Σ_{l<k} γ^l δ_{t+l} = r_t + … + γ^{k−1} r_{t+k−1} + γ^k V(s_{t+k}) − V(s_t)

    Source: arXiv:1506.02438 eq. 14; Sutton and Barto 2018 eq. 7.1.
    """
    return linear_recurrence(gamma * continues_N.to(td_error_N.dtype), td_error_N, horizon=steps)


def returns(advantage_N: Float[Tensor, " N"], value_N: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """What the value model is regressed on; of the advantage before any whitening.

        R_t = A_t + V(s_t)

    Source: the λ-return, Sutton and Barto 2018 eq. 12.2; arXiv:2403.17031.
    """
    return advantage_N + value_N


def returns_to_go(
    reward_N: Float[Tensor, " N"], lengths_S: Int[Tensor, " S"], *, gamma: float
) -> Float[Tensor, " N"]:
    """The discounted reward from each token to the end of its sequence.

        U_t = Σ_k γ^k r_{t+k} = r_t + γ c_t U_{t+1}

    A NaN stays within its sequence.

    Source: Sutton and Barto 2018 eq. 3.8.
    """
    return linear_recurrence(gamma * continues(lengths_S).to(reward_N.dtype), reward_N)


def monte_carlo(
    reward_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    value_N: Float[Tensor, " N"] | None = None,
    next_value_N: Float[Tensor, " N"] | None = None,
    *,
    gamma: float,
    baseline: Literal["value", "batch_mean", "none"] = "value",
) -> Float[Tensor, " N"]:
    """The return to go less a baseline.

        A_t = Σ_k γ^k r_{t+k} − b_t,   b_t = V(s_t), or (1/S) Σ_i U_{i,0}, or 0

    Besides the values, γ V of the state after the last action (`next_value_N` there; 0 after an end
    of its own) is part of the last reward. A sequence with NaN among its rewards has none: it
    leaves the batch mean and gets 0.

    Source: Williams 1992 (REINFORCE with a baseline); Sutton and Barto 2018 eq. 13.11.
    """
    absent_S = segment_sum(reward_N.isnan().to(reward_N.dtype), lengths_S) > 0
    absent_N = spread(absent_S.to(reward_N.dtype), lengths_S) > 0
    reward_N = reward_N.masked_fill(absent_N, 0.0)
    if baseline == "value" and next_value_N is not None:
        last_state_N = next_value_N.masked_fill(continues(lengths_S), 0.0)
        reward_N = reward_N + gamma * last_state_N
    return_N = returns_to_go(reward_N, lengths_S, gamma=gamma)
    if baseline == "value":
        if value_N is None:
            raise ValueError('baseline "value" reads value_N: give it, or choose another baseline')
        return (return_N - value_N).masked_fill(absent_N, 0.0)
    if baseline == "none":
        return return_N
    first_N = continues(lengths_S).logical_not().roll(1) & ~absent_N
    start_N = torch.where(first_N, return_N, torch.zeros_like(return_N))
    mean = start_N.sum() / first_N.sum().clamp(min=1)
    return (return_N - mean).masked_fill(absent_N, 0.0)


def value_baseline(
    reward_S: Float[Tensor, " S"],
    value_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
) -> Float[Tensor, " S"]:
    """The reward of the whole sequence less the value of the state that it starts from.

        A_i = R_i − V(q_i),   V(q_i) the value before the first token of sequence i

    0 where the reward is NaN.

    Source: REINFORCE with a learned baseline, Williams 1992; Sutton and Barto 2018 §13.4, with the
    completion as one action.
    """
    first_N = continues(lengths_S).logical_not().roll(1)
    value_S = segment_sum(value_N.masked_fill(~first_N, 0.0), lengths_S)
    return (reward_S - value_S).masked_fill(reward_S.isnan(), 0.0)


def adaptive_lambda(
    lengths_S: Int[Tensor, " S"], *, alpha: float, dtype: torch.dtype = torch.float64
) -> Float[Tensor, " S"]:
    """The λ of a sequence, nearer 1 the longer it is.

        λ_i = max(0, 1 − 1/(α L_i))

    Source: VAPO, arXiv:2504.05118, α = 0.05.
    """
    return (1 - 1 / (alpha * lengths_S.to(dtype))).clamp(min=0.0)


def value_loss(
    value_N: Float[Tensor, " N"],
    old_value_N: Float[Tensor, " N"],
    return_N: Float[Tensor, " N"],
    *,
    clip: float | None,
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    """Half the squared error, pessimistic about steps of more than `clip` from the old value.

        L = ½ max( (V − R)², (clip(V, V_old − c, V_old + c) − R)² )

    Returns L and where the clipped error was the larger one. Without `clip`, L = ½ (V − R)².

    Source: the value clipping of arXiv:2005.12729, in language models arXiv:2403.17031.
    """
    plain_N = (value_N - return_N).square()
    if clip is None:
        return 0.5 * plain_N, torch.zeros_like(plain_N, dtype=torch.bool)
    near_N = torch.clamp(value_N, old_value_N - clip, old_value_N + clip)
    clipped_N = (near_N - return_N).square()
    return 0.5 * torch.maximum(plain_N, clipped_N), clipped_N > plain_N


def explained_variance(value_N: Float[Tensor, " N"], return_N: Float[Tensor, " N"]) -> float:
    """The share of the returns' variance that the values explain.

        EV = 1 − Var(R − V) / Var(R)

    1 is a perfect value model, 0 no better than a constant; 0 where the returns do not vary.

    Source: the coefficient of determination (Wright 1921) with a free intercept; a diagnostic of
    OpenAI Baselines' PPO2.
    """
    spread = return_N.var()
    return float(1 - (return_N - value_N).var() / spread) if spread > 0 else 0.0
