from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis.statistics import (
    Interval,
    bootstrap_interval,
    iqm,
    mean_interval,
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


def test_nothing_is_known_of_no_trial() -> None:
    nothing = wilson_interval(0, 0)
    assert math.isnan(nothing.mean)
    assert (nothing.low, nothing.high, nothing.n) == (0.0, 1.0, 0)


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


def test_bootstrap_of_one_value_is_that_value() -> None:
    assert bootstrap_interval([3.0]) == Interval(3.0, 3.0, 3.0, 1)
    assert bootstrap_interval([2.0, 2.0]) == Interval(2.0, 2.0, 2.0, 2)


def test_bootstrap_is_a_function_of_its_seed() -> None:
    values = np.arange(20.0)
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)
