"""What one wild token does to the gradient under token, geometric-mean and product ratios.

The tokens of a completion have log-ratios N(−σ²/2, σ²), a little off policy, and in the second case
one token of each completion has a ratio of 20, as where engine and trainer disagree about a token.
A token's gradient is c_n times that of a policy that has not moved. Where the ∇ℓ_n of different
tokens are uncorrelated and of one size, the error of the whole, relative to its norm, is
√(E (c_n − 1)²).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from keel.objective import ratios, segments, surrogates, weights
from studies.common import markdown

LENGTHS = (16, 128, 1_024, 8_192)
SIGMA = 0.02
WILD = math.log(20)
TOKENS = 2**20
"""Of each case, in completions of equal lengths."""
Term = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """A ratio with a surrogate."""

    name: str
    ratio: Term
    surrogate: Term


KINDS = (
    Kind("token, clip 0.2", ratios.token, partial(surrogates.clip, low=0.2, high=0.2)),
    Kind("geometric mean, no clip", ratios.sequence, surrogates.unclipped),
    Kind(
        "geometric mean, clip 3e-4, 4e-4 (GSPO)",
        ratios.sequence,
        partial(surrogates.clip, low=3e-4, high=4e-4),
    ),
    Kind("product, clip 0.2", ratios.sequence_product, partial(surrogates.clip, low=0.2, high=0.2)),
)


def log_ratios(length: int, wild: bool, seed: int = 0) -> Tensor:
    """(S, L): log-ratios of completions of one length."""
    rng = torch.Generator().manual_seed(seed)
    count = TOKENS // length
    noise = torch.randn(count, length, generator=rng, dtype=torch.float64)
    found = SIGMA * noise - SIGMA**2 / 2
    if wild:
        found[torch.arange(count), torch.randint(length, (count,), generator=rng)] = WILD
    return found


def multipliers(kind: Kind, log_ratio: Tensor) -> Tensor:
    """c_n of each token (S, L): its gradient over that on policy, where all log-ratios are 0."""
    return _gradient(kind, log_ratio) / _gradient(kind, torch.zeros_like(log_ratio))


def _gradient(kind: Kind, log_ratio: Tensor) -> Tensor:
    """∂J/∂ℓ_n (S, L); half of the completions have advantage 1, half −1."""
    count, length = log_ratio.shape
    lengths_S = torch.full((count,), length)
    sign_S = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0).double()
    log_prob_N = log_ratio.flatten().clone().requires_grad_()
    ratio_N = kind.ratio(log_prob_N, torch.zeros_like(log_prob_N), lengths_S)
    value_N = kind.surrogate(ratio_N, segments.spread(sign_S, lengths_S), lengths_S)
    (gradient_N,) = torch.autograd.grad(weights.sequence_mean(lengths_S) @ value_N, log_prob_N)
    return gradient_N.reshape(count, length)


def error(multiplier: Tensor) -> float:
    """√(E (c_n − 1)²)."""
    return float((multiplier - 1).square().mean().sqrt())


def lost(multiplier: Tensor) -> float:
    """The share of tokens without a gradient."""
    return float((multiplier == 0).double().mean())


def table(wild: bool) -> str:
    """Error, and share of tokens without a gradient, as Markdown."""
    rows = []
    for kind in KINDS:
        cells = []
        for length in LENGTHS:
            multiplier = multipliers(kind, log_ratios(length, wild))
            cells.append(f"{error(multiplier):.2g}; {100 * lost(multiplier):.2g} %")
        rows.append((kind.name, *cells))
    return markdown(("ratio", *(f"L = {n:,}" for n in LENGTHS)), rows)
