"""Completion lengths: a geometric law cut at the limit, its survival and expected maximum.

One parameter, the end's probability p at each token, follows from the mean. Lengths spread about as
wide as their mean. Real lengths may have two modes; then the tail differs from this one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@lru_cache(maxsize=256)
def end_probability(mean: float, most: int) -> float:
    """The p for which lengths cut at `most` have this mean: Σ_{t<most} (1 − p)^t = mean."""
    if not 1 <= mean <= most:
        raise ValueError(f"a mean of {mean:g} tokens is not between 1 and {most}")
    low, high = 0.0, 1.0
    for _ in range(80):
        p = (low + high) / 2
        whole = most if p < 1e-12 else (1 - (1 - p) ** most) / p
        low, high = (p, high) if whole > mean else (low, p)
    return (low + high) / 2


def survival(mean: float, most: int) -> Array:
    """S_t = (1 − p)^t: the share of sequences that sample a token at t = 0 … most − 1."""
    alive: Array = np.power(1.0 - end_probability(mean, most), np.arange(most, dtype=np.float64))
    return alive


def any_alive(survival_t: Array, rows: float) -> Array:
    """P_t = 1 − (1 − S_t)^rows: the probability that at least one of `rows` samples at t."""
    return 1.0 - (1.0 - np.minimum(survival_t, 1.0)) ** rows


def expected_maximum(mean: float, most: int, rows: float) -> float:
    """E[max of `rows` lengths] = Σ_t P_t, in tokens."""
    return float(any_alive(survival(mean, most), rows).sum())


def tail_share(mean: float, most: int, rows: float) -> float:
    """The idle share of `rows` places that all wait for the longest: 1 − mean / E[max]."""
    return 1.0 - mean / expected_maximum(mean, most, rows)


@lru_cache(maxsize=256)
def mean_position(mean: float, most: int) -> float:
    """The mean place of a token in its completion, and the mean length in flight so far:
    Σ_t t·S_t / Σ_t S_t."""
    alive = survival(mean, most)
    return float((np.arange(most) * alive).sum() / alive.sum())
