"""What a policy step maximises, token by token, before the weights.

All have the signature `(log_ratio_N, advantage_N, lengths_S, *, more signals and options) ->
value_N`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.objective.ratios import exponential
from keel.objective.segments import (
    continues,
    linear_recurrence,
    segment_mean,
    spread,
)


def unclipped(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
) -> Float[Tensor, " N"]:
    """The importance-weighted advantage.

        s_n = ρ_n A_n

    Source: PPO's conservative objective, arXiv:1707.06347 eq. 6 and 8.
    """
    return exponential(log_ratio_N) * advantage_N


def clip(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Float[Tensor, " N"]:
    """The pessimistic of the clipped and the unclipped value.

        s_n = min(ρ_n A_n, clip(ρ_n, 1 − ε_low, 1 + ε_high) A_n)
        with dual c, where A_n < 0:  max(s_n, c A_n)

    Source: PPO, arXiv:1707.06347 eq. 7; two bounds: DAPO, arXiv:2503.14476 §3.1; dual clip:
    arXiv:1912.09729 eq. 5, c = 3.
    """
    ratio_N = exponential(log_ratio_N)
    value_N = torch.minimum(
        ratio_N * advantage_N, ratio_N.clamp(1.0 - low, 1.0 + high) * advantage_N
    )
    if dual is None:
        return value_N
    return torch.where(advantage_N < 0, torch.maximum(value_N, dual * advantage_N), value_N)


def sapo(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> Float[Tensor, " N"]:
    """A soft gate in place of the clip; its slope at ρ = 1 is 1.

        s_n = (4/τ) σ(τ (ρ_n − 1)) A_n,   τ = τ_positive if A_n > 0, else τ_negative

    Source: SAPO, arXiv:2511.20347.
    """
    temperature_N = torch.full_like(advantage_N, temperature_negative)
    temperature_N = temperature_N.masked_fill(advantage_N > 0, temperature_positive)
    gate_N = torch.sigmoid(temperature_N * (exponential(log_ratio_N) - 1.0))
    return 4.0 / temperature_N * gate_N * advantage_N


def geometric(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    low: float,
    high: float,
) -> Float[Tensor, " N"]:
    """The geometric mean of token ratios, each clipped in log space before the mean.

        s_i = A_i · exp( (1/L_i) Σ_t sgn·min(sgn·δ_t, sgn·clip(δ_t, −low, high)) )

    with δ the token log-ratio and sgn that of the advantage; every token of the sequence holds s_i.
    Bounds are of the log-ratio: e^−low to e^high. Advantages that differ within a sequence enter by
    their mean, their signs token by token.

    Source: GMPO, arXiv:2507.20673 eq. 4, low = high = 0.4.
    """
    sign_N = advantage_N.sign()
    clipped_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * log_ratio_N.clamp(-low, high))
    ratio_S = exponential(segment_mean(clipped_N, lengths_S))
    value_S = segment_mean(advantage_N, lengths_S) * ratio_S
    return spread(value_S, lengths_S, total=len(advantage_N))


def fipo(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    low: float,
    high: float,
    half_life: float,
    floor: float,
    cap: float,
) -> Float[Tensor, " N"]:
    """The clipped surrogate, with tokens weighed by how much likelier what follows has become.

        s_n = f_n · min(ρ_n A_n, clip(ρ_n, 1 − ε_low, 1 + ε_high) A_n)
        f_n = sg[ clip( exp Σ_{k≥n} γ^{k−n} log ρ_k, floor, cap ) ],   γ = 2^{−1/half_life}

    Source: FIPO, arXiv:2603.19835, half-life 32, factor within 1 and 1.2.
    """
    decay_N = continues(lengths_S).to(log_ratio_N) * 2 ** (-1 / half_life)
    future_N = linear_recurrence(decay_N, log_ratio_N.detach())
    factor_N = exponential(future_N).clamp(floor, cap)
    return clip(log_ratio_N, factor_N * advantage_N, lengths_S, low=low, high=high)


def kimi(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    tau: float,
) -> Float[Tensor, " N"]:
    """The importance-weighted advantage less what the policy has moved already.

        s_n = ρ_n · (A_n − τ sg[log ρ_n])

    Source: the online mirror descent of Kimi k1.5, arXiv:2501.12599.
    """
    return exponential(log_ratio_N) * (advantage_N - tau * log_ratio_N.detach())


def kl_cov(
    log_ratio_N: Float[Tensor, " N"],
    advantage_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    prepared_N: Float[Tensor, " N"],
    coefficient: float,
) -> Float[Tensor, " N"]:
    """The importance-weighted advantage, with a penalty on the tokens of highest covariance.

        s_n = ρ_n A_n − c · κ_n · |log ρ_n|

    `prepared_N` is κ: 1 for the share k of the optimizer batch with the highest covariance, else 0.

    Source: KL-Cov, arXiv:2505.22617, k = 2e-3 and c = 1.
    """
    return exponential(log_ratio_N) * advantage_N - coefficient * prepared_N * log_ratio_N.abs()
