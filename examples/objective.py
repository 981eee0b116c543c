"""An advantage and a surrogate of one's own, of the signature of those in `keel.objective`."""

from __future__ import annotations

from torch import Tensor


def centred(reward_S: Tensor, *, shrink: float = 1.0) -> Tensor:
    """A_i = shrink · (R_i − mean of the batch), one number a sequence."""
    return shrink * (reward_S - reward_S.mean())


def squashed(
    log_ratio_N: Tensor, advantage_N: Tensor, lengths_S: Tensor, *, width: float = 0.2
) -> Tensor:
    """s = (1 + width · tanh((ρ − 1) / width)) · A, one number a token."""
    ratio_N = log_ratio_N.exp()
    return (1 + width * ((ratio_N - 1) / width).tanh()) * advantage_N
