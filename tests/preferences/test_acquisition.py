"""Which pairs are chosen, against loops, adaptive quadrature and naive determinants in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from scipy.integrate import quad

from keel.preferences.acquisition import (
    METHODS,
    d_optimal_batch,
    ensemble_beliefs,
    ensemble_uncertainty,
    gaussian_uncertainty,
    laplace_beliefs,
    select_pairs,
    top_batch,
    variance_reduction,
)
from keel.preferences.posterior import laplace_posterior

EXACT = 1e-12


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def entropy(p: float) -> float:
    return -sum(q * math.log(q) for q in (p, 1 - p) if q > 0)


def flipped(p: float, accuracy: float) -> float:
    return accuracy * p + (1 - accuracy) * (1 - p)


# ---------------------------------------------------------------- information


@pytest.mark.parametrize("accuracy", [1.0, 0.8, 0.5])
def test_ensemble_information_against_loops(accuracy: float) -> None:
    differences = np.random.default_rng(0).normal(size=(5, 7)) * 3
    found = ensemble_uncertainty(differences, accuracy)
    for c in range(7):
        q = [flipped(sigma(d), accuracy) for d in differences[:, c]]
        mean = sum(q) / 5
        inside = sum(map(entropy, q)) / 5
        assert found.probability_C[c] == pytest.approx(mean, abs=EXACT)
        assert found.aleatoric_C[c] == pytest.approx(inside, abs=EXACT)
        assert found.epistemic_C[c] == pytest.approx(entropy(mean) - inside, abs=EXACT)
        total = found.aleatoric_C[c] + found.epistemic_C[c]
        assert total == pytest.approx(entropy(mean), abs=EXACT)


def test_noise_is_no_information_and_disagreement_is() -> None:
    """Both pairs have p = ½: members that all say so, and members that contradict each other."""
    found = ensemble_uncertainty([[0.0, 30.0], [0.0, -30.0]])
    np.testing.assert_allclose(found.aleatoric_C + found.epistemic_C, math.log(2))
    np.testing.assert_allclose(found.epistemic_C, [0, math.log(2)], atol=1e-10)


@pytest.mark.parametrize(
    ("deviation", "error"), [(0.1, 1e-9), (3.0, 1e-9), (5.0, 1e-6), (8.0, 2e-4)]
)
@pytest.mark.parametrize("accuracy", [1.0, 0.7])
def test_gaussian_information_is_within_its_error(
    deviation: float, error: float, accuracy: float
) -> None:
    for mean in (-4.0, 0.0, 0.7, 8.0):

        def expected(of: Callable[[float], float], m: float = mean) -> float:
            def weighed(z: float) -> float:
                return of(flipped(sigma(m + deviation * z), accuracy)) * math.exp(-z * z / 2)

            middle = min(max(-m / deviation, -8.9), 8.9)
            found = quad(weighed, -9, 9, points=[middle], limit=300, epsabs=1e-12)[0]
            return float(found) / math.sqrt(2 * math.pi)

        probability = expected(lambda p: p)
        found = gaussian_uncertainty([mean], [deviation**2], accuracy)
        assert found.probability_C[0] == pytest.approx(probability, abs=error)
        information = entropy(probability) - expected(entropy)
        assert found.epistemic_C[0] == pytest.approx(information, abs=error)


def test_variance_reduction_against_bayes_rule() -> None:
    """The precision 1/s² gains the Fisher information of a label that may be turned round."""
    for accuracy in (1.0, 0.75, 0.5):
        for m, s2 in ((0.0, 1.0), (2.0, 0.3), (-1.0, 9.0)):
            q = flipped(sigma(m), accuracy)
            step = 1e-5
            slope = (flipped(sigma(m + step), accuracy) - flipped(sigma(m - step), accuracy)) / (
                2 * step
            )
            after = 1 / (1 / s2 + slope**2 / (q * (1 - q)))
            found = variance_reduction([m], [s2], accuracy)
            # The slope is a finite difference: 1e-10 of rounding and step².
            assert found[0] == pytest.approx(s2 - after, abs=1e-8)
    assert variance_reduction([800.0], [4.0], 1.0)[0] == 0


def test_accuracy_below_chance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.3"):
        gaussian_uncertainty([0.0], [1.0], 0.3)


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


def test_greedy_is_near_the_best_batch() -> None:
    factor = np.random.default_rng(0).normal(size=(10, 3)) * 2
    best = max(
        math.log(np.linalg.det(np.eye(3) + factor[list(b)].T @ factor[list(b)]))
        for b in combinations(range(10), 3)
    )
    assert d_optimal_batch(factor, 3).score.sum() >= (1 - 1 / math.e) * best


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


def test_batches_of_no_pairs_and_of_more_than_there_are() -> None:
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


def test_laplace_beliefs_are_the_posteriors() -> None:
    posterior, pool, beliefs = beliefs_of_labels()
    np.testing.assert_allclose(beliefs.variance_C, posterior.variances(pool))
    again = gaussian_uncertainty(posterior.differences(pool), posterior.variances(pool))
    np.testing.assert_array_equal(beliefs.uncertainty.epistemic_C, again.epistemic_C)


def test_ensemble_beliefs_have_the_sample_covariance() -> None:
    differences = np.random.default_rng(0).normal(size=(6, 9))
    beliefs = ensemble_beliefs(differences)
    np.testing.assert_allclose(beliefs.factor_CX @ beliefs.factor_CX.T, np.cov(differences.T))
    with pytest.raises(ValueError, match="two members"):
        ensemble_beliefs(differences[:1])


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
