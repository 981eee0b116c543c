"""Surrogates that recipes of tests name."""

from __future__ import annotations

import math

from torch import Tensor

LIMIT = 1e-4
"""Above the rounding of a log-ratio, and below what one optimizer step moves it by."""


def bounded(log_ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
    """NaN wherever the policy is no longer the one that sampled."""
    moved_N = (log_ratio_N.detach().abs() > LIMIT) & (advantage_N != 0)
    return (log_ratio_N.exp() * advantage_N).masked_fill(moved_N, math.nan)
