"""Posteriors, beliefs and choices against loops, quadrature, an optimiser and determinants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize

from keel.preferences.selection import (
    METHODS,
    PRECISION_PAIRS,
    d_optimal_batch,
    fit_head,
    gaussian_uncertainty,
    held_out_check,
    hints,
    laplace_beliefs,
    laplace_posterior,
    likeliest_posterior,
    pool_beliefs,
    scaled_features,
    select_pairs,
    top_batch,
)

EXACT = 1e-10
"""float64; sums of a few dozen numbers in another order."""
Array = np.ndarray[Any, np.dtype[np.float64]]


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def pairs(count: int = 30, width: int = 4, seed: int = 0) -> tuple[Array, Array]:
    """Features, and labels of every kind: plain ones, soft ones and ties."""
    generator = np.random.default_rng(seed)
    feature = generator.normal(size=(count, width))
    return feature, generator.choice([0.0, 0.2, 0.5, 1.0], size=count)


def loss(head: Array, feature: Array, label: Array, prior: float) -> float:
    total = prior / 2 * sum(w * w for w in head)
    for φ, v in zip(feature, label, strict=True):
        d = sum(w * x for w, x in zip(head, φ, strict=True))
        total -= v * math.log(sigma(d)) + (1 - v) * math.log(sigma(-d))
    return float(total)


def test_head_minimises_the_loss() -> None:
    feature, label = pairs()
    found = fit_head(feature, label, 0.7)
    other = minimize(loss, np.zeros(4), (feature, label, 0.7), tol=1e-12)
    # BFGS by finite differences ends within 1e-5 of the minimum.
    np.testing.assert_allclose(found, other.x, atol=1e-5)
    for i in range(4):
        up, down = found.copy(), found.copy()
        up[i] += 1e-3
        down[i] -= 1e-3
        here = loss(found, feature, label, 0.7)
        assert min(loss(x, feature, label, 0.7) for x in (up, down)) > here


def test_head_of_separable_labels_is_found() -> None:
    """Large features and a weak prior: p is 0 or 1 after one full Newton step."""
    feature = np.array([[30.0, 1.0], [-20.0, 2.0], [25.0, -3.0]])
    label = np.array([1.0, 0.0, 1.0])
    head = fit_head(feature, label, 1e-6)
    slope = (
        sum((sigma(float(φ @ head)) - v) * φ for φ, v in zip(feature, label, strict=True))
        + 1e-6 * head
    )
    np.testing.assert_allclose(slope, 0, atol=1e-8)


def test_skipped_pairs_say_nothing() -> None:
    feature, label = pairs()
    label[3] = math.nan
    skipped = laplace_posterior(feature, label, 0.5)
    without = laplace_posterior(np.delete(feature, 3, 0), np.delete(label, 3), 0.5)
    np.testing.assert_array_equal(skipped.mean_H, without.mean_H)
    np.testing.assert_array_equal(skipped.factor_HH, without.factor_HH)


def test_precision_variance_and_evidence_against_loops() -> None:
    feature, label = pairs()
    found = laplace_posterior(feature, label, 0.7)
    precision = np.zeros((4, 4))
    for a in range(4):
        for b in range(4):
            for φ in feature:
                p = sigma(float(φ @ found.mean_H))
                precision[a, b] += p * (1 - p) * φ[a] * φ[b]
            precision[a, b] += 0.7 * (a == b)
    np.testing.assert_allclose(found.factor_HH @ found.factor_HH.T, precision, atol=EXACT)
    inverse = np.linalg.inv(precision)
    other = np.random.default_rng(2).normal(size=(5, 4))
    covariance = found.whiten(other) @ found.whiten(other).T
    for i in range(5):
        assert found.differences(other)[i] == pytest.approx(other[i] @ found.mean_H, abs=EXACT)
        for j in range(5):
            assert covariance[i, j] == pytest.approx(other[i] @ inverse @ other[j], abs=EXACT)
    evidence = -loss(found.mean_H, feature, label, 0.7)
    evidence += 4 / 2 * math.log(0.7) - math.log(np.linalg.det(precision)) / 2
    assert found.log_evidence == pytest.approx(evidence, abs=EXACT)


def test_evidence_is_near_the_integral() -> None:
    """One dimension, 40 labels: Laplace's approximation of log Z is off by less than 0.01."""
    feature, label = pairs(40, 1)
    found = laplace_posterior(feature, label, 2.0)

    def density(w: float) -> float:
        prior = math.sqrt(2.0 / (2 * math.pi))
        return prior * math.exp(-loss(np.array([w]), feature, label, 2.0))

    exact = math.log(quad(density, -6, 6, points=[float(found.mean_H[0])])[0])
    assert found.log_evidence == pytest.approx(exact, abs=0.01)


def test_evidence_prefers_the_true_prior() -> None:
    generator = np.random.default_rng(0)
    feature = generator.normal(size=(400, 30))
    for precision in (0.1, 10.0):
        head = generator.normal(size=30) / math.sqrt(precision)
        label = (generator.random(400) < 1 / (1 + np.exp(-feature @ head))).astype(np.float64)
        posterior = likeliest_posterior(feature, label, [1e-3, 0.1, 10.0, 1e3])
        assert posterior.prior_precision == precision


def test_a_trained_head_is_the_mean() -> None:
    feature, label = pairs()
    head = np.array([0.3, -1.0, 2.0, 0.0])
    found = laplace_posterior(feature, label, 0.7, mean_H=head)
    np.testing.assert_array_equal(found.mean_H, head)
    fitted = laplace_posterior(feature, label, 0.7)
    assert fitted.log_evidence > found.log_evidence
    with pytest.raises(ValueError, match="3 weights for 4 features"):
        laplace_posterior(feature, label, 0.7, mean_H=head[:3])


def test_features_are_scaled_to_one_mean_square() -> None:
    assert np.mean(scaled_features([[3.0, 0.0], [1.0, 2.0]]) ** 2) == pytest.approx(1)
    np.testing.assert_array_equal(scaled_features(np.zeros((2, 3))), np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("label", "prior", "message"),
    [
        ([1.0], 1.0, "1 labels"),
        ([1.0, 1.5], 1.0, "probabilities"),
        ([1.0, 0.0], 0.0, "not above 0"),
    ],
)
def test_bad_input_is_refused(label: list[float], prior: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laplace_posterior(np.ones((2, 3)), label, prior)


def entropy(p: float) -> float:
    return -sum(q * math.log(q) for q in (p, 1 - p) if q > 0)


# ---------------------------------------------------------------- information


@pytest.mark.parametrize(
    ("deviation", "error"), [(0.1, 1e-9), (3.0, 1e-9), (5.0, 1e-6), (8.0, 2e-4)]
)
def test_gaussian_information_is_within_its_error(deviation: float, error: float) -> None:
    for mean in (-4.0, 0.0, 0.7, 8.0):

        def expected(of: Callable[[float], float], m: float = mean) -> float:
            def weighed(z: float) -> float:
                return of(sigma(m + deviation * z)) * math.exp(-z * z / 2)

            middle = min(max(-m / deviation, -8.9), 8.9)
            found = quad(weighed, -9, 9, points=[middle], limit=300, epsabs=1e-12)[0]
            return float(found) / math.sqrt(2 * math.pi)

        probability = expected(lambda p: p)
        found = gaussian_uncertainty([mean], [deviation**2])
        assert found.probability_C[0] == pytest.approx(probability, abs=error)
        information = entropy(probability) - expected(entropy)
        assert found.epistemic_C[0] == pytest.approx(information, abs=error)
        total = found.aleatoric_C[0] + found.epistemic_C[0]
        assert total == pytest.approx(entropy(probability), abs=error)


# ---------------------------------------------------------------- D-optimal batches


def naive_greedy(factor: np.ndarray, size: int, information: np.ndarray) -> list[int]:
    """By determinants of the whole matrix, for every candidate, at every step."""
    chosen: list[int] = []
    for _ in range(size):
        best, best_value = -1, -math.inf
        for i in range(len(factor)):
            if i not in chosen:
                matrix = np.eye(factor.shape[1])
                for j in [*chosen, i]:
                    matrix += information[j] * np.outer(factor[j], factor[j])
                value = math.log(np.linalg.det(matrix))
                if value > best_value:
                    best, best_value = i, value
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("seed", range(5))
def test_greedy_equals_the_naive_determinant_loop(seed: int) -> None:
    generator = np.random.default_rng(seed)
    factor = generator.normal(size=(20, 4)) * generator.uniform(0.1, 3, size=(20, 1))
    information = generator.uniform(0.01, 0.25, size=20)
    found = d_optimal_batch(factor, 12, information, seed)
    assert found.index.tolist() == naive_greedy(factor, 12, information)
    chosen = factor[found.index]
    whole = np.eye(4) + chosen.T @ (information[found.index, None] * chosen)
    assert found.score.sum() == pytest.approx(math.log(np.linalg.det(whole)), abs=1e-10)
    assert (np.diff(found.score) <= 1e-12).all()


@pytest.mark.parametrize("seed", range(10))
def test_first_two_are_no_duplicates(seed: int) -> None:
    """The pair that tells most is there three times, once the other way round, and once nearly; a
    score of each pair alone would take all four first."""
    generator = np.random.default_rng(seed)
    factor = generator.normal(size=(12, 3)) * 0.1
    factor[4] = [40.0, 3.0, 2.0]
    factor[7], factor[9], factor[2] = factor[4], -factor[4], factor[4] * (1 + 1e-7)
    same = {2, 4, 7, 9}
    assert set(top_batch((factor**2).sum(axis=1), 4).index.tolist()) == same
    found = d_optimal_batch(factor, 12, seed=seed).index.tolist()
    assert len(same & set(found[:9])) == 1
    assert set(found[9:]) < same
    assert sorted(found) == list(range(12))


def test_duplicates_count_with_what_is_left_of_their_variance() -> None:
    """Close to a chosen pair but not equal to it: the formula decides, not the rule."""
    factor = np.array([[1.0, 0.0], [1.0, 0.02], [0.0, 0.5]])
    assert d_optimal_batch(factor, 2, [1e3, 1e3, 1e3]).index.tolist() == [1, 2]
    assert d_optimal_batch(factor, 2, [1e-3, 1e-3, 1e-3]).index.tolist() == [1, 0]


def test_batches_of_none_and_of_all() -> None:
    assert d_optimal_batch(np.ones((3, 2)), 0).index.tolist() == []
    assert d_optimal_batch(np.zeros((0, 2)), 4).index.tolist() == []
    assert sorted(d_optimal_batch(np.eye(3), 9).index.tolist()) == [0, 1, 2]


# ---------------------------------------------------------------- choosing


def beliefs_of_labels(seed: int = 0):  # type: ignore[no-untyped-def]
    generator = np.random.default_rng(seed)
    label = generator.choice([0.0, 0.5, 1.0], size=12)
    posterior = laplace_posterior(generator.normal(size=(12, 5)), label, 1.0)
    pool = generator.normal(size=(40, 5))
    return posterior, pool, laplace_beliefs(posterior, pool)


def test_each_method_takes_the_pairs_of_its_score() -> None:
    _, _, beliefs = beliefs_of_labels()
    found = {method: select_pairs(method, 10, beliefs, seed=3).index.tolist() for method in METHODS}
    assert all(len(set(index)) == 10 for index in found.values())
    assert len({tuple(sorted(index)) for index in found.values()}) == 4
    worst = sorted(range(40), key=lambda c: abs(beliefs.uncertainty.probability_C[c] - 0.5))
    assert found["margin"] == worst[:10]
    ordered = sorted(range(40), key=lambda c: -beliefs.uncertainty.epistemic_C[c])
    assert found["bald"] == ordered[:10]
    p = [sigma(d) for d in beliefs.difference_C]
    information = np.array([q * (1 - q) for q in p])
    assert found["d_optimal"] == naive_greedy(beliefs.factor_CX, 10, information)
    with pytest.raises(ValueError, match="none of d_optimal"):
        select_pairs("entropy", 3, beliefs)  # type: ignore[arg-type]


def test_the_seed_decides_between_equal_scores_alone() -> None:
    _, _, beliefs = beliefs_of_labels()
    for method in METHODS:
        batches = [select_pairs(method, 10, beliefs, seed).index.tolist() for seed in (0, 0, 1)]
        assert batches[0] == batches[1]
        assert (batches[0] == batches[2]) == (method != "random")
    firsts = {int(top_batch(np.zeros(5), 1, seed).index[0]) for seed in range(60)}
    assert firsts == set(range(5))
    assert top_batch([1.0, 3.0, 2.0], 2).score.tolist() == [3.0, 2.0]


# ---------------------------------------------------------------- beliefs


def problem(pairs: int, width: int = 6, strength: float = 2.0, seed: int = 0):  # type: ignore[no-untyped-def]
    """Features, and labels of a linear reward."""
    generator = np.random.default_rng(seed)
    feature = generator.normal(size=(pairs, width))
    reward = feature @ generator.normal(size=width) * strength / math.sqrt(width)
    label = (generator.random(pairs) < 1 / (1 + np.exp(-reward))).astype(np.float64)
    return feature, label


def test_beliefs_are_those_of_the_likeliest_posterior() -> None:
    feature, label = problem(80)
    posterior = likeliest_posterior(feature[:60], label[:60])
    beliefs = pool_beliefs(feature[:60], label[:60], feature[60:])
    np.testing.assert_allclose(beliefs.difference_C, posterior.differences(feature[60:]))
    np.testing.assert_allclose(
        beliefs.variance_C, (posterior.whiten(feature[60:]) ** 2).sum(axis=1)
    )


def test_many_labels_all_count() -> None:
    """The prior precision is from a part of them; the mean and the variance are not."""
    feature, label = problem(PRECISION_PAIRS + 4_000, width=4)
    pool = feature[:50]
    beliefs = pool_beliefs(feature, label, pool)
    whole = likeliest_posterior(feature, label)
    # The prior hardly counts next to 9,000 labels, whichever of the grid is chosen.
    np.testing.assert_allclose(beliefs.difference_C, whole.differences(pool), rtol=0.02, atol=0.01)
    variance = (whole.whiten(pool) ** 2).sum(axis=1)
    np.testing.assert_allclose(beliefs.variance_C, variance, rtol=0.02)


def test_no_labels_leave_the_prior() -> None:
    pool, _ = problem(10)
    beliefs = pool_beliefs(pool[:0], np.zeros(0), pool)
    np.testing.assert_array_equal(beliefs.difference_C, np.zeros(10))
    np.testing.assert_allclose(beliefs.variance_C, (pool**2).sum(axis=1))


# ---------------------------------------------------------------- do they hold


def test_prompts_are_held_out_whole() -> None:
    """Every prompt has one label of its own in both of its pairs, which only it could give away."""
    feature, label = problem(200)
    prompts = [f"q{n // 2}" for n in range(200)]
    check = held_out_check(feature, label, prompts)
    assert check is not None
    assert (check.learned, check.held_out) == (160, 40)
    assert check.report.pairs.clusters == 20
    assert check.accuracy.low > 0.5
    assert hints(200, check) == []


def test_features_that_say_nothing_are_found_out() -> None:
    """So many of them that the labels of the held-out pairs would show if they were learned."""
    feature, _ = problem(200, width=80)
    label = np.random.default_rng(5).integers(0, 2, 200).astype(np.float64)
    check = held_out_check(feature, label, [str(n) for n in range(200)])
    assert check is not None
    (hint,) = hints(200, check)
    assert "do not show which answer" in hint


def test_few_labels_say_so() -> None:
    feature, label = problem(40)
    assert held_out_check(feature[:19], label[:19], [str(n) for n in range(19)]) is None
    assert held_out_check(feature, label, ["one"] * 40) is None
    ties = held_out_check(feature, label * 0 + 0.5, [str(n) for n in range(40)])
    assert "every held-out pair is a tie" in hints(40, ties)[0]
    assert "too few" in hints(19, None)[0]
    assert "no pair is labelled" in hints(0, None)[0]
