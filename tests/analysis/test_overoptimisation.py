"""The law of over-optimisation: what it was made with comes out again."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis.overoptimisation import (
    OverOptimisation,
    distance,
    fit_overoptimisation,
    optimisation_of,
)


def law(d: float, start: float, alpha: float, beta: float) -> float:
    return start + (d * (alpha - beta * math.log(d)) if d > 0 else 0.0)


@given(
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(-1, 1),
    st.lists(st.integers(0, 400), min_size=4, max_size=12, unique=True),
)
def test_the_law_is_found_again(start: float, alpha: float, beta: float, at: list[int]) -> None:
    d = [k / 20 for k in at]
    found = fit_overoptimisation(d, [law(x, start, alpha, beta) for x in d])
    assert found is not None
    assert found.n == len(d)
    # The condition of the three columns at such distances is below 1e5, squared nowhere.
    assert (found.start, found.alpha, found.beta) == pytest.approx((start, alpha, beta), abs=1e-8)
    assert found.error == pytest.approx(0, abs=1e-10)
    assert found.at(d) == pytest.approx([law(x, start, alpha, beta) for x in d], abs=1e-9)


def test_noise_is_met_by_least_squares() -> None:
    generator = np.random.default_rng(0)
    d = np.linspace(0, 6, 80)
    gold = np.array([law(x, 0.3, 0.25, 0.13) for x in d]) + generator.normal(0, 0.05, 80)
    found = fit_overoptimisation(d, gold)
    assert found is not None

    def squares(start: float, alpha: float, beta: float) -> float:
        return sum((g - law(x, start, alpha, beta)) ** 2 for x, g in zip(d, gold, strict=True))

    least = squares(found.start, found.alpha, found.beta)
    assert found.error == pytest.approx(math.sqrt(least / 80), rel=1e-9)
    for step in (1e-3, -1e-3):
        assert squares(found.start + step, found.alpha, found.beta) > least
        assert squares(found.start, found.alpha + step, found.beta) > least
        assert squares(found.start, found.alpha, found.beta + step) > least
    assert found.peak == pytest.approx(math.exp(0.25 / 0.13 - 1), rel=0.2)


def test_the_peak_is_where_the_law_is_highest() -> None:
    found = OverOptimisation(0.5, 0.25, 0.13, 0.0, 10)
    assert found.peak is not None
    around = found.at([found.peak - 1e-3, found.peak, found.peak + 1e-3])
    assert around[1] > max(around[0], around[2])
    assert around[1] == pytest.approx(0.5 + 0.13 * found.peak, rel=1e-12)
    assert found.at([0.0]).tolist() == [0.5]
    assert OverOptimisation(0, 1, 0.0, 0, 9).peak is None
    assert OverOptimisation(0, 1, -0.1, 0, 9).peak is None
    assert OverOptimisation(0, 1, 1e-9, 0, 9).peak is None
    assert found.as_dict() == {
        "start": 0.5,
        "alpha": 0.25,
        "beta": 0.13,
        "error": 0.0,
        "n": 10,
        "peak": found.peak,
    }


def test_too_few_points_determine_nothing() -> None:
    assert fit_overoptimisation([], []) is None
    assert fit_overoptimisation([0, 1, 2], [0, 1, 2]) is None
    assert fit_overoptimisation([0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5]) is None
    assert fit_overoptimisation([0, 1, 2, 3], [0, 1, 2, math.nan]) is None
    assert fit_overoptimisation([0, 1, 2, math.inf], [0, 1, 2, 3]) is None
    assert fit_overoptimisation([0, 1, 2, 3], [0, 1, 2, 3]) is not None
    # Four distances that differ by rounding alone.
    close = 1 + np.arange(4) * 1e-15
    assert fit_overoptimisation(close, [0, 1, 2, 3]) is None
    kept = fit_overoptimisation([0, 1, 2, 3, 4], [0, 1, math.nan, 3, 4])
    assert kept is not None
    assert kept.n == 4


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards for 1 distances"):
        fit_overoptimisation([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least 0"):
        fit_overoptimisation([-1.0], [1.0])


def test_distance_is_the_root_of_kl() -> None:
    assert distance([0, 4, 2.25, -0.01]).tolist() == [0, 2, 1.5, 0]


def test_a_run_becomes_points() -> None:
    """Two proxies by their weights; a row that lacks one of the values is no point."""
    rows: list[dict[str, float]] = [
        {"kl/sequence": 0.0, "rewards/a/mean": 1.0, "rewards/b/mean": 3.0, "rewards/g/mean": 0.5},
        {"kl/sequence": 1.0, "rewards/a/mean": 2.0, "rewards/g/mean": 0.6},
        {"kl/sequence": 4.0, "rewards/a/mean": 2.0, "rewards/b/mean": 5.0, "rewards/g/mean": 0.7},
    ]
    found = optimisation_of(rows, {"a": 2.0, "b": 0.5}, "g", "name")
    assert found is not None
    assert found.label == "name"
    assert found.divergence_P.tolist() == [0.0, 4.0]
    assert found.proxy_P.tolist() == [3.5, 6.5]
    assert found.gold_P.tolist() == [0.5, 0.7]
    assert optimisation_of(rows, {"absent": 1.0}, "g", "name") is None
