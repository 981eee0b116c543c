"""What a policy step maximises, token by token, before the weights.

All have the signature `(log_ratio_N, advantage_N, lengths_S, *, options) -> value_N`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.objective.ratios import exponential
from keel.objective.segments import segment_mean, spread


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
