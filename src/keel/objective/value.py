"""The value model's loss."""

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
