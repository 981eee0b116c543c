"""Mean 0 and variance 1 over the tokens of an optimizer batch."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def whiten(
    x_N: Float[Tensor, " N"],
    present_N: Bool[Tensor, " N"] | None = None,
    *,
    epsilon: float = 1e-8,
) -> Float[Tensor, " N"]:
    """The numbers less their mean, over the root of their unbiased variance.

        y_n = (x_n − μ) / √(σ² + ε),   μ = (1/N) Σ x_n,   σ² = 1/(N−1) Σ (x_n − μ)²

    Over all tokens of all ranks: hand in the whole optimizer batch. Where `present_N` is false a
    number leaves μ and σ² and becomes 0. A single number becomes 0.

    Source: advantage normalisation, Engstrom et al. 2020 (arXiv:2005.12729); ε within the root as
    in arXiv:2403.17031.
    """
    present_N = torch.ones_like(x_N, dtype=torch.bool) if present_N is None else present_N
    zero = torch.zeros_like(x_N)
    count = present_N.sum().clamp(min=1)
    mean = torch.where(present_N, x_N, zero).sum() / count
    centred_N = torch.where(present_N, x_N - mean, zero)
    variance = centred_N.square().sum() / (count - 1).clamp(min=1)
    return centred_N / (variance + epsilon).sqrt()
