"""Ranks, correlations and the area under the ROC curve: by definition, by hand, by coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats  # noqa: F401 - the first import takes longer than hypothesis allows
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis.statistics import auc_interval, pearson, spearman, wilson_ends

TRUTH = 0.7602499389065233
"""P(x⁺ > x⁻) of normals one apart: Φ(1/√2)."""


def test_spearman_by_hand() -> None:
    # Ranks 1 2½ 2½ 4 against 1 3 2 4: Σ of products of what lies off 2½ is 4½, of squares 4½ and 5.
    assert spearman([1, 5, 5, 9], [10, 30, 20, 1e9]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 2, 3], [1, 8, 27]) == 1
    assert spearman([1, 2, 3], [3, 2, 1]) == -1


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2, max_size=20))
def test_pearson_against_numpy(rows: list[tuple[int, int]]) -> None:
    x, y = zip(*rows, strict=True)
    found = pearson(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(float(np.corrcoef(x, y)[0, 1]), abs=1e-9)
        assert found == pytest.approx(pearson(y, np.array(x) * 1e200 + 5), abs=1e-9)


# ---------------------------------------------------------------- the area under the curve


def test_a_perfect_auc_is_not_certain() -> None:
    found = auc_interval([3, 4, 1, 2, 0], [True, True, False, False, False])
    assert (found.mean, found.high) == (1, 1)
    # Two positives: no surer than two successes of two, at t of one degree.
    assert found.low == pytest.approx(2 / (2 + 12.706204736432095**2), rel=1e-8)
    # Four positives of two problems are no more.
    found = auc_interval([9, 8, 7, 6, 1, 2, 0], [True] * 4 + [False] * 3, [*"aabb", *"cde"])
    assert found.low == pytest.approx(2 / (2 + 12.706204736432095**2), rel=1e-8)


def delong(score: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """The area and its variance, from every pair of a positive and a negative."""
    win = np.array(
        [
            [1.0 if a > b else 0.5 if a == b else 0.0 for b in score[~positive]]
            for a in score[positive]
        ]
    )
    above, below = win.mean(axis=1), win.mean(axis=0)
    variance = above.var(ddof=1) / len(above) + below.var(ddof=1) / len(below)
    return float(win.mean()), float(variance)


@pytest.mark.parametrize(("m", "t"), [(3, 4.302652729911275), (30, 2.045229642132703)])
def test_the_variance_is_delongs(m: int, t: float) -> None:
    """And t has the degrees of the rarer side, whichever it is."""
    generator = np.random.default_rng(m)
    positive = np.arange(60) < m
    score = np.round(generator.normal(size=60) + 0.5 * positive, 1)
    area, variance = delong(score, positive)
    for found in (auc_interval(score, positive), auc_interval(score, positive, range(60))):
        assert (found.mean, found.n) == (pytest.approx(area, rel=1e-12), 60)
        low, high = wilson_ends(area, area * (1 - area) / variance, t)
        assert (found.low, found.high) == pytest.approx((low, high), rel=1e-8)
    turned = auc_interval(-score, ~positive)
    assert (turned.low, turned.high) == pytest.approx((found.low, found.high), rel=1e-8)


def test_clusters_with_both_sides_have_obuchowskis_variance() -> None:
    generator = np.random.default_rng(4)
    names = np.repeat(np.arange(12), 5)
    positive = np.tile([True, True, False, False, False], 12)
    # What is easy to tell in one problem is hard in another.
    ease = 0.5 + np.repeat(generator.normal(size=12), 5)
    score = generator.normal(size=60) + np.where(positive, ease, -ease)
    win = (score[positive][:, None] > score[~positive]).astype(float)
    area = win.mean()
    ups = [win[names[positive] == g].mean(axis=1).sum() - 2 * area for g in range(12)]
    downs = [win[:, names[~positive] == g].mean(axis=0).sum() - 3 * area for g in range(12)]
    # S₁₀/m + S₀₁/n + 2 S₁₁/(mn), with 24 positives and 36 negatives.
    variance = sum((u / 24 + d / 36) ** 2 for u, d in zip(ups, downs, strict=True)) * 12 / 11
    found = auc_interval(score, positive, names)
    size = area * (1 - area) / variance
    assert size < 60
    low, high = wilson_ends(area, size, 2.200985160082949)  # t of 11 degrees
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-8)


@pytest.mark.parametrize("m", [3, 297])
def test_the_interval_of_a_rare_side_covers(m: int) -> None:
    """Three against 297: the spread of the three is hardly known, and t must say so."""
    generator = np.random.default_rng(5)
    positive = np.arange(300) < m
    covered, runs = 0, 400
    for _ in range(runs):
        found = auc_interval(generator.normal(size=300) + positive, positive)
        covered += found.low <= TRUTH <= found.high
    # 95 % with a standard error of 1.1 points; with three of a kind it comes out 94 to 95 %.
    # Without m/(m−1), and at t of 299 degrees, it was 76 %.
    assert 0.915 <= covered / runs <= 0.985


def test_what_one_item_or_cluster_of_a_side_tells() -> None:
    score, positive = [3, 1, 2, 0], [True, False, False, False]
    found = auc_interval(score, positive)
    assert (found.mean, found.low, found.high, found.n) == (1, 0, 1, 4)
    found = auc_interval([3, 1, 2, 0, 4], [True, False, False, False, True], [*"abcda"])
    assert (found.mean, found.low, found.high, found.n) == (1, 0, 1, 5)
    found = auc_interval([3, 1], [False, False])
    assert math.isnan(found.mean)
    assert (found.low, found.high, found.n) == (0, 1, 2)
    # The same score for all: ½, no variance, and no surer than the three of the rarer side.
    found = auc_interval([1] * 9, [True] * 3 + [False] * 6)
    ends = wilson_ends(0.5, 3, 4.302652729911275)
    assert (found.low, found.high) == pytest.approx(ends, rel=1e-8)
