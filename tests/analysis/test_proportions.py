"""Shares and means whose items hang together, by hand and by how often their intervals cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis.statistics import (
    codes,
    mean_interval,
    share_interval,
    wilson_ends,
    wilson_interval,
)


def test_names_become_numbers_by_first_appearance() -> None:
    assert codes(["b", "a", "b", ("a",), None, "a"]).tolist() == [0, 1, 0, 2, 3, 1]
    assert codes(np.array([[7, 2], [7, 9]])).tolist() == [0, 1, 0, 2]
    assert codes(name for name in "aab").tolist() == [0, 0, 1]
    none = codes([])
    assert (none.size, none.dtype) == (0, np.int64)
    # Texts that end alike, differ in their last character, or in a zero that numpy would drop.
    assert codes(["x" * 999 + "a", "x" * 999 + "b", "x", "x\0"]).tolist() == [0, 1, 2, 3]
    assert codes([1, "1"]).tolist() == [0, 1]


# ---------------------------------------------------------------- shares


def test_whole_shares_have_wilsons_interval() -> None:
    found = share_interval([1, 1, 0, 1, 0])
    assert found == wilson_interval(3, 5)
    assert share_interval([0, 0]) == wilson_interval(0, 2)
    assert share_interval([1, 1, 1]) == wilson_interval(3, 3)
    nothing = share_interval([])
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


def test_clustered_intervals_cover_and_plain_ones_do_not() -> None:
    """Forty problems of one to nine answers, right as often as their problem is easy."""
    generator = np.random.default_rng(0)
    covered = {"clustered": 0, "plain": 0}
    truth, runs = 0.0, 400
    for _ in range(runs):
        ease = generator.beta(1.2, 0.6, 40)
        counts = generator.integers(1, 10, 40)
        names = np.repeat(np.arange(40), counts)
        right = generator.random(names.size) < ease[names]
        truth = 1.2 / 1.8
        for kind, clusters in (("clustered", names), ("plain", None)):
            found = share_interval(right, clusters)
            covered[kind] += found.low <= truth <= found.high
    # 95 % with a standard error of 1.1 points; the t interval of 40 clusters is near exact.
    assert 0.92 <= covered["clustered"] / runs <= 0.99
    assert covered["plain"] / runs < 0.85


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
