"""Which pairs to label next: by what a label would tell about the rewards, not by p near ½ alone.

Suffixes: `_C` pairs, `_M` members of an ensemble, `_X` the dimensions of a covariance's factor.
Entropies and information are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.special import entr, expit

from keel.analysis.statistics import Array
from keel.data.preferences.posterior import HeadPosterior

Index = npt.NDArray[np.int64]
Method = Literal["d_optimal", "bald", "margin", "random"]
METHODS: tuple[Method, ...] = get_args(Method)
NODES, REACH = 65, 8.0
"""Nodes of the quadrature, and how many standard deviations to either side it goes."""
SAME = 1e-9
"""Pairs whose factors differ by less than this share of their size are one pair."""


@dataclass(frozen=True, slots=True, eq=False)
class Uncertainty:
    """Each pair's probability that its first answer is labelled better, and the label's entropy.

    `aleatoric_C` stays however many labels there are; `epistemic_C` is what is learned about the
    rewards from this label.
    """

    probability_C: Array
    aleatoric_C: Array
    epistemic_C: Array

    @property
    def total_C(self) -> Array:
        """The label's entropy."""
        return self.aleatoric_C + self.epistemic_C


@dataclass(frozen=True, slots=True, eq=False)
class PairBeliefs:
    """What is believed about a pool of pairs: means and covariances of the reward differences.

    Pairs i and j have the covariance ψ_i · ψ_j, with ψ the `factor_CX`.
    """

    difference_C: Array
    factor_CX: Array
    uncertainty: Uncertainty

    @property
    def variance_C(self) -> Array:
        """|ψ|²."""
        return np.asarray((self.factor_CX**2).sum(axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class PairSelection:
    """The pairs of a batch, the first to be labelled first, and each one's score when chosen."""

    index: Index
    score: Array


# ---------------------------------------------------------------- what a label tells


def ensemble_uncertainty(difference_MC: npt.ArrayLike, accuracy: float = 1.0) -> Uncertainty:
    """The mutual information of label and model (BALD), the model one of M equally likely members.

        I = h(mean_m q_m) − mean_m h(q_m),   q = (1 − a) + (2a − 1) σ(d),   h the binary entropy

    with a the `accuracy` of the labeller: the probability that a label is not turned round.
    Source: Houlsby et al. 2011 [1112.5745] eq. 2.
    """
    differences = np.asarray(difference_MC, dtype=np.float64)
    members = len(differences)
    return _decomposed(differences.T, np.full(members, 1 / max(members, 1)), accuracy)


def gaussian_uncertainty(
    difference_C: npt.ArrayLike, variance_C: npt.ArrayLike, accuracy: float = 1.0
) -> Uncertainty:
    """The mutual information of label and reward difference f ~ N(m, s²).

        I = h(E q) − E h(q),   q = (1 − a) + (2a − 1) σ(f)

    a as in `ensemble_uncertainty`. The expectations are sums over 65 equally spaced nodes from −8
    to 8 standard deviations: the error of I is below 1e-9 for s up to 3, 1e-6 for s up to 5 and
    2e-4 for s up to 8. (Gauss–Hermite quadrature with 64 nodes: 5e-7, 2e-4 and 4e-3.)
    Source: Houlsby et al. 2011 [1112.5745] eq. 2; the trapezoidal rule on the line: Trefethen and
    Weideman 2014, SIAM Review 56:385.
    """
    mean, variance = np.broadcast_arrays(
        np.asarray(difference_C, dtype=np.float64), np.asarray(variance_C, dtype=np.float64)
    )
    node_X = np.linspace(-REACH, REACH, NODES)
    weight_X = np.exp(-(node_X**2) / 2)
    drawn = mean[:, None] + np.sqrt(variance)[:, None] * node_X
    return _decomposed(drawn, weight_X / weight_X.sum(), accuracy)


def variance_reduction(
    difference_C: npt.ArrayLike, variance_C: npt.ArrayLike, accuracy: float = 1.0
) -> Array:
    """By how much a label lowers the variance s² of a pair's own reward difference.

        s² − 1/(1/s² + g) = g s⁴ / (1 + g s²),   g = (2a − 1)² [p (1 − p)]² / (q (1 − q))

    with p = σ(m), q as in `gaussian_uncertainty`, and g the label's Fisher information about the
    difference: p (1 − p) at a = 1, 0 at a = ½.
    Source: MacKay 1992, Neural Computation 4:590 (the gain of a measurement).
    """
    probability = expit(np.asarray(difference_C, dtype=np.float64))
    variance = np.asarray(variance_C, dtype=np.float64)
    labelled = _labelled(probability, accuracy)
    slope = probability * expit(-np.asarray(difference_C, dtype=np.float64))
    spread = labelled * (1 - labelled)
    share = np.divide(slope, spread, out=np.zeros_like(slope), where=spread > 0)
    information = (2 * accuracy - 1) ** 2 * slope * share
    return np.asarray(information * variance**2 / (1 + information * variance))


# ---------------------------------------------------------------- beliefs about a pool


def laplace_beliefs(posterior: HeadPosterior, feature_CH: npt.ArrayLike) -> PairBeliefs:
    """From a posterior of the head and the pool's features."""
    difference, factor = posterior.differences(feature_CH), posterior.whiten(feature_CH)
    return PairBeliefs(
        difference, factor, gaussian_uncertainty(difference, (factor**2).sum(axis=1))
    )


def ensemble_beliefs(difference_MC: npt.ArrayLike) -> PairBeliefs:
    """From the reward differences of two or more members, with their sample covariance.

    ψ_im = (d_mi − mean_m d_mi) / √(M − 1)
    """
    differences = np.asarray(difference_MC, dtype=np.float64)
    if differences.ndim != 2 or len(differences) < 2:
        raise ValueError(f"differences {differences.shape}: give two members or more × pairs")
    mean = differences.mean(axis=0)
    factor = (differences - mean).T / np.sqrt(len(differences) - 1)
    return PairBeliefs(mean, factor, ensemble_uncertainty(differences))


# ---------------------------------------------------------------- batches


def select_pairs(method: Method, size: int, beliefs: PairBeliefs, seed: int = 0) -> PairSelection:
    """The `size` pairs of the pool to label next (all of a smaller pool).

    | method | score of a pair |
    |---|---|
    | d_optimal | `d_optimal_batch` with the information p (1 − p): near-duplicates count once |
    | bald | the epistemic part of the label's entropy, pair by pair |
    | margin | −\\|p − ½\\|, with p the predictive probability |
    | random | 0 |

    The seed decides between equal scores, and nothing else.
    """
    if method == "d_optimal":
        probability = expit(beliefs.difference_C)
        return d_optimal_batch(beliefs.factor_CX, size, probability * (1 - probability), seed)
    scores: dict[str, Array] = {
        "bald": beliefs.uncertainty.epistemic_C,
        "margin": -np.abs(beliefs.uncertainty.probability_C - 0.5),
        "random": np.zeros(len(beliefs.difference_C)),
    }
    if method not in scores:
        raise ValueError(f"method {method!r} is none of {', '.join(METHODS)}")
    return top_batch(scores[method], size, seed)


def top_batch(score_C: npt.ArrayLike, size: int, seed: int = 0) -> PairSelection:
    """The pairs of the highest scores, in a random order where scores are equal."""
    score = np.asarray(score_C, dtype=np.float64)
    shuffled = np.random.default_rng(seed).permutation(score.size)
    index = shuffled[np.argsort(-score[shuffled], kind="stable")][: max(size, 0)]
    return PairSelection(index, score[index])


def d_optimal_batch(
    factor_CX: npt.ArrayLike,
    size: int,
    information_C: npt.ArrayLike | None = None,
    seed: int = 0,
) -> PairSelection:
    """Pairs chosen one by one, each with the largest gain in the determinant of the precision.

        log det(I + Σ_{i∈B} g_i ψ_i ψ_iᵀ) = log det Λ_B − log det Λ,   gain_i = log(1 + g_i s_i²)

    g is the information of a label about its difference, p (1 − p) for a logistic one (1 unless
    given). s² is the variance given the pairs chosen so far; after pair j it falls, for each i with
    covariance c_i to j, by g_j c_i² / (1 + g_j s_j²). Time C B (X + B), memory C (X + B).
    The greedy choice has at least 1 − 1/e of the best batch's log det. A pair that equals a chosen
    one (ψ or −ψ) is only taken where no other is left.
    Source: MacKay 1992, Neural Computation 4:590; the bound: Nemhauser et al. 1978, Math.
    Programming 14:265, for the monotone submodular log det.
    """
    factor = np.asarray(factor_CX, dtype=np.float64)
    count, size = len(factor), max(min(size, len(factor)), 0)
    g = np.ones(count) if information_C is None else np.asarray(information_C, dtype=np.float64)
    variance = (factor**2).sum(axis=1)
    length, order = variance.copy(), np.random.default_rng(seed).permutation(count)
    left, repeated = np.ones(count, dtype=bool), np.zeros(count, dtype=bool)
    down_BC = np.zeros((size, count))  # Σ_b down_b,i down_b,j is what cov(i, j) has fallen by.
    index, score = np.zeros(size, dtype=np.int64), np.zeros(size)
    for taken in range(size):
        gain = np.log1p(g * variance)
        worth = np.where(left, np.where(repeated, -1.0, gain), -np.inf)
        pick = order[np.argmax(worth[order])]
        index[taken], score[taken] = pick, gain[pick]
        product = factor @ factor[pick]
        covariance = product - down_BC[:taken, pick] @ down_BC[:taken]
        down_BC[taken] = covariance * np.sqrt(g[pick] / (1 + g[pick] * variance[pick]))
        variance = np.maximum(variance - down_BC[taken] ** 2, 0.0)
        left[pick] = False
        repeated |= length + length[pick] - 2 * np.abs(product) <= SAME * length[pick]
    return PairSelection(index, score)


def _labelled(probability: Array, accuracy: float) -> Array:
    """q, the probability of the label that a labeller gives."""
    if not 0.5 <= accuracy <= 1:
        raise ValueError(f"an accuracy of {accuracy} is not in [0.5, 1]")
    return np.asarray((1 - accuracy) + (2 * accuracy - 1) * probability)


def _decomposed(difference_CX: Array, weight_X: Array, accuracy: float) -> Uncertainty:
    """The entropy of the mean over X and the mean of the entropies."""
    labelled_CX = _labelled(expit(difference_CX), accuracy)
    probability = labelled_CX @ weight_X
    aleatoric = (entr(labelled_CX) + entr(1 - labelled_CX)) @ weight_X
    total = entr(probability) + entr(1 - probability)
    return Uncertainty(probability, aleatoric, np.maximum(total - aleatoric, 0.0))
