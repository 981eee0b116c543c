"""Estimates and their intervals; every random draw is seeded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Statistic = Callable[[Array], float]


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
        (p̂ + z²/2n ± z √(p̂(1−p̂)/n + z²/4n²)) / (1 + z²/n)

    Unlike p̂ ± z√(p̂(1−p̂)/n) it stays inside [0, 1] and has width at p̂ = 0 and 1.
    Source: Wilson 1927, JASA 22:209. With n = 0 nothing is known: NaN in [0, 1].

    Raises:
        ValueError: successes outside 0…n, or a confidence outside (0, 1).
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    z = NormalDist().inv_cdf(_upper(confidence))
    if n == 0:
        return Interval(math.nan, 0.0, 1.0, 0)
    rate = successes / n
    low, high = wilson_ends(rate, n, z)
    return Interval(rate, low, high, n)


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
    x = _flat(values)
    upper = _upper(confidence)
    if x.size == 0:
        return Interval(math.nan, -math.inf, math.inf, 0)
    mean = float(x.mean())
    if x.size == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = student_quantile(upper, x.size - 1) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return Interval(mean, mean - half, mean + half, int(x.size))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of k completions is right, estimated without bias from n ≥ k.

        pass@k = 1 − C(n − c, k) / C(n, k)

    Source: Chen et al. 2021 [2107.03374] eq. 1. Average it over prompts. (1 − (1 − c/n)^k, which
    looks the same, is too low.)

    Raises:
        ValueError: k outside 1…n, or correct outside 0…n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} completions (and k of at least 1), not {n}")
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} correct of {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean(values: Array) -> float:
    """Σ x / n over all values."""
    return float(np.mean(values))


def iqm(values: npt.ArrayLike) -> float:
    """Interquartile mean: the mean of the middle half of all values.

        mean of x_(⌊n/4⌋+1) … x_(n−⌊n/4⌋)

    Less swayed by outliers than the mean, less wasteful than the median.
    Source: Agarwal et al. 2021 [2108.13264] §4.3 (the 25 % trimmed mean, as rliable takes it).
    """
    x = np.sort(_flat(values))
    if x.size == 0:
        return math.nan
    cut = x.size // 4
    return float(x[cut : x.size - cut].mean())


def bootstrap_interval(
    values: npt.ArrayLike,
    statistic: Statistic = mean,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of a statistic of independent values.

        [q_{α/2}, q_{1−α/2}] of T(x*) over resamples x* drawn from x with replacement

    Source: Efron 1979, Ann. Stat. 7:1. A function of its arguments, seed included.
    """
    x = _flat(values)
    return stratified_bootstrap(x[:, None], statistic, confidence, resamples, seed)


def stratified_bootstrap(
    scores: npt.ArrayLike,
    statistic: Statistic = iqm,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap over runs, each task drawn for itself.

    `scores` has a row a run (seed) and a column a task; in a resample every column draws its own
    rows with replacement, so that each task keeps its weight. `n` is the number of runs.
    Source: Agarwal et al. 2021 [2108.13264] §4.2.

    Raises:
        ValueError: scores are not two-dimensional.
    """
    x = np.asarray(scores, dtype=np.float64)
    if x.ndim != 2:
        raise ValueError(f"scores have {x.ndim} dimensions: give runs × tasks")
    upper = _upper(confidence)
    runs, tasks = x.shape
    if x.size == 0:
        return Interval(math.nan, -math.inf, math.inf, runs)
    generator = np.random.default_rng(seed)
    columns = np.arange(tasks)
    drawn = np.array(
        [
            statistic(x[generator.integers(0, runs, size=(runs, tasks)), columns])
            for _ in range(resamples)
        ]
    )
    low, high = np.quantile(drawn, [1 - upper, upper])
    return Interval(float(statistic(x)), float(low), float(high), runs)


# ---------------------------------------------------------------- Student's t


def student_quantile(probability: float, degrees: int) -> float:
    """t with P(T ≤ t) = probability, T Student's with `degrees` of freedom.

    Raises:
        ValueError: a probability outside (0, 1) or no degree of freedom.
    """
    from scipy.special import stdtrit

    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"quantile {probability} of Student's t with {degrees} degrees")
    return float(stdtrit(degrees, probability))


def _flat(values: npt.ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _upper(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence of {confidence} is not between 0 and 1")
    return (1 + confidence) / 2
