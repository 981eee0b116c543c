"""Predicted deviations against errors, and predictive probabilities against labels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keel.analysis.calibration import pair_report
from keel.analysis.uncertainty import predictive_report, spread_report


def test_spread_against_loops() -> None:
    error, deviation = [1.0, -3.0, 0.5, 2.0], [1.0, 1.0, 2.0, 4.0]
    found = spread_report(error, deviation)
    squares = [(e / s) ** 2 for e, s in zip(error, deviation, strict=True)]
    assert found.ratio.mean == pytest.approx(math.sqrt(sum(squares) / 4), abs=1e-12)
    assert found.within.mean == 0.75
    assert found.ratio.low == 0.0 < found.ratio.mean < found.ratio.high


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_ratio_is_how_far_the_deviations_are_off(scale: float) -> None:
    generator = np.random.default_rng(0)
    deviation = generator.uniform(0.2, 3, size=4000)
    found = spread_report(scale * deviation * generator.normal(size=4000), deviation)
    assert found.ratio.low < scale < found.ratio.high
    assert found.ratio.high - found.ratio.low < 0.1 * scale
    assert found.rank is not None
    assert found.rank > 0.4
    if scale == 1:
        assert found.within.low < 0.95 < found.within.high


def test_clusters_widen_the_ratios_interval() -> None:
    error = np.repeat(np.random.default_rng(0).normal(size=50), 8)
    alone = spread_report(error, np.ones(400)).ratio
    together = spread_report(error, np.ones(400), np.repeat(np.arange(50), 8)).ratio
    assert together.mean == alone.mean
    assert together.high - together.low > 2 * (alone.high - alone.low)


def test_a_deviation_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        spread_report([1.0], [0.0])


def test_predictive_gain_against_loops() -> None:
    plain, predictive, label = [2.0, -1.0, 0.5], [1.0, -0.5, 0.2], [1.0, 0.5, 0.0]

    def loss(x: float, v: float) -> float:
        p = 1 / (1 + math.exp(-x))
        return -v * math.log(p) - (1 - v) * math.log(1 - p)

    found = predictive_report(plain, predictive, label, clusters=["a", "a", "b"])
    gains = [loss(a, v) - loss(b, v) for a, b, v in zip(plain, predictive, label, strict=True)]
    assert found.gain.mean == pytest.approx(sum(gains) / 3, abs=1e-12)
    assert found.pairs == pair_report(predictive, label, clusters=["a", "a", "b"])


def test_predictive_gain_is_positive_where_differences_are_too_sure() -> None:
    generator = np.random.default_rng(0)
    d = generator.normal(size=5000)
    label = (generator.random(5000) < 1 / (1 + np.exp(-d))).astype(np.float64)
    assert predictive_report(3 * d, d, label).gain.low > 0
    assert predictive_report(d, 3 * d, label).gain.high < 0
