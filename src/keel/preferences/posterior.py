"""What pairs labelled so far leave open about a reward head: Laplace's posterior, and an ensemble.

Suffixes: `_C` pairs, `_H` the reward model's hidden size, `_M` members. A pair's features are those
of its first answer less those of its second, φ = φ_a − φ_b, so that the head's reward difference is
w · φ. A label v is the probability that the first answer is the better one: 1 or 0, between for a
soft label, ½ for a tie. NaN is a skipped pair, which says nothing and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.special import expit

from keel.analysis.statistics import Array

PRECISIONS = tuple(10.0**power for power in range(-3, 4))
"""Prior precisions to choose from."""
MAX_NEWTON_STEPS = 100
TOLERANCE = 1e-10
"""Newton's last step is one that lowers the loss by less than this share of it; it converges
quadratically."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadPosterior:
    """Head weights as N(mean, Λ⁻¹): `factor_HH` is the lower Cholesky factor L of Λ = L Lᵀ.

    `log_evidence` is the labels' log marginal likelihood by Laplace's approximation.
    """

    mean_H: Array
    factor_HH: Array
    prior_precision: float
    log_evidence: float

    def differences(self, feature_CH: npt.ArrayLike) -> Array:
        """The mean reward differences w · φ."""
        return np.asarray(np.asarray(feature_CH, dtype=np.float64) @ self.mean_H)

    def whiten(self, feature_CH: npt.ArrayLike) -> Array:
        """ψ = L⁻¹ φ for each pair, so that cov(w · φ_i, w · φ_j) = φ_iᵀ Λ⁻¹ φ_j = ψ_i · ψ_j."""
        feature_HC = np.asarray(feature_CH, dtype=np.float64).T
        return np.asarray(solve_triangular(self.factor_HH, feature_HC, lower=True).T)

    def variances(self, feature_CH: npt.ArrayLike) -> Array:
        """The variances φᵀ Λ⁻¹ φ of the reward differences."""
        return np.asarray((self.whiten(feature_CH) ** 2).sum(axis=1))


def laplace_precision(
    feature_CH: Array, difference_C: Array, prior_precision: float, weight_C: Array
) -> Array:
    """The posterior precision of the head's weights, (H, H).

        Λ = Σ_i n_i p_i (1 − p_i) φ_i φ_iᵀ + λ I,   p_i = σ(w · φ_i)

    with n_i the weight of pair i. Labels, soft ones too, enter by w alone.
    Source: MacKay 1992, Neural Computation 4:720; the last layer of a network: Kristiadi et al.
    2020 [2002.10118].
    """
    scale_C = np.sqrt(weight_C * _slope(difference_C))
    scaled_CH = scale_C[:, None] * feature_CH
    precision_HH: Array = scaled_CH.T @ scaled_CH
    precision_HH[np.diag_indices_from(precision_HH)] += prior_precision
    return precision_HH


def laplace_posterior(
    feature_CH: npt.ArrayLike,
    label_C: npt.ArrayLike,
    prior_precision: float,
    weight_C: npt.ArrayLike | None = None,
    mean_H: npt.ArrayLike | None = None,
) -> HeadPosterior:
    """The posterior of a Bradley–Terry head under the prior N(0, I/λ), by Laplace's approximation.

        log Z = −Σ_i n_i ℓ_i − λ/2 |w|² + H/2 log λ − ½ log det Λ

    with ℓ the cross-entropy as in `fit_head` and Λ as in `laplace_precision`, both at the mean w:
    the fitted one, or a trained head's weights (`mean_H`). Time H³ + C H², memory 2 H².
    Source: MacKay 1992, Neural Computation 4:720 (the evidence of a classifier).

    Raises:
        ValueError: shapes that do not fit, a label outside [0, 1], a weight below 0, λ not above 0.
    """
    feature, label, weight = _labelled(feature_CH, label_C, weight_C, prior_precision)
    mean = fit_head(feature, label, prior_precision, weight) if mean_H is None else mean_H
    mean = np.asarray(mean, dtype=np.float64).reshape(-1)
    if mean.size != feature.shape[1]:
        raise ValueError(f"a head of {mean.size} weights for {feature.shape[1]} features")
    difference = feature @ mean
    precision = laplace_precision(feature, difference, prior_precision, weight)
    factor = np.asarray(cholesky(precision, lower=True, overwrite_a=True))
    evidence = (
        -_loss(difference, label, weight)
        - prior_precision / 2 * float(mean @ mean)
        + mean.size / 2 * math.log(prior_precision)
        - float(np.log(np.diagonal(factor)).sum())
    )
    return HeadPosterior(mean, factor, prior_precision, evidence)


def likeliest_posterior(
    feature_CH: npt.ArrayLike,
    label_C: npt.ArrayLike,
    precisions: Sequence[float] = PRECISIONS,
    weight_C: npt.ArrayLike | None = None,
) -> HeadPosterior:
    """`laplace_posterior` with the prior precision that has the highest evidence."""
    found = [laplace_posterior(feature_CH, label_C, λ, weight_C) for λ in precisions]
    return max(found, key=lambda posterior: posterior.log_evidence)


def fit_head(
    feature_CH: npt.ArrayLike,
    label_C: npt.ArrayLike,
    prior_precision: float,
    weight_C: npt.ArrayLike | None = None,
    prior_mean_H: npt.ArrayLike | None = None,
) -> Array:
    """The head that minimises the Bradley–Terry loss and the prior's, by Newton's method.

        Σ_i n_i ℓ_i + λ/2 |w − w₀|²,   ℓ = −v log σ(w · φ) − (1 − v) log σ(−w · φ)

    A soft label v is thus v of a label 1 and 1 − v of a label 0; a weight n of 2 counts twice.
    Source: Bradley and Terry 1952, Biometrika 39:324, with w · φ for the log-odds.

    Raises:
        ValueError: shapes that do not fit, a label outside [0, 1], a weight below 0, λ not above 0.
    """
    feature, label, weight = _labelled(feature_CH, label_C, weight_C, prior_precision)
    start = np.zeros(feature.shape[1]) if prior_mean_H is None else np.asarray(prior_mean_H)

    def value(head: Array) -> float:
        away = head - start
        return _loss(feature @ head, label, weight) + prior_precision / 2 * float(away @ away)

    head = start.astype(np.float64)
    for _ in range(MAX_NEWTON_STEPS):
        difference, lowest = feature @ head, value(head)
        slope_H = feature.T @ (weight * (expit(difference) - label))
        slope_H += prior_precision * (head - start)
        precision = laplace_precision(feature, difference, prior_precision, weight)
        step = cho_solve((cholesky(precision, lower=True), True), slope_H)
        gain = float(slope_H @ step) / 2
        if gain < TOLERANCE * (1 + abs(lowest)):
            return np.asarray(head - step)
        length = 1.0
        # The loss is convex, but a full step may go too far where p is near 0 or 1.
        while value(head - length * step) > lowest - length * gain / 10:
            length /= 2
        head = head - length * step
    raise ValueError(f"no head found in {MAX_NEWTON_STEPS} Newton steps: scale the features")


def head_ensemble(
    feature_CH: npt.ArrayLike,
    label_C: npt.ArrayLike,
    prior_precision: float,
    members: int,
    seed: int = 0,
    weight_C: npt.ArrayLike | None = None,
) -> Array:
    """Head weights (M, H) that differ as far as the labels leave them open; differences are Φ wᵀ.

    Member m is `fit_head` with weights n_i e_im, e ~ Exponential(1) (the Bayesian bootstrap, Rubin
    1981, Ann. Stat. 9:130), and around a prior mean of its own, w₀ ~ N(0, I/λ): without that, all
    members would agree on directions that no labelled pair has [Osband et al. 2018, 1806.03335].
    """
    feature, label, weight = _labelled(feature_CH, label_C, weight_C, prior_precision)
    generator = np.random.default_rng(seed)
    heads = []
    for _ in range(members):
        again = weight * generator.exponential(size=weight.size)
        prior = generator.normal(size=feature.shape[1]) / math.sqrt(prior_precision)
        heads.append(fit_head(feature, label, prior_precision, again, prior))
    return np.array(heads).reshape(members, feature.shape[1])


def probit_logit(difference_C: npt.ArrayLike, variance_C: npt.ArrayLike) -> Array:
    """The log-odds of the predictive probability of a reward difference N(m, s²).

        E[σ(f)] ≈ σ(κ m),   κ = 1/√(1 + π s²/8)

    Within 0.016 of E[σ(f)] for s up to 8. Source: MacKay 1992, Neural Computation 4:720.
    """
    variance = np.asarray(variance_C, dtype=np.float64)
    return np.asarray(np.asarray(difference_C) / np.sqrt(1 + np.pi * variance / 8))


def _slope(difference_C: Array) -> Array:
    """p (1 − p)."""
    return np.asarray(expit(difference_C) * expit(-difference_C))


def _loss(difference: Array, label: Array, weight: Array) -> float:
    both = label * np.logaddexp(0, -difference) + (1 - label) * np.logaddexp(0, difference)
    return float(weight @ both)


def _labelled(
    feature_CH: npt.ArrayLike,
    label_C: npt.ArrayLike,
    weight_C: npt.ArrayLike | None,
    prior_precision: float,
) -> tuple[Array, Array, Array]:
    """Features, labels and weights in float64, without the skipped pairs."""
    feature = np.asarray(feature_CH, dtype=np.float64)
    label = np.asarray(label_C, dtype=np.float64).reshape(-1)
    weight = np.ones(label.size) if weight_C is None else np.asarray(weight_C, dtype=np.float64)
    if feature.ndim != 2 or not len(feature) == label.size == weight.size:
        raise ValueError(
            f"features {feature.shape} for {label.size} labels and {weight.size} weights"
        )
    if not prior_precision > 0:
        raise ValueError(f"a prior precision of {prior_precision} is not above 0")
    kept = ~np.isnan(label)
    feature, label, weight = feature[kept], label[kept], weight[kept]
    if not ((label >= 0) & (label <= 1)).all():
        raise ValueError("labels are probabilities in [0, 1], or NaN for a skipped pair")
    if not (np.isfinite(weight) & (weight >= 0)).all() or not np.isfinite(feature).all():
        raise ValueError("features are finite, and weights are finite and at least 0")
    return feature, label, weight
