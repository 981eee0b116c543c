"""Intervals of shares whose items come in clusters: several answers to one problem."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from keel.analysis.statistics import (
    Array,
    Interval,
    mean_interval,
    student_quantile,
    wilson_ends,
)

Codes = npt.NDArray[np.int64]


def codes(names: Iterable[Hashable]) -> Codes:
    """Whole numbers from 0 in the place of names, equal for equal names, by first appearance.

    A name may be a whole prompt: numpy would give every row of an array of texts the room of the
    longest.
    """
    if isinstance(names, np.ndarray):
        names = names.reshape(-1).tolist()
    found: dict[Hashable, int] = {}
    return np.fromiter((found.setdefault(name, len(found)) for name in names), dtype=np.int64)


def share_interval(
    values_S: npt.ArrayLike, clusters: Iterable[Hashable] | None = None, confidence: float = 0.95
) -> Interval:
    """The mean of values in [0, 1], such as right (1), wrong (0) and undecided (½).

        p̂ = Σ x_i / n,   u_i = (x_i − p̂) / n

    Without `clusters` Wilson's interval with p̂ n successes, of which halves are allowed; with them
    `clustered_interval` of the influences u. Of no value nothing is known: NaN in [0, 1].
    """
    x = np.asarray(values_S, dtype=np.float64).reshape(-1)
    if x.size == 0:
        return Interval(math.nan, 0.0, 1.0, 0)
    rate = float(x.mean())
    if clusters is None:
        low, high = wilson_ends(rate, x.size, NormalDist().inv_cdf((1 + confidence) / 2))
        return Interval(rate, low, high, x.size)
    return clustered_interval(rate, (x - rate) / x.size, clusters, x.size, confidence)


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
    p̂ is 0 or 1 the variance says nothing: n* is then G, or `least` if that is less; where v̂ is 0
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


def clustered_mean(
    values_S: npt.ArrayLike, clusters: Iterable[Hashable] | None = None, confidence: float = 0.95
) -> Interval:
    """Interval of a mean of any values that depend on each other within a cluster.

        x̄ ± t_{(1+confidence)/2, G−1} √v̂,   v̂ = G/(G−1) Σ_g (Σ_{i∈g} (x_i − x̄) / n)²

    `mean_interval` where every item is its own cluster, or no clusters are given; one cluster tells
    nothing: it has an infinite interval. Source: Liang and Zeger 1986, Biometrika 73:13.
    """
    x = np.asarray(values_S, dtype=np.float64).reshape(-1)
    if clusters is None or x.size == 0:
        return mean_interval(x, confidence)
    index = codes(clusters)
    count = int(index.max(initial=-1)) + 1
    mean = float(x.mean())
    if count < 2:
        return Interval(mean, -math.inf, math.inf, x.size)
    sums = np.bincount(index, weights=(x - mean) / x.size)
    error = math.sqrt(count / (count - 1) * float((sums**2).sum()))
    half = student_quantile((1 + confidence) / 2, count - 1) * error
    return Interval(mean, mean - half, mean + half, x.size)
