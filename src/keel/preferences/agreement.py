"""How far judges agree, beyond what chance would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from keel.analysis.statistics import Array, Interval, codes, share_interval

Statistic = Callable[[Array], Array]
"""From weights (resamples × patterns) to a value each; NaN if it is undefined."""
CONFIDENCE, RESAMPLES, SEED = 0.95, 2000, 0
BLOCK = 64
"""Resamples that are held at a time; each has a count of every cluster."""
NARROWEST = 1e-12
"""Resamples that differ by less than this differ by rounding."""


def cohen_kappa(
    a: Sequence[Hashable], b: Sequence[Hashable], clusters: Iterable[Hashable] | None = None
) -> Interval:
    """Cohen's κ of two judges who sort items into unordered categories.

        κ = (p_o − p_e) / (1 − p_e),   p_o = Σ_k p_kk,   p_e = Σ_k p_k· p_·k

    with p_kl the share of items that the first puts into k and the second into l. If both put every
    item into one and the same category, chance alone agrees fully (p_e = 1) and κ is NaN.
    Source: Cohen 1960, Educ. Psychol. Meas. 20:37. The interval: `_estimate`.

    Raises:
        ValueError: lists of different length.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} verdicts of one judge and {len(b)} of the other")
    both = codes([*a, *b])
    size = int(both.max(initial=-1)) + 1

    def kappa(weights: Array) -> Array:
        joint = weights.reshape(len(weights), size, size)
        total = joint.sum(axis=(1, 2))
        agreed = np.trace(joint, axis1=1, axis2=2)
        chance = (joint.sum(axis=2) * joint.sum(axis=1)).sum(axis=1)
        # Times N²: whole numbers, so that full agreement by chance is found exactly.
        return _ratio(agreed * total - chance, total * total - chance)

    return _estimate(both[: len(a)] * size + both[len(a) :], size**2, kappa, clusters)


def fleiss_kappa(counts: npt.ArrayLike, clusters: Iterable[Hashable] | None = None) -> Interval:
    """Fleiss' κ of n ratings an item; the raters need not be the same from item to item.

        κ = (P̄ − P̄_e) / (1 − P̄_e),   P̄_e = Σ_j p_j²,   p_j = Σ_i n_ij / (N n)
        P̄ = Σ_i Σ_j n_ij (n_ij − 1) / (N n (n − 1))

    `counts` is items × categories, n_ij (`count_votes` makes it). If every rating is one and the
    same category, κ is NaN. Source: Fleiss 1971, Psychol. Bull. 76:378. The interval: `_estimate`.

    Raises:
        ValueError: counts that are not whole, rows of different sums, or fewer than two raters.
    """
    table, raters = _table(counts)
    patterns, found = np.unique(table, axis=0, return_inverse=True)
    pairs = (patterns * (patterns - 1)).sum(axis=1)

    def kappa(weights: Array) -> Array:
        ratings = weights.sum(axis=1) * raters
        chance = ((weights @ patterns) ** 2).sum(axis=1)
        # Times (N n)² (n − 1): whole numbers, as above.
        agreed = (weights @ pairs) * ratings
        return _ratio(agreed - chance * (raters - 1), (ratings**2 - chance) * (raters - 1))

    return _estimate(found.reshape(-1), len(patterns), kappa, clusters)


def pairwise_agreement(
    counts: npt.ArrayLike, clusters: Iterable[Hashable] | None = None
) -> Interval:
    """The share of pairs of raters of one item that agree: P̄ of `fleiss_kappa`."""
    table, raters = _table(counts)
    shares = (table * (table - 1)).sum(axis=1) / (raters * (raters - 1))
    return share_interval(shares, clusters)


def count_votes(votes: Sequence[Sequence[Hashable]]) -> npt.NDArray[np.int64]:
    """Items × categories from each item's votes, the categories in order of appearance."""
    found = codes(vote for item in votes for vote in item)
    counts = np.zeros((len(votes), int(found.max(initial=-1)) + 1), dtype=np.int64)
    items = np.repeat(np.arange(len(votes)), [len(item) for item in votes])
    np.add.at(counts, (items, found), 1)
    return counts


def _table(counts: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], int]:
    given = np.asarray(counts)
    table = given.astype(np.int64)
    if given.ndim != 2 or (table != given).any() or (table < 0).any():
        raise ValueError("counts are items × categories, whole numbers from 0 on")
    sums = np.unique(table.sum(axis=1))
    if len(sums) > 1:
        raise ValueError(f"{sums[0]} ratings of one item and {sums[-1]} of another")
    if len(sums) == 1 and sums[0] < 2:
        raise ValueError("one rating an item: agreement needs two or more")
    return table, int(sums[0]) if len(sums) else 2


def _ratio(above: Array, below: Array) -> Array:
    ratio = np.full(above.shape, math.nan)
    np.divide(above, below, out=ratio, where=below != 0)
    return ratio


def _estimate(
    patterns: npt.NDArray[np.int64],
    count: int,
    statistic: Statistic,
    clusters: Iterable[Hashable] | None,
) -> Interval:
    """A statistic of the items' patterns (of `count` different ones), and of resamples of them.

    The interval is the percentile bootstrap's, over whole clusters (the pairs of one prompt), or
    over items; resamples in which the statistic is undefined are left out. Items matter by how
    often each pattern occurs only, so a resample is a draw of these counts. If the resamples do not
    vary (one cluster, or clusters that all say the same) there is no interval: its ends are NaN.
    Source: Efron 1979, Ann. Stat. 7:1.
    """
    size = len(patterns)
    if size == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    cluster = np.arange(size) if clusters is None else codes(clusters)
    weights = np.zeros((int(cluster.max()) + 1, count))
    np.add.at(weights, (cluster, patterns), 1.0)
    value = float(statistic(weights.sum(axis=0, keepdims=True))[0])
    generator = np.random.default_rng(SEED)
    even = np.full(len(weights), 1 / len(weights))
    found = np.concatenate(
        [
            statistic(
                generator.multinomial(
                    len(weights), even, size=min(BLOCK, RESAMPLES - start)
                ).astype(np.float64)
                @ weights
            )
            for start in range(0, RESAMPLES, BLOCK)
        ]
    )
    found = found[~np.isnan(found)]
    if math.isnan(value) or not len(found) or np.ptp(found) < NARROWEST:
        return Interval(value, math.nan, math.nan, size)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return Interval(value, float(low), float(high), size)
