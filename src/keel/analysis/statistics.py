"""Estimates and their intervals, also of items in clusters, such as several answers to one problem.

Every random draw is seeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its interval: `mean` (or another statistic), `low`, `high`, sample size."""

    mean: float
    low: float
    high: float
    n: int

    def as_dict(self) -> dict[str, float | int]:
        return {"mean": self.mean, "low": self.low, "high": self.high, "n": self.n}


def wilson_interval(successes: float, n: int, confidence: float = 0.95) -> Interval:
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


def codes(names: Iterable[Hashable]) -> Codes:
    """Whole numbers from 0 in the place of names, equal for equal names, by first appearance.

    A name may be a whole prompt: numpy would give every row of an array of texts the room of the
    longest.
    """
    if isinstance(names, np.ndarray):
        names = names.reshape(-1).tolist()
    found: dict[Hashable, int] = {}
    return np.fromiter((found.setdefault(name, len(found)) for name in names), dtype=np.int64)


def share_interval(values_S: npt.ArrayLike, clusters: Iterable[Hashable] | None = None) -> Interval:
    """The mean of values in [0, 1], such as right (1), wrong (0) and undecided (½).

        p̂ = Σ x_i / n,   u_i = (x_i − p̂) / n

    Without `clusters` Wilson's interval with p̂ n successes, of which halves are allowed; with them
    `clustered_interval` of the influences u. Of no value nothing is known: NaN in [0, 1].
    """
    x = np.asarray(values_S, dtype=np.float64).reshape(-1)
    if clusters is None or x.size == 0:
        return wilson_interval(float(x.sum()), x.size)
    rate = float(x.mean())
    return clustered_interval(rate, (x - rate) / x.size, clusters, x.size)


def clustered_interval(
    estimate: float,
    influence_S: Array,
    clusters: Iterable[Hashable],
    least: int,
    confidence: float = 0.95,
    degrees: int | None = None,
) -> Interval:
    """Interval of an estimate in [0, 1] from items that depend on each other within a cluster.

        v̂ = G/(G−1) Σ_g (Σ_{i∈g} u_i)²,   n* = min(p̂(1−p̂) / v̂, n)

    with u_i the influence of item i (they sum to 0): the cluster-robust variance, then Wilson's
    interval at the effective size n*, with Student's t of G−1 degrees for z. It stays inside
    [0, 1], draws nothing, and is never narrower than the items on their own would make it. Where
    p̂ is 0 or 1 the variance says nothing: n* is then G, or `least` if that is less; if v̂ is 0
    and p̂ between, it is `least`. One cluster tells nothing: [0, 1].
    With `degrees` t has these, and v̂ no G/(G−1): the caller has put into u_i what stands for it.
    Source: Liang and Zeger 1986, Biometrika 73:13 (variance); Korn and Graubard 1998, Survey
    Methodology 24:193 (effective size), here inside Wilson 1927's interval.
    """
    n = influence_S.size
    index = codes(clusters)
    count = int(index.max(initial=-1)) + 1
    if count < 2:
        return Interval(estimate, 0.0, 1.0, n)
    variance = float((np.bincount(index, weights=influence_S) ** 2).sum())
    if degrees is None:
        variance, degrees = variance * count / (count - 1), count - 1
    spread = estimate * (1 - estimate)
    if spread <= 0:
        size = float(min(count, least))
    else:
        size = min(spread / variance, n) if variance > 0 else float(least)
    low, high = wilson_ends(estimate, size, student_quantile((1 + confidence) / 2, degrees))
    return Interval(estimate, low, high, n)


def mean_interval(
    values: npt.ArrayLike, clusters: Iterable[Hashable] | None = None, confidence: float = 0.95
) -> Interval:
    """Student's t interval of a mean, for values that are independent between clusters.

        x̄ ± t_{(1+confidence)/2, G−1} √v̂,   v̂ = G/(G−1) Σ_g (Σ_{i∈g} (x_i − x̄) / n)²

    Without `clusters` each value stands for itself: v̂ = s²/n, s² = Σ(x − x̄)² / (n − 1). Exact for
    normal values, by the central limit theorem near it for many; for few values far from normal use
    `bootstrap_interval`. One value or cluster has an infinite interval, no value NaN.
    Source: Student 1908, Biometrika 6:1; Liang and Zeger 1986, Biometrika 73:13.
    """
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    if x.size == 0:
        return Interval(math.nan, -math.inf, math.inf, 0)
    mean = float(x.mean())
    index = None if clusters is None else codes(clusters)
    count = x.size if index is None else int(index.max()) + 1
    if count < 2:
        return Interval(mean, -math.inf, math.inf, x.size)
    t = student_quantile((1 + confidence) / 2, count - 1)
    if index is None:
        half = t * float(x.std(ddof=1)) / math.sqrt(x.size)
    else:
        sums = np.bincount(index, weights=(x - mean) / x.size)
        half = t * math.sqrt(count / (count - 1) * float((sums**2).sum()))
    return Interval(mean, mean - half, mean + half, x.size)


def pearson(x_S: npt.ArrayLike, y_S: npt.ArrayLike) -> float | None:
    """Σ (x − x̄)(y − ȳ) / √(Σ (x − x̄)² Σ (y − ȳ)²); None if one of the two is constant."""
    x, y = (np.asarray(values, dtype=np.float64).reshape(-1) for values in (x_S, y_S))
    # The mean of equal values need not be that value to the last place: ask for the range.
    if x.size < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x / np.ptp(x), y / np.ptp(y))[0, 1])


def spearman(x_S: npt.ArrayLike, y_S: npt.ArrayLike) -> float | None:
    """Pearson's correlation of the ranks; None if one of the two is constant.

    Source: Spearman 1904, Am. J. Psychol. 15:72. Ties have the mean of their ranks.
    """
    from scipy.stats import rankdata

    return pearson(rankdata(x_S), rankdata(y_S))


def auc_interval(
    score_S: npt.ArrayLike, positive_S: npt.ArrayLike, clusters: Iterable[Hashable] | None = None
) -> Interval:
    """The chance that a positive scores above a negative, ties ½: the area under the ROC curve.

        A = (Σ_{i positive} rank_i − m(m+1)/2) / (m n)
        u_i = (P(s_i > s⁻) − A) / m · √(G⁺/(G⁺−1))   for a positive i
        u_j = (P(s⁺ > s_j) − A) / n · √(G⁻/(G⁻−1))   for a negative j

    with ranks over all m positives and n negatives, G⁺ and G⁻ the clusters that hold a positive
    and a negative, and 95 % of `clustered_interval` from the influences u, with t of
    min(G⁺, G⁻) − 1 degrees: the rarer side bounds what is known. Without `clusters` each item
    stands for itself. [0, 1] if one side has no more than one cluster, of NaN if it has no
    item. Near 1, with ten or twenty of the rarer side, it covers about 90 %. Source: Mann and
    Whitney 1947, Ann. Math. Stat. 18:50; influences as DeLong et al. 1988, Biometrics 44:837,
    summed over a cluster as Obuchowski 1997, Biometrics 53:567.
    """
    from scipy.stats import rankdata

    scores = np.asarray(score_S, dtype=np.float64).reshape(-1)
    positive = np.asarray(positive_S, dtype=bool).reshape(-1)
    m = int(positive.sum())
    n = scores.size - m
    if m == 0 or n == 0:
        return Interval(math.nan, 0.0, 1.0, scores.size)
    groups = np.arange(scores.size) if clusters is None else codes(clusters)
    # Rank among all, less rank among one's own, is how many of the other side lie below.
    below = rankdata(scores)
    below[positive] -= rankdata(scores[positive])
    below[~positive] -= rankdata(scores[~positive])
    area = float(below[positive].sum()) / (m * n)
    g, h = np.unique(groups[positive]).size, np.unique(groups[~positive]).size
    few = min(g, h)
    if few < 2:
        return Interval(area, 0.0, 1.0, scores.size)
    above = (below / n - area) / m * math.sqrt(g / (g - 1))
    under = (1 - below / m - area) / n * math.sqrt(h / (h - 1))
    influence = np.where(positive, above, under)
    return clustered_interval(area, influence, groups, few, degrees=few - 1)


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
        confidence_level=0.95,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(statistic(x, axis=0)), float(low), float(high), x.size)


def student_quantile(probability: float, degrees: int) -> float:
    """t with P(T ≤ t) = probability, T Student's with `degrees` of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def pass_at_k(right: int, n: int, k: int) -> float:
    """The probability that one of k of n samples is right, if `right` of the n are.

        1 − C(n − right, k) / C(n, k)

    Unbiased for the probability that one of k new samples is. A k above n counts as n.
    Source: Chen et al. 2021, arXiv:2107.03374, equation 1. Raises ValueError for no samples.
    """
    if not 0 <= right <= n or n < 1 or k < 1:
        raise ValueError(f"{right} of {n} samples, k = {k}")
    return 1.0 - math.comb(n - right, min(k, n)) / math.comb(n, min(k, n))


def majority(votes: Iterable[tuple[Hashable | None, bool]]) -> bool:
    """Whether the most frequent answer is right.

    A vote is an answer in its normal form, None for a completion that states none and has no vote,
    and whether it is right. All right answers are one; of equally frequent ones, the first given
    counts. Without votes: False. Source: Wang et al. 2022, arXiv:2203.11171.
    """
    counts: dict[tuple[Hashable, bool], int] = {}
    for answer, right in votes:
        if right or answer is not None:
            key = (None if right else answer, right)
            counts[key] = counts.get(key, 0) + 1
    # max keeps the first of equal ones, and a dict the order in which its keys came.
    return max(counts, key=counts.__getitem__)[1] if counts else False
