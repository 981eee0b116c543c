"""Weights that correct for an engine whose log-probabilities differ from the trainer's.

They multiply the surrogate alone, carry no gradient, and are exactly 1 where the two agree.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.objective import ratios

Level = Literal["token", "sequence"]


def truncate(
    engine_log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    level: Level,
    cap: float,
) -> Float[Tensor, " N"]:
    """Truncated importance sampling.

        c_n = sg[ min(exp(ℓ_old − ℓ_engine), C) ],   per token, or the product over the sequence

    Source: Ionides 2008; for engines, Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training", C = 2.
    """
    return _mismatch(engine_log_prob_N, old_log_prob_N, lengths_S, level).clamp(max=cap)


def mask(
    engine_log_prob_N: Float[Tensor, " N"],
    old_log_prob_N: Float[Tensor, " N"],
    lengths_S: Int[Tensor, " S"],
    *,
    level: Level,
    floor: float,
    cap: float,
) -> Float[Tensor, " N"]:
    """The importance weight inside a band, 0 outside; the token still counts in the normaliser.

        c_n = sg[ ω_n · 1(floor ≤ ω_n ≤ cap) ],   ω_n = exp(ℓ_old − ℓ_engine)

    Source: IcePop, Ling Team 2025, arXiv:2510.18855 (masked importance sampling).
    """
    weight_N = _mismatch(engine_log_prob_N, old_log_prob_N, lengths_S, level)
    inside_N = (weight_N >= floor) & (weight_N <= cap)
    return torch.where(inside_N, weight_N, torch.zeros_like(weight_N))


def _mismatch(engine_N: Tensor, old_N: Tensor, lengths_S: Tensor, level: Level) -> Tensor:
    ratio = ratios.token if level == "token" else ratios.sequence_product
    return ratios.exponential(ratio(old_N.detach(), engine_N.detach(), lengths_S))
