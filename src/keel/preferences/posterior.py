"""What pairs labelled so far leave open about a reward head: Laplace's posterior.

Suffixes: `_C` pairs, `_H` the reward model's hidden size. A pair's features are those
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


def laplace_precision(feature_CH: Array, difference_C: Array, prior_precision: float) -> Array:
    """The posterior precision of the head's weights, (H, H).

        Λ = Σ_i p_i (1 − p_i) φ_i φ_iᵀ + λ I,   p_i = σ(w · φ_i)

    Labels, soft ones too, enter by w alone.
    Source: MacKay 1992, Neural Computation 4:720; the last layer of a network: Kristiadi et al.
    2020 [2002.10118].
    """
    scale_C = np.sqrt(expit(difference_C) * expit(-difference_C))
    scaled_CH = scale_C[:, None] * feature_CH
    precision_HH: Array = scaled_CH.T @ scaled_CH
    precision_HH[np.diag_indices_from(precision_HH)] += prior_precision
    return precision_HH


def laplace_posterior(
    feature_CH: npt.ArrayLike,
    label_C: npt.ArrayLike,
    prior_precision: float,
    mean_H: npt.ArrayLike | None = None,
) -> HeadPosterior:
    """The posterior of a Bradley–Terry head under the prior N(0, I/λ), by Laplace's approximation.

        log Z = −Σ_i ℓ_i − λ/2 |w|² + H/2 log λ − ½ log det Λ

    with ℓ the cross-entropy as in `fit_head` and Λ as in `laplace_precision`, both at the mean w:
    the fitted one, or a trained head's weights (`mean_H`). Time H³ + C H², memory 2 H².
    Source: MacKay 1992, Neural Computation 4:720 (the evidence of a classifier).

    Raises:
        ValueError: shapes that do not fit, a label outside [0, 1], λ not above 0.
    """
    feature, label = _labelled(feature_CH, label_C, prior_precision)
    mean = fit_head(feature, label, prior_precision) if mean_H is None else mean_H
    mean = np.asarray(mean, dtype=np.float64).reshape(-1)
    if mean.size != feature.shape[1]:
        raise ValueError(f"a head of {mean.size} weights for {feature.shape[1]} features")
    difference = feature @ mean
    precision = laplace_precision(feature, difference, prior_precision)
    factor = np.asarray(cholesky(precision, lower=True, overwrite_a=True))
    evidence = (
        -_loss(difference, label)
        - prior_precision / 2 * float(mean @ mean)
        + mean.size / 2 * math.log(prior_precision)
        - float(np.log(np.diagonal(factor)).sum())
    )
    return HeadPosterior(mean, factor, prior_precision, evidence)


def likeliest_posterior(
    feature_CH: npt.ArrayLike,
    label_C: npt.ArrayLike,
    precisions: Sequence[float] = PRECISIONS,
) -> HeadPosterior:
    """`laplace_posterior` with the prior precision that has the highest evidence."""
    found = [laplace_posterior(feature_CH, label_C, λ) for λ in precisions]
    return max(found, key=lambda posterior: posterior.log_evidence)


def fit_head(feature_CH: npt.ArrayLike, label_C: npt.ArrayLike, prior_precision: float) -> Array:
    """The head that minimises the Bradley–Terry loss and the prior's, by Newton's method.

        Σ_i ℓ_i + λ/2 |w|²,   ℓ = −v log σ(w · φ) − (1 − v) log σ(−w · φ)

    A soft label v is thus v of a label 1 and 1 − v of a label 0.
    Source: Bradley and Terry 1952, Biometrika 39:324, with w · φ for the log-odds.

    Raises:
        ValueError: shapes that do not fit, a label outside [0, 1], λ not above 0.
    """
    feature, label = _labelled(feature_CH, label_C, prior_precision)

    def value(head: Array) -> float:
        return _loss(feature @ head, label) + prior_precision / 2 * float(head @ head)

    head = np.zeros(feature.shape[1])
    for _ in range(MAX_NEWTON_STEPS):
        difference, lowest = feature @ head, value(head)
        slope_H = feature.T @ (expit(difference) - label) + prior_precision * head
        precision = laplace_precision(feature, difference, prior_precision)
        step = cho_solve((cholesky(precision, lower=True), True), slope_H)
        gain = float(slope_H @ step) / 2
        if gain < TOLERANCE * (1 + abs(lowest)):
            return np.asarray(head - step)
        length = 1.0
        # The loss is convex, but a full step may go too far if p is near 0 or 1.
        while value(head - length * step) > lowest - length * gain / 10:
            length /= 2
        head = head - length * step
    raise ValueError(f"no head found in {MAX_NEWTON_STEPS} Newton steps: scale the features")


def scaled_features(feature_CH: npt.ArrayLike) -> Array:
    """Features with a mean square of 1 over pairs and dimensions, so that one range of prior
    precisions suits all."""
    feature = np.asarray(feature_CH, dtype=np.float64)
    size = float(np.sqrt(np.mean(feature**2))) if feature.size else 0.0
    return feature / size if size > 0 else feature


def _loss(difference: Array, label: Array) -> float:
    both = label * np.logaddexp(0, -difference) + (1 - label) * np.logaddexp(0, difference)
    return float(both.sum())


def _labelled(
    feature_CH: npt.ArrayLike, label_C: npt.ArrayLike, prior_precision: float
) -> tuple[Array, Array]:
    """Features and labels in float64, without the skipped pairs."""
    feature = np.asarray(feature_CH, dtype=np.float64)
    label = np.asarray(label_C, dtype=np.float64).reshape(-1)
    if feature.ndim != 2 or len(feature) != label.size:
        raise ValueError(f"features {feature.shape} for {label.size} labels")
    if not prior_precision > 0:
        raise ValueError(f"a prior precision of {prior_precision} is not above 0")
    kept = ~np.isnan(label)
    feature, label = feature[kept], label[kept]
    if not ((label >= 0) & (label <= 1)).all():
        raise ValueError("labels are probabilities in [0, 1], or NaN for a skipped pair")
    if not np.isfinite(feature).all():
        raise ValueError("features are not finite")
    return feature, label
