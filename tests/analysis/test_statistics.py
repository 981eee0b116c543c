from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis import statistics
from keel.analysis.statistics import (
    Interval,
    bootstrap_interval,
    iqm,
    mean_interval,
    pass_at_k,
    stratified_bootstrap,
    student_quantile,
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


def test_wilson_of_nothing_and_of_nonsense() -> None:
    nothing = wilson_interval(0, 0)
    assert math.isnan(nothing.mean)
    assert (nothing.low, nothing.high, nothing.n) == (0.0, 1.0, 0)
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson_interval(3, 2)
    with pytest.raises(ValueError, match="confidence"):
        wilson_interval(1, 2, confidence=95)


@pytest.mark.parametrize(
    ("degrees", "at_975", "at_995"),
    [
        # Tables of Student's t, as printed to three decimals in any statistics book.
        (1, 12.706, 63.657),
        (2, 4.303, 9.925),
        (4, 2.776, 4.604),
        (10, 2.228, 3.169),
        (30, 2.042, 2.750),
        (120, 1.980, 2.617),
        (1_000_000, 1.960, 2.576),
    ],
)
def test_student_quantiles_are_those_of_the_tables(
    degrees: int, at_975: float, at_995: float
) -> None:
    assert round(student_quantile(0.975, degrees), 3) == at_975
    assert round(student_quantile(0.995, degrees), 3) == at_995
    assert student_quantile(0.025, degrees) == pytest.approx(-student_quantile(0.975, degrees))


@given(st.floats(0.51, 0.9999))
def test_student_quantiles_in_closed_form(p: float) -> None:
    # One degree: Cauchy. Two: (2p−1) √(2 / (4p(1−p))). 1 − p loses up to 4 digits: 1e-9.
    assert student_quantile(p, 1) == pytest.approx(
        math.tan(math.pi * (p - 0.5)), rel=1e-9, abs=1e-9
    )
    two = (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    assert student_quantile(p, 2) == pytest.approx(two, rel=1e-9, abs=1e-9)


def test_mean_interval_by_hand() -> None:
    found = mean_interval([1, 2, 3, 4, 5])
    half = 2.7764451051977987 * math.sqrt(2.5) / math.sqrt(5)
    assert found.mean == 3
    assert found.high - found.mean == pytest.approx(half, rel=1e-9)
    assert found.mean - found.low == pytest.approx(half, rel=1e-9)
    assert mean_interval([7.0]) == Interval(7.0, -math.inf, math.inf, 1)
    assert math.isnan(mean_interval([]).mean)
    assert mean_interval([2.0, 2.0]) == Interval(2.0, 2.0, 2.0, 2)


def test_mean_interval_covers_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    draws = generator.normal(3.0, 2.0, size=(1000, 5))
    inside = [(i := mean_interval(row)).low <= 3.0 <= i.high for row in draws]
    # 0.95 ± 4σ, σ = √(.95 · .05 / 1000) = 0.0069; a normal quantile in t's place covers 0.88.
    assert abs(np.mean(inside) - 0.95) < 0.0276


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one(
    n: int, data: st.DataObject
) -> None:
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    share = sum(any(i < correct for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_stays_exact_for_many_samples_and_refuses_nonsense() -> None:
    assert pass_at_k(1000, 1, 100) == pytest.approx(0.1, abs=1e-12)
    assert pass_at_k(5, 5, 1) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0
    for n, correct, k in ((3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)):
        with pytest.raises(ValueError, match=r"pass@|correct"):
            pass_at_k(n, correct, k)


def test_iqm_drops_a_quarter_at_each_end() -> None:
    assert iqm([100.0, 1, 2, 3, 4, 5, 6, -50]) == (2 + 3 + 4 + 5) / 4
    # With 6 values ⌊6/4⌋ = 1 goes at each end, as scipy.stats.trim_mean(x, 0.25) has it.
    assert iqm(np.array([[0.0, 1, 2], [3, 4, 9]])) == (1 + 2 + 3 + 4) / 4
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


def test_strata_keep_their_weight() -> None:
    # Two tasks far apart, no spread within: each resample holds each task as often.
    scores = np.tile([0.0, 1.0], (5, 1))
    found = stratified_bootstrap(scores, statistics.mean)
    assert found == Interval(0.5, 0.5, 0.5, 5)
    mixed = bootstrap_interval(scores)
    assert mixed.low < 0.5 < mixed.high
    assert mixed.n == 10
    with pytest.raises(ValueError, match="runs × tasks"):
        stratified_bootstrap([1.0, 2.0])


def test_strata_are_drawn_each_for_itself() -> None:
    # Columns that cancel row by row vary only if their rows are drawn apart.
    column = np.random.default_rng(0).normal(size=8)
    found = stratified_bootstrap(np.stack([column, -column], axis=1), statistics.mean)
    assert found.mean == pytest.approx(0.0, abs=1e-15)
    assert found.high - found.low > 0.3


def test_an_interval_is_what_run_json_holds() -> None:
    assert Interval(0.5, 0.25, 0.75, 4).as_dict() == {
        "mean": 0.5,
        "low": 0.25,
        "high": 0.75,
        "n": 4,
    }
