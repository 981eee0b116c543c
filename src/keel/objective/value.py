"""The value model's loss, and how well it explains the returns."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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
