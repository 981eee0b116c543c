"""A reward head's posterior, against loops in float64, a general optimiser, and sampling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize

from keel.preferences.selection import (
    fit_head,
    laplace_posterior,
    likeliest_posterior,
    scaled_features,
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


def test_exchanging_the_answers_changes_nothing() -> None:
    feature, label = pairs()
    sign = np.where(np.arange(30) % 2, 1.0, -1.0)
    turned = laplace_posterior(sign[:, None] * feature, np.where(sign > 0, label, 1 - label), 0.5)
    np.testing.assert_allclose(turned.mean_H, laplace_posterior(feature, label, 0.5).mean_H)


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
        assert found.variances(other)[i] == pytest.approx(covariance[i, i], abs=EXACT)
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
