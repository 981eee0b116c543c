"""Which pairs are chosen, against adaptive quadrature and naive determinants; whether it holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.integrate import quad

from keel.preferences.selection import (
    METHODS,
    PRECISION_PAIRS,
    d_optimal_batch,
    gaussian_uncertainty,
    held_out_check,
    hints,
    laplace_beliefs,
    laplace_posterior,
    likeliest_posterior,
    pool_beliefs,
    select_pairs,
    top_batch,
)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


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
    np.testing.assert_allclose(beliefs.variance_C, posterior.variances(feature[60:]))


def test_many_labels_all_count() -> None:
    """The prior precision is from a part of them; the mean and the variance are not."""
    feature, label = problem(PRECISION_PAIRS + 4_000, width=4)
    pool = feature[:50]
    beliefs = pool_beliefs(feature, label, pool)
    whole = likeliest_posterior(feature, label)
    # The prior hardly counts next to 9,000 labels, whichever of the grid is chosen.
    np.testing.assert_allclose(beliefs.difference_C, whole.differences(pool), rtol=0.02, atol=0.01)
    np.testing.assert_allclose(beliefs.variance_C, whole.variances(pool), rtol=0.02)


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
