"""Statistics of comparisons over seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keel.analysis.comparison import (
    NO_DIFFERENCE,
    RunScore,
    compare,
    improvement_interval,
    iqm_interval,
    wins,
)
from keel.analysis.statistics import iqm
from keel.workflows.comparison_files import lines, table
from studies.coverage import DISTRIBUTIONS, coverage, pair_coverage


def runs(arm: str, scores: list[float], prompts: int = 0) -> list[RunScore]:
    return [
        RunScore(
            arm=arm,
            seed=seed,
            score=score,
            measure="pass@1",
            passed={f"p{at}": float(at < score * prompts) for at in range(prompts)},
            curves={},
            seconds=1.0,
            tokens=10.0,
        )
        for seed, score in enumerate(scores)
    ]


# Scores of runs (rows) on tasks, and what rliable 1.2.0 says of them: metrics.aggregate_iqm,
# metrics.probability_of_improvement.
X = [[0.716, 0.627, 0.563], [0.693, 0.824, 0.518], [0.865, 0.795, 0.474], [0.661, 0.873, 0.444],
     [0.467, 0.656, 0.68], [0.582, 0.85, 0.458], [0.78, 0.821, 0.814], [0.546, 0.608, 0.687],
     [0.588, 0.879, 0.747], [0.734, 0.701, 0.772]]  # fmt: skip
Y = [[0.716, 0.574, 0.862], [0.762, 0.528, 0.686], [0.557, 0.534, 0.668], [0.437, 0.464, 0.654],
     [0.654, 0.483, 0.652], [0.536, 0.735, 0.704], [0.546, 0.631, 0.487],
     [0.493, 0.918, 0.579]]  # fmt: skip


def test_numbers_are_those_of_rliable() -> None:
    x, y = np.array(X), np.array(Y)
    assert iqm(x) == pytest.approx(0.6891875, rel=1e-12)
    assert iqm(y) == pytest.approx(0.6059166666666667, rel=1e-12)
    tasks = [wins(a, b).mean() for a, b in zip(x.T, y.T, strict=True)]
    assert np.mean(tasks) == pytest.approx(0.6416666666666667, rel=1e-12)


def test_few_seeds_that_agree_have_no_finite_interval() -> None:
    for scores in (np.full(9, 0.5), np.array([0.5, 0.25]), np.array([0.5])):
        few = iqm_interval(scores)
        assert (few.low, few.high) == (-math.inf, math.inf)
    enough = iqm_interval(np.full(10, 0.5))
    assert (enough.mean, enough.low, enough.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_interval_covers_the_true_mean(name: str) -> None:
    # 600 simulations: a standard error of 0.9 points about 95 %.
    assert 0.91 <= coverage(name, seeds=10, simulations=600)["studentised levels"] <= 0.98


@pytest.mark.parametrize(("seeds", "correlation"), [(3, 0.7), (10, 0.0)])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_intervals_of_a_difference_hold_no_difference(
    name: str, correlation: float, seeds: int
) -> None:
    found = pair_coverage(name, correlation, 0.95, seeds, simulations=300)
    # 300 simulations: a standard error of 1.3 points about 95 %.
    assert found["standard error"] >= 0.91
    assert found["probability"] >= 0.91
    many = pair_coverage(name, correlation, 1 - 0.05 / 16, seeds, simulations=300)
    assert many["standard error"] >= 0.98


def test_difference_is_measured_on_the_same_seeds() -> None:
    # The seed moves both arms by the same amount, far more than they differ.
    start = np.random.default_rng(4).normal(0.5, 0.2, 10)
    better, worse = (start + 0.01).tolist(), start.tolist()
    (pair,) = compare({"a": runs("a", better), "b": runs("b", worse)}).pairs
    assert pair.statement == "a scores higher than b"
    assert (pair.difference.low, pair.difference.high) == pytest.approx((0.01, 0.01))
    (other,) = compare({"a": runs("a", better), "b": runs("b", worse[::-1])}).pairs
    assert other.statement == "no difference shown"
    # Seeds that only one arm has say nothing of a difference.
    (part,) = compare({"a": runs("a", [*better, 9.0]), "b": runs("b", worse)}).pairs
    assert part == pair


def test_three_seeds_that_differ_alike_are_not_a_difference() -> None:
    """The deviation of three differences of exactly ¼ is unknown, not 0."""
    (pair,) = compare({"a": runs("a", [0.5, 0.75, 1]), "b": runs("b", [0.25, 0.5, 0.75])}).pairs
    assert (pair.difference.low, pair.difference.high) == (-math.inf, math.inf)
    assert pair.statement == NO_DIFFERENCE


def test_two_seeds_show_their_values_and_no_interval() -> None:
    found = compare({"a": runs("a", [0.5, 0.75], 40), "b": runs("b", [0.25, 0.5], 40)})
    assert lines(found) == [
        "no difference shown: a less b 0.25 (0.25, 0.25: too few seeds for an interval)",
        "2 seeds: too few for an interval; use 10 or more for a claim",
    ]
    assert table(found)[1][1] == "0.625 (0.5, 0.75)"
    one = compare({"a": runs("a", [0.5]), "b": runs("b", [0.25])})
    assert table(one)[1][1] == "0.5"


def test_probability_of_one_has_an_interval() -> None:
    one = improvement_interval(np.arange(10) + 10.0, np.arange(10.0))
    assert one.mean == one.high == 1
    # Wilson's lower end for 10 of 10: n / (n + z²), with Student's t for z.
    assert one.low == pytest.approx(10 / (10 + 2.2621571628**2))


def test_baseline_is_compared_with_every_other_arm() -> None:
    scores = np.random.default_rng(5).random((4, 10)).tolist()
    arms = {name: runs(name, s) for name, s in zip("abcd", scores, strict=True)}
    found = compare(arms, baseline="b")
    assert [(pair.a, pair.b) for pair in found.pairs] == [("a", "b"), ("c", "b"), ("d", "b")]
    assert found.pair_confidence == 1 - 0.05 / 3


def test_clear_difference_is_stated_and_noise_is_not() -> None:
    rng = np.random.default_rng(2)
    better = (0.8 + 0.02 * rng.random(10)).tolist()
    worse = (0.5 + 0.02 * rng.random(10)).tolist()
    found = compare({"a": runs("a", better, 40), "b": runs("b", worse, 40)})
    (pair,) = found.pairs
    assert pair.statement == "a scores higher than b"
    assert pair.probability_of_improvement.mean == 1
    assert pair.by_prompt is not None
    assert pair.by_prompt.low > 0
    (same,) = compare({"a": runs("a", worse), "b": runs("b", worse[::-1])}).pairs
    assert same.statement == "no difference shown"


def test_more_pairs_widen_intervals_few_seeds_give_a_note() -> None:
    scores = np.random.default_rng(3).random((4, 5)).tolist()
    two = compare({name: runs(name, s) for name, s in zip("ab", scores[:2], strict=True)})
    four = compare({name: runs(name, s) for name, s in zip("abcd", scores, strict=True)})
    assert (two.pair_confidence, four.pair_confidence) == (0.95, 1 - 0.05 / 6)
    assert four.pairs[0].difference.low < two.pairs[0].difference.low
    assert "5 seeds: intervals are wide" in two.notes[0]
    assert compare({name: runs(name, [0.5] * 10) for name in "ab"}).notes == ()
