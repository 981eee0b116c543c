"""Estimates and their intervals; every random draw is seeded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its interval: `mean` (or another statistic), `low`, `high`, sample size."""

    mean: float
    low: float
    high: float
    n: int

    def as_dict(self) -> dict[str, float | int]:
        return {"mean": self.mean, "low": self.low, "high": self.high, "n": self.n}


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a success rate.

        p̂ = successes / n,   z = Φ⁻¹((1 + confidence) / 2)

    Its ends are those of `wilson_ends`. Unlike p̂ ± z√(p̂(1−p̂)/n) it stays inside [0, 1] and has
    width at p̂ = 0 and 1. With n = 0 nothing is known: NaN in [0, 1].
    """
    if n == 0:
        return Interval(math.nan, 0.0, 1.0, 0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return Interval(successes / n, *wilson_ends(successes / n, n, z), n)


def wilson_ends(rate: float, size: float, z: float) -> tuple[float, float]:
    """Where |p̂ − p| = z √(p(1−p)/n), for a rate and a size that need not be whole.

        (p̂ + z²/2n ± z √(p̂(1−p̂)/n + z²/4n²)) / (1 + z²/n)

    Source: Wilson 1927, JASA 22:209.
    """
    centre = rate + z * z / (2 * size)
    half = z * math.sqrt(rate * (1 - rate) / size + z * z / (4 * size * size))
    scale = 1 + z * z / size
    # At the ends the formula gives exactly 0 or 1, which rounding must not spoil.
    low = 0.0 if rate == 0 else max(0.0, (centre - half) / scale)
    high = 1.0 if rate == 1 else min(1.0, (centre + half) / scale)
    return low, high


def mean_interval(values: npt.ArrayLike, confidence: float = 0.95) -> Interval:
    """Student's t interval of a mean, for independent values.

        x̄ ± t_{(1+confidence)/2, n−1} · s / √n,   s² = Σ(x − x̄)² / (n − 1)

    Source: Student 1908, Biometrika 6:1. Exact for normal values, by the central limit theorem
    near it for many; for few values far from normal use `bootstrap_interval`. One value has an
    infinite interval, none NaN.
    """
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    if x.size < 2:
        mean = float(x[0]) if x.size else math.nan
        return Interval(mean, -math.inf, math.inf, x.size)
    mean = float(x.mean())
    t = student_quantile((1 + confidence) / 2, x.size - 1)
    half = t * float(x.std(ddof=1)) / math.sqrt(x.size)
    return Interval(mean, mean - half, mean + half, x.size)


def iqm(values: npt.ArrayLike, axis: int | None = None) -> Any:
    """Interquartile mean: the mean of the middle half, of all values or along an axis.

        mean of x_(⌊n/4⌋+1) … x_(n−⌊n/4⌋)

    Less swayed by outliers than the mean, less wasteful than the median.
    Source: Agarwal et al. 2021 [2108.13264] §4.3 (the 25 % trimmed mean, as rliable takes it).
    """
    x = np.asarray(values, dtype=np.float64)
    ordered = np.sort(x.reshape(-1) if axis is None else np.moveaxis(x, axis, 0), axis=0)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut].mean(axis=0) if len(ordered) else math.nan


def bootstrap_interval(
    values: npt.ArrayLike,
    statistic: Callable[..., Any] = np.mean,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of a statistic of independent values, which takes an `axis`.

        [q_{α/2}, q_{1−α/2}] of T(x*) over resamples x* drawn from x with replacement

    Source: Efron 1979, Ann. Stat. 7:1; `scipy.stats.bootstrap`. A function of its arguments, seed
    included. One value is its own interval; of none nothing is known.
    """
    from scipy.stats import bootstrap

    x = np.asarray(values, dtype=np.float64).reshape(-1)
    if x.size < 2:
        ends = (float(x[0]),) * 2 if x.size else (-math.inf, math.inf)
        return Interval(float(x[0]) if x.size else math.nan, *ends, x.size)
    low, high = bootstrap(
        (x,),
        statistic,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(statistic(x, axis=0)), float(low), float(high), x.size)


def student_quantile(probability: float, degrees: int) -> float:
    """t with P(T ≤ t) = probability, T Student's with `degrees` of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))
