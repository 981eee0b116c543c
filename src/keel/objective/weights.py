"""What each token counts in the loss. Computed once, for a whole optimizer batch, before it is cut.

`lengths_S` holds every sequence of the optimizer batch, masked ones too. The result is float64
unless `dtype` says otherwise: cast it to what it multiplies.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.objective.segments import spread


def sequence_mean(
    lengths_S: Int[Tensor, " S"], *, dtype: torch.dtype = torch.float64
) -> Float[Tensor, " N"]:
    """The mean over sequences of the mean over a sequence's tokens; sums to 1.

        w_n = 1 / (S · L_{i(n)})

    Source: GRPO, arXiv:2402.03300 eq. 3.
    """
    share_S = 1.0 / (lengths_S.numel() * lengths_S.clamp(min=1).to(dtype))
    return spread(share_S, lengths_S)


def token_mean(
    lengths_S: Int[Tensor, " S"], *, dtype: torch.dtype = torch.float64
) -> Float[Tensor, " N"]:
    """The mean over all tokens; sums to 1.

        w_n = 1 / N

    Source: DAPO, arXiv:2503.14476 §3.3.
    """
    total = lengths_S.sum().clamp(min=1).to(dtype)
    return spread((1.0 / total).expand(lengths_S.numel()), lengths_S)


def constant(
    lengths_S: Int[Tensor, " S"], *, constant: int, dtype: torch.dtype = torch.float64
) -> Float[Tensor, " N"]:
    """The sum over a sequence's tokens over a constant, as a mean over sequences; sums to N/(S·C).

        w_n = 1 / (S · C),   C the completion budget

    Source: Dr. GRPO, arXiv:2503.20783 §3.2.
    """
    share = 1.0 / (max(lengths_S.numel(), 1) * constant)
    return spread(_full(lengths_S, share, dtype), lengths_S)


def sequence_sum(
    lengths_S: Int[Tensor, " S"], *, dtype: torch.dtype = torch.float64
) -> Float[Tensor, " N"]:
    """The mean over sequences of the sum over a sequence's tokens; sums to N/S.

        w_n = 1 / S

    Source: the episodic gradient of Williams 1992; RLOO, arXiv:2402.14740 §2.2.
    """
    share = 1.0 / max(lengths_S.numel(), 1)
    return spread(_full(lengths_S, share, dtype), lengths_S)


def _full(lengths_S: Tensor, share: float, dtype: torch.dtype) -> Tensor:
    return torch.full(lengths_S.shape, share, dtype=dtype, device=lengths_S.device)
