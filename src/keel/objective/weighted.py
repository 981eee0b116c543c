"""Surrogates that weigh the gradient of the log-probability: REINFORCE and its relatives.

Of the signature of those in `surrogates`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.objective.ratios import LIMIT, exponential
from keel.objective.segments import segment_sum, spread


def log_prob(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
) -> Float[Tensor, " N"]:
    """REINFORCE: the log-probability (ratio "none") times the advantage.

        s_n = A_n ℓ_n

    Source: Williams 1992.
    """
    return advantage_N * log_ratio_N


def cispo(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    log_prob_N: Float[Tensor, " N"],
    cap: float,
    floor: float = 0.0,
) -> Float[Tensor, " N"]:
    """REINFORCE under a clipped importance weight: no token loses its gradient.

        s_n = sg[clip(ρ_n, floor, cap)] · A_n · ℓ_n

    `floor` and `cap` are absolute bounds of the ratio (ε of verl: 1 − ε_low and 1 + ε_high).

    Source: CISPO, arXiv:2506.13585 eq. 4-5.
    """
    weight_N = exponential(log_ratio_N.detach()).clamp(floor, cap)
    return weight_N * advantage_N * log_prob_N


def vespo(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    log_prob_N: Float[Tensor, " N"],
    power_positive: float,
    rate_positive: float,
    power_negative: float,
    rate_negative: float,
) -> Float[Tensor, " N"]:
    """REINFORCE weighed by a gamma kernel of the completion's ratio, 1 and highest near W = 1.

        s_n = sg[ W^k e^{λ (1 − W)} ] · A_n · ℓ_n,   W = clip(Π_t ρ_t, 1e-8, e^20)

    with (k, λ) of A_n ≥ 0 or of A_n < 0.

    Source: VESPO, arXiv:2602.10693, (2, 3) and (3, 2).
    """
    log_S = segment_sum(log_ratio_N.detach(), lengths_S)
    log_N = spread(log_S.clamp(math.log(1e-8), LIMIT), lengths_S, total=len(log_ratio_N))
    good_N = advantage_N >= 0
    power_N = torch.full_like(log_N, power_negative).masked_fill(good_N, power_positive)
    rate_N = torch.full_like(log_N, rate_negative).masked_fill(good_N, rate_positive)
    weight_N = (power_N * log_N + rate_N * (1 - log_N.exp())).exp()
    return weight_N * advantage_N * log_prob_N


def topr(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    log_prob_N: Float[Tensor, " N"],
    outcome_S: Float[Tensor, " S"],
    threshold: float,
) -> Float[Tensor, " N"]:
    """REINFORCE of the right answers, and of the wrong ones as far as the policy still gives them.

        s_n = A_n ℓ_n where R_i > threshold,   sg[ min(Π_t ρ_t, 1) ] · A_n ℓ_n elsewhere

    Source: TOPR, arXiv:2503.14286.
    """
    weight_S = exponential(segment_sum(log_ratio_N.detach(), lengths_S)).clamp(max=1.0)
    weight_S = torch.where(outcome_S > threshold, torch.ones_like(weight_S), weight_S)
    weight_N = spread(weight_S, lengths_S, total=len(log_ratio_N))
    return weight_N * advantage_N * log_prob_N


def dro(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    log_prob_N: Float[Tensor, " N"],
    beta: float,
) -> Float[Tensor, " N"]:
    """REINFORCE with a quadratic penalty on the log-ratio.

        s_n = A_n ℓ_n − (β/2) (log ρ_n)²

    Source: DRO, arXiv:2405.19107, as verl has it for tokens.
    """
    return advantage_N * log_prob_N - beta / 2 * log_ratio_N.square()
