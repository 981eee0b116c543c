"""How far judges agree, beyond what chance would give; every draw is seeded.

An interval has NaN ends if there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keel.analysis.statistics import Array, Interval

Statistic = Callable[[Array], Array]
"""From weights (draws × patterns) to a value a draw; NaN if it is undefined."""
BLOCK = 64
"""Resamples that are held at a time; each has a count of every group."""
NARROWEST = 1e-12
"""Resamples that differ by less than this differ by rounding."""


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """How the interval is drawn: items with replacement, or whole groups of them.

    `groups` has a value an item; items of one group (the pairs of one prompt) are drawn together,
    as they do not vary on their own. Percentile interval, source: Efron 1979, Ann. Stat. 7:1.
    One group, or groups that all say the same, give nothing to draw and so no interval: its ends
    are NaN for κ; what a share has instead stands with `percent_agreement`.
    """

    groups: Sequence[Hashable] | None = None
    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 0


ITEMS = Bootstrap()


def percent_agreement(
    a: Sequence[Hashable], b: Sequence[Hashable], bootstrap: Bootstrap = ITEMS
) -> Interval:
    """The share of items on which two judges agree.

        p_o = Σ_i [a_i = b_i] / N

    Where they agree on all or on none of the items the resamples do not vary; the interval is then
    that of G successes of G trials, [(α/2)^(1/G), 1], or its mirror image, with G the number of
    items or groups and 1 − α the confidence. One group tells nothing, nor do groups of one and the
    same share between, nor no item: [0, 1]. Source: Clopper and Pearson 1934, Biometrika 26:404.

    Raises:
        ValueError: lists of different length.
    """
    codes, categories = _two(a, b)
    same = np.array([p // categories == p % categories for p in range(categories**2)], dtype=float)
    return _share(codes, same, bootstrap)


def cohen_kappa(
    a: Sequence[Hashable], b: Sequence[Hashable], bootstrap: Bootstrap = ITEMS
) -> Interval:
    """Cohen's κ of two judges who sort items into unordered categories.

        κ = (p_o − p_e) / (1 − p_e),   p_o = Σ_k p_kk,   p_e = Σ_k p_k· p_·k

    with p_kl the share of items that the first puts into k and the second into l. Source: Cohen
    1960, Educ. Psychol. Meas. 20:37. Where both put every item into one and the same category,
    chance alone agrees fully (p_e = 1) and κ is undefined: NaN. Such resamples are left out.

    Raises:
        ValueError: lists of different length.
    """
    codes, categories = _two(a, b)

    def kappa(weights: Array) -> Array:
        joint = weights.reshape(len(weights), categories, categories)
        total = joint.sum(axis=(1, 2))
        agreed = np.trace(joint, axis1=1, axis2=2)
        chance = (joint.sum(axis=2) * joint.sum(axis=1)).sum(axis=1)
        # Times N²: whole numbers, so that full agreement by chance is found exactly.
        return _ratio(agreed * total - chance, total * total - chance)

    return _estimate(codes, categories**2, kappa, bootstrap)


def fleiss_kappa(counts: npt.ArrayLike, bootstrap: Bootstrap = ITEMS) -> Interval:
    """Fleiss' κ of n ratings an item; the raters need not be the same from item to item.

        κ = (P̄ − P̄_e) / (1 − P̄_e),   P̄_e = Σ_j p_j²,   p_j = Σ_i n_ij / (N n)
        P̄ = Σ_i Σ_j n_ij (n_ij − 1) / (N n (n − 1))

    `counts` is items × categories, n_ij (`count_votes` makes it). Source: Fleiss 1971, Psychol.
    Bull. 76:378. Where every rating is one and the same category κ is undefined: NaN. Such
    resamples are left out.

    Raises:
        ValueError: counts that are not whole, rows of different sums, or fewer than two raters.
    """
    table, raters = _table(counts)
    patterns, codes = np.unique(table, axis=0, return_inverse=True)
    pairs = (patterns * (patterns - 1)).sum(axis=1)

    def kappa(weights: Array) -> Array:
        ratings = weights.sum(axis=1) * raters
        chance = ((weights @ patterns) ** 2).sum(axis=1)
        # Times (N n)² (n − 1): whole numbers, as above.
        agreed = (weights @ pairs) * ratings
        return _ratio(agreed - chance * (raters - 1), (ratings**2 - chance) * (raters - 1))

    return _estimate(codes.reshape(-1), len(patterns), kappa, bootstrap)


def pairwise_agreement(counts: npt.ArrayLike, bootstrap: Bootstrap = ITEMS) -> Interval:
    """The share of pairs of raters of one item that agree: P̄ of `fleiss_kappa`.

    The interval as in `percent_agreement`, if all or no pairs agree.
    """
    table, raters = _table(counts)
    patterns, codes = np.unique(table, axis=0, return_inverse=True)
    share = (patterns * (patterns - 1)).sum(axis=1) / (raters * (raters - 1))
    return _share(codes.reshape(-1), share, bootstrap)


def count_votes(votes: Sequence[Sequence[Hashable]]) -> npt.NDArray[np.int64]:
    """Items × categories from each item's votes, the categories in order of appearance."""
    columns: dict[Hashable, int] = {}
    for item in votes:
        for vote in item:
            columns.setdefault(vote, len(columns))
    counts = np.zeros((len(votes), len(columns)), dtype=np.int64)
    for row, item in enumerate(votes):
        for vote in item:
            counts[row, columns[vote]] += 1
    return counts


def _two(a: Sequence[Hashable], b: Sequence[Hashable]) -> tuple[npt.NDArray[np.int64], int]:
    """Each item's pair of categories as one code, and how many categories there are."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} verdicts of one judge and {len(b)} of the other")
    index = {category: i for i, category in enumerate(dict.fromkeys([*a, *b]))}
    codes = [index[x] * len(index) + index[y] for x, y in zip(a, b, strict=True)]
    return np.array(codes, dtype=np.int64), len(index)


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


def _share(codes: npt.NDArray[np.int64], shares: Array, bootstrap: Bootstrap) -> Interval:
    """The mean of what each item's pattern has of a share in [0, 1]."""
    found = _estimate(codes, len(shares), lambda w: _ratio(w @ shares, w.sum(axis=1)), bootstrap)
    if not math.isnan(found.low):
        return found
    count = found.n if bootstrap.groups is None else len(set(bootstrap.groups))
    edge = ((1 - bootstrap.confidence) / 2) ** (1 / count) if count > 1 else 0.0
    return Interval(
        found.mean,
        edge if found.mean == 1 else 0.0,
        1 - edge if found.mean == 0 else 1.0,
        found.n,
    )


def _estimate(
    codes: npt.NDArray[np.int64], patterns: int, statistic: Statistic, bootstrap: Bootstrap
) -> Interval:
    """The statistic of the items' patterns, and of resamples of them.

    Items matter by how often each pattern occurs only, so a resample is a draw of these counts.
    """
    if not 0 < bootstrap.confidence < 1:
        raise ValueError(f"a confidence of {bootstrap.confidence} is not between 0 and 1")
    if len(codes) == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    groups = range(len(codes)) if bootstrap.groups is None else bootstrap.groups
    if len(groups) != len(codes):
        raise ValueError(f"{len(groups)} groups of {len(codes)} items")
    index = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    weights = np.zeros((len(index), patterns))
    np.add.at(weights, (np.array([index[group] for group in groups]), codes), 1.0)
    value = float(statistic(weights.sum(axis=0, keepdims=True))[0])
    if math.isnan(value):
        return Interval(value, math.nan, math.nan, len(codes))
    found = _resampled(weights, statistic, bootstrap)
    if not len(found) or np.ptp(found) < NARROWEST:
        return Interval(value, math.nan, math.nan, len(codes))
    tail = (1 - bootstrap.confidence) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return Interval(value, float(low), float(high), len(codes))


def _resampled(weights: Array, statistic: Statistic, bootstrap: Bootstrap) -> Array:
    """The statistic of each resample in which it is defined."""
    generator = np.random.default_rng(bootstrap.seed)
    groups = len(weights)
    even = np.full(groups, 1 / groups)
    found = []
    for start in range(0, bootstrap.resamples, BLOCK):
        size = min(BLOCK, bootstrap.resamples - start)
        drawn = generator.multinomial(groups, even, size=size)
        found.append(statistic(drawn.astype(np.float64) @ weights))
    values = np.concatenate(found) if found else np.zeros(0)
    return values[~np.isnan(values)]
