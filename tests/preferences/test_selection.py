"""A round of selection: beliefs, whether they hold, near-copies, hints; and features from words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.sparse import csr_array

from keel.preferences.posterior import likeliest_posterior
from keel.preferences.selection import (
    PRECISION_PAIRS,
    UncertaintyPlan,
    choose_method,
    held_out_check,
    hints,
    near_copies,
    pool_beliefs,
)
from keel.preferences.word_features import (
    BUCKETS,
    hashed_words,
    principal_features,
    scaled_features,
    word_differences,
)

LAPLACE = UncertaintyPlan()


def problem(pairs: int, width: int = 6, strength: float = 2.0, seed: int = 0):  # type: ignore[no-untyped-def]
    """Features, and labels of a linear reward."""
    generator = np.random.default_rng(seed)
    feature = generator.normal(size=(pairs, width))
    reward = feature @ generator.normal(size=width) * strength / math.sqrt(width)
    label = (generator.random(pairs) < 1 / (1 + np.exp(-reward))).astype(np.float64)
    return feature, label


# ---------------------------------------------------------------- beliefs


def test_beliefs_are_those_of_the_likeliest_posterior() -> None:
    feature, label = problem(80)
    posterior = likeliest_posterior(feature[:60], label[:60])
    beliefs = pool_beliefs(feature[:60], label[:60], feature[60:], LAPLACE)
    np.testing.assert_allclose(beliefs.difference_C, posterior.differences(feature[60:]))
    np.testing.assert_allclose(beliefs.variance_C, posterior.variances(feature[60:]))


def test_many_labels_all_count() -> None:
    """The prior precision is from a part of them; the mean and the variance are not."""
    feature, label = problem(PRECISION_PAIRS + 4_000, width=4)
    pool = feature[:50]
    beliefs = pool_beliefs(feature, label, pool, LAPLACE)
    whole = likeliest_posterior(feature, label)
    # The prior hardly counts next to 9,000 labels, whichever of the grid is chosen.
    np.testing.assert_allclose(beliefs.difference_C, whole.differences(pool), rtol=0.02, atol=0.01)
    np.testing.assert_allclose(beliefs.variance_C, whole.variances(pool), rtol=0.02)


def test_no_labels_leave_the_prior() -> None:
    pool, _ = problem(10)
    beliefs = pool_beliefs(pool[:0], np.zeros(0), pool, LAPLACE)
    np.testing.assert_array_equal(beliefs.difference_C, np.zeros(10))
    np.testing.assert_allclose(beliefs.variance_C, (pool**2).sum(axis=1))


def test_an_ensemble_is_as_sure_as_laplace_roughly() -> None:
    feature, label = problem(300)
    ensemble = pool_beliefs(feature[:200], label[:200], feature[200:], UncertaintyPlan(200))
    laplace = pool_beliefs(feature[:200], label[:200], feature[200:], LAPLACE)
    # 200 members: the standard error of a standard deviation is 5 %.
    ratio = np.sqrt(ensemble.variance_C / laplace.variance_C)
    assert 0.8 < np.median(ratio) < 1.25
    few = [
        pool_beliefs(feature[:200], label[:200], feature[200:], UncertaintyPlan(3, seed))
        for seed in (0, 0, 1)
    ]
    assert (few[0].difference_C == few[1].difference_C).all()
    assert (few[0].difference_C != few[2].difference_C).all()


# ---------------------------------------------------------------- do they hold


def test_prompts_are_held_out_whole() -> None:
    """Every prompt has one label of its own in both of its pairs, which only it could give away."""
    feature, label = problem(200)
    prompts = [f"q{n // 2}" for n in range(200)]
    check = held_out_check(feature, label, prompts, LAPLACE)
    assert check is not None
    assert (check.learned, check.held_out) == (160, 40)
    assert check.report.pairs.clusters == 20
    assert check.accuracy.low > 0.5
    assert hints(200, check) == []


def test_features_that_say_nothing_are_found_out() -> None:
    """So many of them that the labels of the held-out pairs would show if they were learned."""
    feature, _ = problem(200, width=80)
    label = np.random.default_rng(5).integers(0, 2, 200).astype(np.float64)
    check = held_out_check(feature, label, [str(n) for n in range(200)], LAPLACE)
    assert check is not None
    (hint,) = hints(200, check)
    assert "do not show which answer" in hint


def test_few_labels_say_so() -> None:
    feature, label = problem(40)
    assert held_out_check(feature[:19], label[:19], [str(n) for n in range(19)], LAPLACE) is None
    assert held_out_check(feature, label, ["one"] * 40, LAPLACE) is None
    ties = held_out_check(feature, label * 0 + 0.5, [str(n) for n in range(40)], LAPLACE)
    assert "every held-out pair is a tie" in hints(40, ties)[0]
    assert "too few" in hints(19, None)[0]
    assert "no pair is labelled" in hints(0, None)[0]


# ---------------------------------------------------------------- near-copies


def test_near_copies_are_counted_turned_round_too() -> None:
    generator = np.random.default_rng(0)
    alone = generator.normal(size=(60, 20))
    few = generator.normal(size=(4, 20))
    copies = few[np.arange(40) % 4] * generator.choice([-2.0, 0.5], size=(40, 1))
    copies += 0.02 * generator.normal(size=copies.shape)
    assert near_copies(alone) == 0
    assert near_copies(np.concatenate([alone, copies])) == pytest.approx(0.4)
    assert near_copies(np.concatenate([copies, np.zeros((5, 20))])) == 1
    assert near_copies(alone[:0]) == near_copies(np.zeros((3, 20))) == 0


def test_the_method_follows_what_was_measured() -> None:
    assert choose_method(None, 0.9).method == "d_optimal"
    assert choose_method(None, 0.2).method == "random"
    assert "20 % of the pool's pairs" in choose_method(None, 0.2).reason
    assert choose_method("bald", 0.9) == choose_method("bald", 0.2)


# ---------------------------------------------------------------- words


def test_words_are_counted_in_buckets() -> None:
    found = hashed_words("Yes yes, 12!")
    assert sorted(found.values()) == pytest.approx([math.log(2)] * 3 + [math.log(3)])
    assert hashed_words("a b") == hashed_words("B A")
    assert hashed_words("") == {}
    dense = word_differences([("a b", "b c"), ("b c", "a b"), ("a", "a")]).toarray()
    assert dense.shape == (3, BUCKETS)
    np.testing.assert_array_equal(dense[0], -dense[1])
    assert np.abs(dense[0]).sum() == pytest.approx(2 * math.log(2))
    assert not dense[2].any()


def test_principal_features_keep_the_products_of_the_pairs() -> None:
    """With as many components as the pairs span, all scalar products but for one factor."""
    generator = np.random.default_rng(0)
    rows = np.zeros((12, BUCKETS))
    rows[:, :9] = generator.normal(size=(12, 9))
    found = principal_features(csr_array(rows), 9)
    assert found.shape == (12, 9)
    assert np.mean(found**2) == pytest.approx(1)
    ratio = (found @ found.T) / (rows @ rows.T)
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-8)
    # Fewer: the directions with the most variance, against numpy's decomposition.
    values = np.linalg.svd(rows, compute_uv=False)[:3]
    small = np.linalg.svd(principal_features(csr_array(rows), 3), compute_uv=False)
    np.testing.assert_allclose(small / small[0], values / values[0])


def test_equal_answers_have_no_features() -> None:
    assert principal_features(word_differences([("a", "a")] * 3)).shape[0] == 3
    assert not principal_features(word_differences([("a", "a")] * 3)).any()
    np.testing.assert_array_equal(scaled_features(np.zeros((2, 3))), np.zeros((2, 3)))
