"""Reward models in numbers, against loops in float64 written apart and against definitions."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest
import scipy.stats  # noqa: F401 - the first import takes longer than hypothesis allows
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis.calibration import (
    first_error_report,
    label_report,
    pair_report,
    predictive_report,
)
from keel.analysis.statistics import (
    auc_interval,
    mean_interval,
    share_interval,
    spearman,
    wilson_interval,
)

# Sums of a few dozen numbers in float64, in another order.
EXACT = 1e-12

# In hundredths: σ of a finer one may lie within rounding of the edge between two bins.
scores = st.integers(-800, 800).map(lambda hundredths: hundredths / 100)
labels = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])
pairs = st.lists(st.tuples(scores, labels), min_size=1, max_size=40)


def sample(n: int, slope: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Differences, and labels drawn with the probability that a model of that slope says."""
    generator = np.random.default_rng(seed)
    d = generator.normal(0.5, 1.5, n)
    return d, (generator.random(n) < 1 / (1 + np.exp(-slope * d))).astype(np.float64)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loop(rows: list[tuple[float, float]]) -> tuple[float, float, list[float]]:
    """Log loss, Brier score, and whether each decided label was predicted."""
    loss = brier = 0.0
    right: list[float] = []
    for z, y in rows:
        loss -= y * math.log(sigma(z)) + (1 - y) * math.log(sigma(-z))
        brier += (sigma(z) - y) ** 2
        if y != 0.5:
            right.append(0.5 if z == 0 else float((z > 0) == (y > 0.5)))
    return loss / len(rows), brier / len(rows), right


# ---------------------------------------------------------------- pairs


@given(pairs)
def test_pairs_against_loops(rows: list[tuple[float, float]]) -> None:
    found = pair_report([d for d, _ in rows], [p for _, p in rows])
    loss, brier, right = loop(rows)
    bins: list[list[tuple[float, float]]] = [[] for _ in range(10)]
    for d, p in rows:
        confidence = sigma(abs(d))
        place = next((k for k in range(9) if confidence < 0.5 + 0.05 * (k + 1)), 9)
        bins[place].append((confidence, 0.5 if d == 0 else p if d > 0 else 1 - p))
    assert found.log_loss == pytest.approx(loss, rel=EXACT)
    assert found.brier == pytest.approx(brier, rel=EXACT, abs=EXACT)
    assert found.ties == len(rows) - len(right)
    assert found.accuracy.n == len(right)
    if right:
        assert found.accuracy.mean == pytest.approx(sum(right) / len(right), rel=EXACT)
    error = 0.0
    for inside in bins:
        if inside:
            gap = sum(o for _, o in inside) / len(inside) - sum(c for c, _ in inside) / len(inside)
            error += len(inside) / len(rows) * abs(gap)
    assert found.ece == pytest.approx(error, abs=EXACT)
    assert [b.n for b in found.bins] == [len(inside) for inside in bins]


def test_huge_margins_stay_finite() -> None:
    found = pair_report([1e300, -1e4, 800.0, 1e-320], [1, 1, 0, 1])
    # −log σ(−x) = x there, to the last place; one in four each.
    assert found.log_loss == pytest.approx((1e4 + 800 + math.log(2)) / 4, rel=EXACT)
    assert found.brier == pytest.approx((0 + 1 + 1 + 0.25) / 4, rel=EXACT)
    assert sum(found.margins.counts) == 4
    json.dumps(found.as_dict(), allow_nan=False)
    assert label_report([-1e5, 1e5], [1, 1]).log_loss == 5e4


def test_margins_are_those_of_the_better_answer() -> None:
    found = pair_report([1.0, -2.0, 3.0, 9.0, 0.0, -1.0], [1, 1, 0, 0.5, 1, 0.2]).margins
    # The tie is out; two labels favour the rejected answer: 1, −2, −3, 0, 1.
    assert (found.mean, found.median) == (pytest.approx(-0.6), 0)
    assert found.std == pytest.approx(math.sqrt((1.6**2 + 1.4**2 + 2.4**2 + 0.6**2 + 1.6**2) / 5))
    assert (found.below, found.at_zero, found.beyond) == (0.4, 0.2, 0)
    assert found.edges[0] == -3
    assert 0.0 in found.edges
    below = found.edges.index(0.0)
    assert sum(found.counts[:below]) == 2
    assert sum(found.counts[below:]) == 3


def test_an_outlier_does_not_press_the_rest_together() -> None:
    found = pair_report([*np.linspace(-1, 1, 99), 1e5], np.ones(100)).margins
    assert found.beyond == 1
    assert found.edges[-1] == pytest.approx(
        4 * np.quantile(np.abs([*np.linspace(-1, 1, 99), 1e5]), 0.9)
    )
    assert found.counts[-1] == 1
    assert max(found.counts) < 20
    # Mostly even: no quantile to go by, so the largest.
    assert pair_report([0.0] * 20 + [2.0], np.ones(21)).margins.edges[-1] == 2


def test_length_bias_by_hand() -> None:
    # Differences and length differences agree in sign on two of three pairs of unequal length.
    found = pair_report([2.0, -1.0, 1.0, 5.0], [1, 1, 0, 1], [10, -4, -3, 0]).length
    assert found is not None
    assert (found.model_longer.mean, found.model_longer.n) == (pytest.approx(2 / 3), 3)
    # The labels: longer, shorter, and the rejected one, which is the longer.
    assert found.label_longer.mean == pytest.approx(2 / 3)
    d, length = np.array([2.0, -1, 1, 5]), np.array([10.0, -4, -3, 0])
    # Both ways round the means are 0, so the correlation is the cosine.
    cosine = (d @ length) / math.sqrt((d @ d) * (length @ length))
    assert found.pearson == pytest.approx(cosine, rel=EXACT)
    assert found.spearman == spearman([*d, *-d], [*length, *-length])
    # Scores that go by length alone; soft labels count as they are.
    alone = pair_report([1.0, 2.0], [0.25, 0.75], [3, 6]).length
    assert alone is not None
    assert alone.pearson == pytest.approx(1)
    assert (alone.model_longer.mean, alone.label_longer.mean) == (1, 0.5)
    even = pair_report([1.0, 2.0], [1, 1], [0, 0]).length
    assert even is not None
    assert (even.pearson, even.spearman, even.model_longer.n) == (None, None, 0)


# ---------------------------------------------------------------- right and wrong


@given(pairs)
def test_labels_against_loops(rows: list[tuple[float, float]]) -> None:
    found = label_report([z for z, _ in rows], [y for _, y in rows])
    loss, brier, right = loop(rows)
    bins: list[list[tuple[float, float]]] = [[] for _ in range(10)]
    for z, y in rows:
        place = next((k for k in range(9) if sigma(z) < (k + 1) / 10), 9)
        bins[place].append((sigma(z), y))
    assert found.log_loss == pytest.approx(loss, rel=EXACT)
    assert found.brier == pytest.approx(brier, rel=EXACT, abs=EXACT)
    error = sum(abs(sum(y - q for q, y in inside)) / len(rows) for inside in bins if inside)
    assert found.ece == pytest.approx(error, abs=EXACT)
    assert found.base_rate == pytest.approx(sum(y for _, y in rows) / len(rows), rel=EXACT)
    yes = [z for z, y in rows if y > 0.5]
    no = [z for z, y in rows if y < 0.5]
    assert found.undecided == len(rows) - len(yes) - len(no)
    if right:
        assert found.accuracy.mean == pytest.approx(sum(right) / len(right), rel=EXACT)
        most = max(len(yes), len(no)) / len(right)
        assert found.constant_accuracy == pytest.approx(most, rel=EXACT)
    if yes and no:
        wins = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in product(yes, no))
        assert found.auc.mean == pytest.approx(wins / (len(yes) * len(no)), rel=EXACT, abs=EXACT)
    else:
        assert math.isnan(found.auc.mean)
        assert (found.auc.low, found.auc.high) == (0, 1)


def test_the_best_constant_beside_it() -> None:
    found = label_report([1.0, 1.0, -1.0, 2.0], [1, 1, 1, 0])
    assert (found.base_rate, found.constant_accuracy) == (0.75, 0.75)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found.constant_log_loss == pytest.approx(expected, rel=EXACT)
    assert label_report([1.0, 2.0], [0, 0]).constant_log_loss == 0
    assert label_report([1.0, 2.0], [0, 0]).constant_accuracy == 1


# ---------------------------------------------------------------- clusters and lengths


def test_reports_hand_their_clusters_on() -> None:
    d, p = sample(60)
    names = [f"problem {i % 15}" for i in range(60)]
    found = pair_report(d, p, d + 0.1, names)
    assert found.clusters == 15
    right = (d > 0) == (p > 0.5)
    assert found.accuracy == share_interval(right, names)
    assert found.accuracy.low != pair_report(d, p).accuracy.low
    assert found.length is not None
    longer = (d > 0) == (d + 0.1 > 0)
    assert found.length.model_longer == share_interval(longer, names)
    assert found.length.label_longer == share_interval(np.where(d + 0.1 > 0, p, 1 - p), names)
    by_length = np.argsort(np.where(p > 0.5, d + 0.1, -d - 0.1), kind="stable")
    first = by_length[: found.by_length[0].accuracy.n]
    own = [names[i] for i in first]
    assert found.by_length[0].accuracy == share_interval(right[first], own)
    pointwise = label_report(d, p, names)
    assert pointwise.clusters == 15
    assert pointwise.accuracy == share_interval(right, names)
    assert pointwise.auc == auc_interval(d, p == 1, names)
    # Left out with its row: the name of a tie.
    tied = pair_report([*d, 1.0], [*p, 0.5], clusters=[*names, "alone"])
    assert tied.accuracy == found.accuracy
    assert label_report([*d, 1.0], [*p, 0.5], [*names, "alone"]).auc == pointwise.auc
    steps = first_error_report([0, 1, None, 2], [0, 0, None, None], ["a", "a", "b", "b"])
    assert steps.accuracy == share_interval([1, 0, 1, 0], ["a", "a", "b", "b"])
    assert steps.on_wrong == share_interval([1, 0], ["a", "a"])
    assert steps.on_right == share_interval([1, 0], ["b", "b"])
    # Step 0 and none are as frequent: none is the constant answer, right on the last two.
    assert steps.gain == mean_interval([1, 0, 0, -1], ["a", "a", "b", "b"])
    assert steps.gain.low < first_error_report([0, 1, None, 2], [0, 0, None, None]).gain.low


# ---------------------------------------------------------------- first errors

answers = st.none() | st.integers(0, 3)


@given(st.lists(st.tuples(answers, answers), min_size=1, max_size=30))
def test_first_errors_against_processbench(rows: list[tuple[int | None, int | None]]) -> None:
    found = first_error_report([p for p, _ in rows], [t for _, t in rows])
    wrong = [p == t for p, t in rows if t is not None]
    right = [p is None for p, t in rows if t is None]
    if wrong and right:
        # As its evaluation script has it: the harmonic mean of the two accuracies.
        a, b = 100 * np.mean(wrong), 100 * np.mean(right)
        expected = 2 * a * b / (a + b) if a + b else 0.0
        assert 100 * found.f1 == pytest.approx(float(expected), abs=1e-9)
    else:
        assert math.isnan(found.f1)
    assert (found.on_wrong.n, found.on_right.n) == (len(wrong), len(right))
    hits = sum(wrong) + sum(right)
    assert found.accuracy == wilson_interval(hits, len(rows))
    best = max(sum(t == constant for _, t in rows) for constant in (None, 0, 1, 2, 3))
    assert found.constant_accuracy == pytest.approx(best / len(rows), rel=EXACT)
    assert sum(t == found.constant_answer for _, t in rows) == best
    assert found.gain.mean == pytest.approx((hits - best) / len(rows), abs=EXACT)


# ---------------------------------------------------------------- all


def test_nothing_is_known_of_no_rows() -> None:
    found = pair_report([], [], [])
    assert math.isnan(found.log_loss)
    assert found.as_dict()["accuracy"] == {"mean": None, "low": 0.0, "high": 1.0, "n": 0}
    assert found.as_dict()["ece"] is None
    assert found.as_dict()["margins"]["counts"] == [0]
    for report in (label_report([], []), first_error_report([], [])):
        text = json.dumps(report.as_dict(), allow_nan=False)
        assert json.loads(text)["n"] == 0
    # Ties alone leave nothing for the accuracy and a log loss of log 2 at best.
    ties = pair_report([0.0, 0.0], [0.5, 0.5], clusters=[1, 2])
    assert (ties.ties, ties.accuracy.n, ties.log_loss) == (2, 0, pytest.approx(math.log(2)))


def test_accuracy_by_length_by_hand() -> None:
    """Better answers are 1 to 12 tokens longer than the others; those up to 6 are judged wrong."""
    longer = np.arange(1.0, 13.0)
    d = np.where(longer > 6, 1.0, -1.0)
    found = pair_report(d, np.ones(12), longer).by_length
    ends = [(one.low, one.high) for one in found]
    assert ends == [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12)]
    assert [one.accuracy.mean for one in found] == [0, 0, 0, 1, 1, 1]
    assert found[0].accuracy == wilson_interval(0, 2)
    # Which answer is named the chosen one changes nothing.
    p = np.where(longer % 2 == 0, 1.0, 0.0)
    sign = np.where(p == 1, 1.0, -1.0)
    assert pair_report(d * sign, p, longer * sign).by_length == found


def test_equal_lengths_share_a_bin_and_ties_have_none() -> None:
    labels, lengths = [1, 1, 1, 1, 0.5, 0], [3, 3, 3, 3, 3, 9]
    found = label_report([1, 1, -1, 1, 1, 1], labels, length_S=lengths).by_length
    assert [(one.low, one.high, one.accuracy.n) for one in found] == [(3, 3, 4), (9, 9, 1)]
    assert [one.accuracy.mean for one in found] == [0.75, 0.0]
    assert pair_report([], [], []).by_length == ()
    assert pair_report([1.0], [1.0]).by_length == ()


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 values are not finite"):
        pair_report([1.0, math.nan], [1, 1])


# ---------------------------------------------------------------- predictive probabilities


def test_predictive_gain_against_loops() -> None:
    plain, predictive, label = [2.0, -1.0, 0.5], [1.0, -0.5, 0.2], [1.0, 0.5, 0.0]

    def loss(x: float, v: float) -> float:
        p = 1 / (1 + math.exp(-x))
        return -v * math.log(p) - (1 - v) * math.log(1 - p)

    found = predictive_report(plain, predictive, label, clusters=["a", "a", "b"])
    gains = [loss(a, v) - loss(b, v) for a, b, v in zip(plain, predictive, label, strict=True)]
    assert found.gain.mean == pytest.approx(sum(gains) / 3, abs=1e-12)
    assert found.pairs == pair_report(predictive, label, clusters=["a", "a", "b"])
