"""Which pairs to label next, by what is known of a reward head; and whether that holds.

Suffixes: `_C` pairs, `_H` the reward model's hidden size, `_X` the dimensions of a covariance's
factor. Entropies and information are in nats. A pair's features are those of its first answer less
those of its second, φ = φ_a − φ_b, so that the head's reward difference is w · φ. A label v is the
probability that the first answer is the better one: 1 or 0, between for a soft label, ½ for a tie.
NaN is a skipped pair, which says nothing and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.special import entr, expit, logit

from keel.analysis.calibration import PredictiveReport, predictive_report
from keel.analysis.statistics import Array, Interval

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


Index = npt.NDArray[np.int64]
Method = Literal["d_optimal", "bald", "margin", "random"]
METHODS: tuple[Method, ...] = get_args(Method)
NODES, REACH = 65, 8.0
"""Nodes of the quadrature, and how many standard deviations to either side it goes."""
SAME = 1e-9
"""Pairs whose factors differ by less than this share of their size are one pair."""
APART = 1e6
"""What puts pairs that equal a chosen one after all others; no gain is near it."""
PRECISION_PAIRS = 5_000
"""Labelled pairs, at most, by which the prior precision is chosen."""
HELD_OUT, FEWEST = 5, 20
"""One prompt in `HELD_OUT` is held out; fewer labelled pairs than `FEWEST` show nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Uncertainty:
    """Each pair's probability that its first answer is labelled better, and the label's entropy.

    `aleatoric_C` stays however many labels there are; `epistemic_C` is what is learned about the
    rewards from this label.
    """

    probability_C: Array
    aleatoric_C: Array
    epistemic_C: Array


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


@dataclass(frozen=True, slots=True)
class HeldOutCheck:
    """What beliefs from some labelled pairs are worth on others, whose prompts they have not seen.

    `learned` and `held_out` are their numbers.
    """

    learned: int
    held_out: int
    report: PredictiveReport

    @property
    def accuracy(self) -> Interval:
        """How often the likelier answer is the better one."""
        return self.report.pairs.accuracy


# ---------------------------------------------------------------- beliefs about a pool


def gaussian_uncertainty(difference_C: npt.ArrayLike, variance_C: npt.ArrayLike) -> Uncertainty:
    """The mutual information of label and reward difference f ~ N(m, s²) (BALD).

        I = h(E σ(f)) − E h(σ(f)),   h the binary entropy

    The expectations are sums over 65 equally spaced nodes from −8 to 8 standard deviations: the
    error of I is below 1e-9 for s up to 3, 1e-6 for s up to 5 and 2e-4 for s up to 8.
    (Gauss–Hermite quadrature with 64 nodes: 5e-7, 2e-4 and 4e-3.)
    Source: Houlsby et al. 2011 [1112.5745] eq. 2; the trapezoidal rule on the line: Trefethen and
    Weideman 2014, SIAM Review 56:385.
    """
    mean, variance = np.broadcast_arrays(
        np.asarray(difference_C, dtype=np.float64), np.asarray(variance_C, dtype=np.float64)
    )
    node_X = np.linspace(-REACH, REACH, NODES)
    weight_X = np.exp(-(node_X**2) / 2)
    weight_X /= weight_X.sum()
    label_CX = expit(mean[:, None] + np.sqrt(variance)[:, None] * node_X)
    probability = label_CX @ weight_X
    aleatoric = (entr(label_CX) + entr(1 - label_CX)) @ weight_X
    total = entr(probability) + entr(1 - probability)
    return Uncertainty(probability, aleatoric, np.maximum(total - aleatoric, 0.0))


def laplace_beliefs(posterior: HeadPosterior, feature_CH: npt.ArrayLike) -> PairBeliefs:
    """From a posterior of the head and the pool's features."""
    difference, factor = posterior.differences(feature_CH), posterior.whiten(feature_CH)
    return PairBeliefs(
        difference, factor, gaussian_uncertainty(difference, (factor**2).sum(axis=1))
    )


def pool_beliefs(feature_CH: Array, label_C: Array, pool_CH: Array, seed: int = 0) -> PairBeliefs:
    """What the labelled pairs tell about a pool; of no labelled pair, what the prior says.

    The prior precision is the one with the highest evidence, on at most `PRECISION_PAIRS` pairs.
    """
    some = np.random.default_rng([seed, 3]).permutation(len(label_C))[:PRECISION_PAIRS]
    some.sort()
    likeliest = likeliest_posterior(feature_CH[some], label_C[some]) if len(some) else None
    precision = 1.0 if likeliest is None else likeliest.prior_precision
    return laplace_beliefs(laplace_posterior(feature_CH, label_C, precision), pool_CH)


# ---------------------------------------------------------------- do they hold


def held_out_check(
    feature_CH: Array, label_C: Array, prompts: Sequence[str], seed: int = 0
) -> HeldOutCheck | None:
    """Beliefs from four fifths of the prompts against the labels of the last fifth.

    None if there are fewer than `FEWEST` labelled pairs, or too few prompts, for that.
    """
    names = sorted(set(prompts))
    shuffled = np.random.default_rng([seed, 1]).permutation(len(names))
    apart = {names[n] for n in shuffled[: len(names) // HELD_OUT]}
    held = np.array([prompt in apart for prompt in prompts], dtype=bool)
    if len(prompts) < FEWEST or not held.any():
        return None
    beliefs = pool_beliefs(feature_CH[~held], label_C[~held], feature_CH[held], seed)
    # The log-odds of the predictive probability; the quadrature has rounded it to 0 or 1 at most.
    predictive = logit(np.clip(beliefs.uncertainty.probability_C, 1e-12, 1 - 1e-12))
    clusters = [prompt for prompt in prompts if prompt in apart]
    report = predictive_report(beliefs.difference_C, predictive, label_C[held], clusters)
    return HeldOutCheck(int((~held).sum()), int(held.sum()), report)


def hints(labelled: int, check: HeldOutCheck | None) -> list[str]:
    """What cannot be known from so few labels or from such features."""
    if not labelled:
        return ["no pair is labelled: nothing is known but the features; label some at random"]
    if check is None:
        return [
            f"{labelled} labelled pairs are too few to check the uncertainty on held-out ones: "
            f"label {FEWEST} or more, of several prompts"
        ]
    accuracy = check.accuracy
    if not accuracy.n:
        return ["every held-out pair is a tie: ties do not show which answer is better"]
    if not accuracy.low > 0.5:
        return [
            f"the features do not show which answer of a held-out pair is better (accuracy "
            f"{100 * accuracy.mean:.0f} % [{100 * accuracy.low:.0f}, {100 * accuracy.high:.0f}]): "
            "choose at random, or give a better model"
        ]
    return []


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
    """The pairs of the highest scores, in a random order if scores are equal."""
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
    given). s² = ψᵀ M ψ is the variance given the pairs chosen so far: M = I at first, and after
    pair j it falls by g_j (M ψ_j)(M ψ_j)ᵀ / (1 + g_j s_j²), so that s_i² falls by
    g_j (ψ_iᵀ M ψ_j)² / (1 + g_j s_j²). Memory C X + X²; time C X + X² a pair chosen.
    The greedy choice has at least 1 − 1/e of the best batch's log det. A pair that equals a chosen
    one (ψ or −ψ) is only taken if no other is left.
    Source: MacKay 1992, Neural Computation 4:590; the greedy choice: Nemhauser et al. 1978, Math.
    Programming 14:265, for the monotone submodular log det.
    """
    factor = np.asarray(factor_CX, dtype=np.float64)
    count, size = len(factor), max(min(size, len(factor)), 0)
    g = np.ones(count) if information_C is None else np.asarray(information_C, dtype=np.float64)
    # In a random order, so that the first of equal gains is a random one.
    order = np.random.default_rng(seed).permutation(count)
    factor, g = factor[order], g[order]
    length = (factor**2).sum(axis=1)
    variance_C = length.copy()  # s²
    left_XX = np.eye(factor.shape[1])  # M
    later_C = np.zeros(count)
    index, score = np.zeros(size, dtype=np.int64), np.zeros(size)
    for taken in range(size):
        gain_C = np.log1p(g * variance_C)
        pick = int(np.argmax(gain_C - later_C))
        index[taken], score[taken] = pick, gain_C[pick]
        down_X = left_XX @ factor[pick]
        fall = g[pick] / (1 + g[pick] * variance_C[pick])
        variance_C = np.maximum(variance_C - fall * (factor @ down_X) ** 2, 0.0)
        left_XX -= fall * np.outer(down_X, down_X)
        apart_C = length + length[pick] - 2 * np.abs(factor @ factor[pick])
        later_C[(apart_C <= SAME * length[pick]) & (later_C == 0)] = APART
        later_C[pick] = np.inf
    return PairSelection(order[index], score)
