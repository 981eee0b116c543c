"""The law of over-optimisation: what it was made with comes out again."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis.plots import distance, fit_law, law, optimisation_of


def gold_at(d: float, start: float, alpha: float, beta: float) -> float:
    return start + (d * (alpha - beta * math.log(d)) if d > 0 else 0.0)


@given(
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(-1, 1),
    st.lists(st.integers(0, 400), min_size=4, max_size=12, unique=True),
)
def test_the_law_is_found_again(start: float, alpha: float, beta: float, at: list[int]) -> None:
    d = [k / 20 for k in at]
    gold = [gold_at(x, start, alpha, beta) for x in d]
    found = fit_law(d, gold)
    assert found is not None
    # The condition of the three columns at such distances is below 1e5, squared nowhere.
    assert found.tolist() == pytest.approx((start, alpha, beta), abs=1e-8)
    assert law(d, found) == pytest.approx(gold, abs=1e-9)


def test_noise_is_fitted_by_least_squares() -> None:
    generator = np.random.default_rng(0)
    d = np.linspace(0, 6, 80)
    gold = np.array([gold_at(x, 0.3, 0.25, 0.13) for x in d]) + generator.normal(0, 0.05, 80)
    found = fit_law(d, gold)
    assert found is not None
    least = np.sum((gold - law(d, found)) ** 2)
    for at in range(3):
        for step in (1e-3, -1e-3):
            assert np.sum((gold - law(d, found + step * np.eye(3)[at])) ** 2) > least


def test_too_few_points_determine_nothing() -> None:
    assert fit_law([], []) is None
    assert fit_law([0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5]) is None
    assert fit_law([0, 1, 2, 3], [0, 1, 2, math.nan]) is None
    assert fit_law([0, 1, 2, math.inf], [0, 1, 2, 3]) is None
    assert fit_law([0, 1, 2, 3], [0, 1, 2, 3]) is not None
    # Four distances that differ by rounding alone.
    assert fit_law(1 + np.arange(4) * 1e-15, [0, 1, 2, 3]) is None


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
