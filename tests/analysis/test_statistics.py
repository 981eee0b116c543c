"""Intervals of shares, means and areas: by hand, by definition, and by how often they cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats  # noqa: F401 - the first import takes longer than hypothesis allows
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis.statistics import (
    Interval,
    auc_interval,
    bootstrap_interval,
    iqm,
    mean_interval,
    pearson,
    share_interval,
    spearman,
    wilson_ends,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3; to its four decimals.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_newcombes_table(successes: int, n: int, low: float, high: float) -> None:
    found = wilson_interval(successes, n)
    assert found.mean == successes / n
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@given(st.integers(1, 300), st.data())
def test_wilson_ends_solve_the_score_equation(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    found = wilson_interval(successes, n, confidence=0.9)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    z = 1.6448536269514722
    for end in (found.low, found.high):
        # |p̂ − p| = z √(p(1−p)/n) at both ends; rounding of a few units in the last place, squared
        # out of a root, leaves 1e-12.
        left, right = (found.mean - end) ** 2, z * z * end * (1 - end) / n
        assert left == pytest.approx(right, abs=1e-12)
    mirror = wilson_interval(n - successes, n, confidence=0.9)
    assert mirror.low == pytest.approx(1 - found.high, abs=1e-12)


def test_mean_interval_by_hand() -> None:
    found = mean_interval([1, 2, 3, 4, 5])
    half = 2.7764451051977987 * math.sqrt(2.5) / math.sqrt(5)
    assert found.mean == 3
    assert found.high - found.mean == pytest.approx(half, rel=1e-9)
    assert found.mean - found.low == pytest.approx(half, rel=1e-9)
    assert mean_interval([7.0]) == Interval(7.0, -math.inf, math.inf, 1)
    assert math.isnan(mean_interval([]).mean)
    assert mean_interval([2.0, 2.0]) == Interval(2.0, 2.0, 2.0, 2)


def test_iqm_drops_a_quarter_at_each_end() -> None:
    assert iqm([100.0, 1, 2, 3, 4, 5, 6, -50]) == (2 + 3 + 4 + 5) / 4
    # With 6 values ⌊6/4⌋ = 1 goes at each end, as scipy.stats.trim_mean(x, 0.25) has it.
    table = np.array([[0.0, 1, 2], [3, 4, 9]])
    assert iqm(table) == (1 + 2 + 3 + 4) / 4
    assert iqm(table, axis=1).tolist() == [1.0, 16 / 3]
    assert iqm([5.0]) == 5.0
    assert math.isnan(iqm([]))


def test_bootstrap_of_a_mean_agrees_with_theory() -> None:
    values = np.random.default_rng(1).normal(size=400)
    found = bootstrap_interval(values, resamples=4000)
    half = 1.96 * values.std() / math.sqrt(400)
    # The quantiles of 4000 resamples wander by about 3 % of the half width (one σ): 4σ.
    assert found.high - found.mean == pytest.approx(half, rel=0.12)
    assert found.mean - found.low == pytest.approx(half, rel=0.12)
    assert found.n == 400
    assert found.mean == pytest.approx(values.mean())


def test_bootstrap_is_a_function_of_its_seed() -> None:
    values = np.arange(20.0)
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


# ---------------------------------------------------------------- shares


def test_whole_shares_have_wilsons_interval() -> None:
    found = share_interval([1, 1, 0, 1, 0])
    assert found == wilson_interval(3, 5)
    assert share_interval([0, 0]) == wilson_interval(0, 2)
    assert share_interval([1, 1, 1]) == wilson_interval(3, 3)
    for nothing in (share_interval([]), wilson_interval(0, 0)):
        assert math.isnan(nothing.mean)
        assert (nothing.low, nothing.high, nothing.n) == (0, 1, 0)


def test_a_clustered_share_by_hand() -> None:
    # p̂ = 4/6; clusters' sums of x − p̂: 2 − 4/3, 1 − 4/3, 1 − 4/3.
    found = share_interval([1, 1, 1, 0, 0, 1], ["a", "a", "b", "b", "c", "c"])
    variance = 3 / 2 * ((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 36
    size = (2 / 3 * 1 / 3) / variance
    t = 4.302652729911275  # of 2 degrees, in any table
    low, high = wilson_ends(2 / 3, min(size, 6), t)
    assert size > 6  # so the six stand for six and no more
    assert (found.mean, found.n) == (pytest.approx(2 / 3), 6)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-8)
    # Now clusters that agree within: two answers to a problem are worth one.
    found = share_interval([1, 1, 0, 0, 1, 1, 0, 0], [1, 1, 2, 2, 3, 3, 4, 4])
    size = 0.25 / (4 / 3 * 4 * (1 / 8) ** 2)
    assert size == 3
    t = 3.182446305284263  # of 3 degrees
    assert (found.low, found.high) == pytest.approx(wilson_ends(0.5, 3, t), rel=1e-8)


def test_clusters_that_tell_nothing() -> None:
    one = share_interval([1, 0, 1], [7, 7, 7])
    assert (one.low, one.high) == (0, 1)
    # All right: as many as there are clusters, not answers.
    found = share_interval([1] * 8, [1, 1, 2, 2, 3, 3, 4, 4])
    assert (found.low, found.high) == (pytest.approx(4 / (4 + 3.182446305284263**2), rel=1e-8), 1)
    # Every cluster alike: no variance between them, and yet no more than the items.
    alike = share_interval([1, 0] * 4, [1, 1, 2, 2, 3, 3, 4, 4])
    assert alike.low == pytest.approx(wilson_ends(0.5, 8, 3.182446305284263)[0], rel=1e-8)


# ---------------------------------------------------------------- means


def test_a_clustered_mean_by_hand() -> None:
    # x̄ = 1; clusters' sums of x − x̄: 2, −3, 1.
    found = mean_interval([1, 3, -1, 0, 2], ["a", "a", "b", "b", "c"])
    error = math.sqrt(3 / 2 * (4 + 9 + 1)) / 5
    half = 4.302652729911275 * error  # t of 2 degrees
    assert (found.mean, found.n) == (1, 5)
    assert (found.low, found.high) == pytest.approx((1 - half, 1 + half), rel=1e-9)
    narrow = mean_interval([1, 3, -1, 0, 2], ["a", "a", "b", "b", "c"], confidence=0.5)
    # The quartile of t with 2 degrees is √(2/3).
    assert narrow.high == pytest.approx(1 + math.sqrt(2 / 3) * error, rel=1e-9)


@given(st.lists(st.floats(-9, 9), min_size=2, max_size=20))
def test_a_mean_of_items_on_their_own_is_students(values: list[float]) -> None:
    own, plain = mean_interval(values, range(len(values))), mean_interval(values)
    assert mean_interval(values) == plain
    assert own.mean == pytest.approx(plain.mean)
    assert (own.low, own.high) == pytest.approx((plain.low, plain.high), rel=1e-9, abs=1e-9)


def test_a_mean_of_one_cluster_is_not_known() -> None:
    found = mean_interval([1, 2, 3], ["a"] * 3)
    assert (found.mean, found.low, found.high, found.n) == (2, -math.inf, math.inf, 3)
    assert math.isnan(mean_interval([], []).mean)


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
