"""Intervals of shares whose items come in clusters: several answers to one problem."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from keel.insight.statistics import Array, Interval, student_quantile


def share_interval(
    values_S: npt.ArrayLike, clusters: npt.ArrayLike | None = None, confidence: float = 0.95
) -> Interval:
    """The mean of values in [0, 1], such as right (1), wrong (0) and undecided (½).

        p̂ = Σ x_i / n,   u_i = (x_i − p̂) / n

    Without `clusters` Wilson's interval with p̂ n successes, of which halves are allowed; with them
    `clustered_interval` of the influences u. Of no value nothing is known: NaN in [0, 1].

    Raises:
        ValueError: a value outside [0, 1], or not as many clusters as values.
    """
    x = np.asarray(values_S, dtype=np.float64).reshape(-1)
    if not ((x >= 0) & (x <= 1)).all():
        raise ValueError("shares are of values in [0, 1]")
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
    clusters: npt.ArrayLike,
    least: int,
    confidence: float = 0.95,
) -> Interval:
    """Interval of an estimate in [0, 1] from items that depend on each other within a cluster.

        v̂ = G/(G−1) Σ_g (Σ_{i∈g} u_i)²,   n* = min(p̂(1−p̂) / v̂, n)

    with u_i the influence of item i (they sum to 0): the cluster-robust variance, then Wilson's
    interval at the effective size n*, with Student's t of G−1 degrees for z. It stays inside
    [0, 1], draws nothing, and is never narrower than the items on their own would make it. Where
    p̂ is 0 or 1 the variance says nothing: n* is then G, or `least` if that is less. One cluster
    tells nothing: [0, 1].
    Source: Liang and Zeger 1986, Biometrika 73:13 (variance); Korn and Graubard 1998, Survey
    Methodology 24:193 (effective size), here inside Wilson 1927's interval.

    Raises:
        ValueError: not as many clusters as items.
    """
    names = np.asarray(clusters).reshape(-1)
    n = influence_S.size
    if names.size != n:
        raise ValueError(f"{names.size} clusters for {n} items")
    _, index = np.unique(names, return_inverse=True)
    count = int(index.max()) + 1
    if count < 2:
        return Interval(estimate, 0.0, 1.0, n)
    variance = count / (count - 1) * float((np.bincount(index, weights=influence_S) ** 2).sum())
    spread = estimate * (1 - estimate)
    if spread <= 0:
        size = float(min(count, least))
    else:
        size = min(spread / variance, n) if variance > 0 else float(n)
    t = student_quantile((1 + confidence) / 2, count - 1)
    low, high = wilson_ends(estimate, size, t)
    return Interval(estimate, low, high, n)


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
