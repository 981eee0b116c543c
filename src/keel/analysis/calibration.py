"""Reward models in numbers: accuracy, log loss, calibration, margins, length, first errors.

Scores go in as they leave the model (logits, score differences), so that no loss is spoilt by a
probability rounded to 0 or 1. C counts comparisons, S answers. NaN stands for what no row tells.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.statistics import (
    Array,
    Codes,
    Interval,
    auc_interval,
    codes,
    mean_interval,
    pearson,
    share_interval,
    spearman,
)
from keel.runs.values import plain

BINS = 10
MARGIN_BINS = 20
"""To either side of 0, at most."""
LENGTH_BINS = 6
"""Of the accuracy by length, at most."""


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """What every report can do."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON: intervals as mean, low, high and n; None for NaN and the infinities."""
        found: dict[str, Any] = plain(dataclasses.asdict(self))
        return found


@dataclass(frozen=True, slots=True)
class Bin(CalibrationReport):
    """Predictions in [low, high): how many, their mean, and how often it came true."""

    low: float
    high: float
    n: int
    predicted: float
    observed: Interval


@dataclass(frozen=True, slots=True)
class Margins(CalibrationReport):
    """By how much the better answer's score lies above the other's, over pairs that are not ties.

    `below` is the share under 0 (the model is wrong), `at_zero` that of equal scores. The first and
    the last bin also hold the `beyond` pairs that lie beyond them; 0 is an edge.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mean: float
    std: float
    median: float
    below: float
    at_zero: float
    beyond: int


@dataclass(frozen=True, slots=True)
class LengthBias(CalibrationReport):
    """How score differences go with length differences, whichever answer is named first.

    The correlations take each pair both ways round. `model_longer` is how often the model has the
    longer answer above, `label_longer` how often the labels do; answers of one length left out.
    """

    pearson: float | None
    spearman: float | None
    model_longer: Interval
    label_longer: Interval


@dataclass(frozen=True, slots=True)
class LengthBin(CalibrationReport):
    """How often the model is right on rows of these lengths: from `low` to `high`, both included.

    Of pairs the length is that of the better answer less that of the other.
    """

    low: float
    high: float
    accuracy: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbabilityReport(CalibrationReport):
    """Probabilities against labels. `clusters` is their number if the intervals know of them."""

    n: int
    clusters: int | None
    accuracy: Interval
    log_loss: float
    brier: float
    ece: float
    bins: tuple[Bin, ...]
    by_length: tuple[LengthBin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport(ProbabilityReport):
    """A reward model on pairs."""

    ties: int
    margins: Margins
    length: LengthBias | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelReport(ProbabilityReport):
    """A model of right and wrong on single answers, compared with the best constant prediction."""

    undecided: int
    auc: Interval
    base_rate: float
    constant_accuracy: float
    constant_log_loss: float


@dataclass(frozen=True, slots=True)
class FirstErrorReport(CalibrationReport):
    """How well the first wrong step is found, compared with always giving the most frequent answer.

    `gain` is by how much `accuracy` lies above `constant_accuracy`, trace by trace.
    """

    n: int
    accuracy: Interval
    on_wrong: Interval
    on_right: Interval
    f1: float
    constant_answer: int | None
    constant_accuracy: float
    gain: Interval


@dataclass(frozen=True, slots=True)
class PredictiveReport(CalibrationReport):
    """A predictive probability on labelled pairs, and by how much it beats that of the mean alone.

    `gain` is the log loss with σ(mean difference) less that with the predictive probability.
    """

    pairs: PairReport
    gain: Interval


def pair_report(
    difference_C: npt.ArrayLike,
    probability_C: npt.ArrayLike,
    length_difference_C: npt.ArrayLike | None = None,
    clusters: Iterable[Hashable] | None = None,
    bins: int = BINS,
) -> PairReport:
    """What a Bradley–Terry model with score differences d (chosen less rejected) is worth.

        log loss = mean of −p log σ(d) − (1−p) log σ(−d),   Brier = mean of (σ(d) − p)²
        confidence = σ(|d|),   ECE = Σ_b n_b/n |mean p̃ − mean confidence|, b of [½, 1]

    p is the label: 1 if chosen is better, ½ for a tie, between for a soft label. The accuracy
    leaves ties out, takes p > ½ as "chosen", and counts a difference of exactly 0 as ½. For the
    calibration each pair counts once, seen from the side that the model prefers: p̃ is p, or 1−p
    if d < 0 (½ at d = 0), so nothing depends on which answer is named chosen. Ties count there,
    and in both losses, as p = ½: their least log loss is log 2, not 0.
    Intervals are Wilson's; with `clusters` (a name a pair, such as its prompt) the accuracy's and
    the length's come from `clustered_interval`. Those of `bins` are Wilson's always.
    With lengths, `by_length` has the accuracy in bins of about equal counts of the length
    difference, the better answer's less the other's, with such intervals.
    Source: Bradley and Terry 1952, Biometrika 39:324; Brier 1950, Mon. Weather Rev. 78:1; Guo et
    al. 2017 [1706.04599] eq. 3 (ECE, bins of equal width).
    Raises ValueError for a value that is not finite.
    """
    from scipy.special import expit

    d, p = _finite(difference_C), _finite(probability_C)
    names = None if clusters is None else codes(clusters)
    longer = None if length_difference_C is None else _finite(length_difference_C)
    better = np.where(p > 0.5, 1, -1)
    preferred = np.where(d == 0, 0.5, np.where(d > 0, p, 1 - p))
    reliability = _bins(expit(np.abs(d)), preferred, np.linspace(0.5, 1, bins + 1))
    decided = p != 0.5
    return PairReport(
        **_common(d, p, names, reliability, None if longer is None else longer * better),
        ties=int(d.size - decided.sum()),
        margins=_margins((d * better)[decided]),
        length=None if longer is None else _length_bias(d, p, longer, names),
    )


def predictive_report(
    difference_C: npt.ArrayLike,
    predictive_logit_C: npt.ArrayLike,
    label_C: npt.ArrayLike,
    clusters: Iterable[Hashable] | None = None,
) -> PredictiveReport:
    """Predicted probabilities against labels in bins, and whether the variance earns its place.

        gain = mean of ℓ(d) − ℓ(d̃),   ℓ(x) = −v log σ(x) − (1 − v) log σ(−x)

    with d the mean difference, d̃ the predictive log-odds (a variance pulls them towards 0) and v
    the label. Bins, losses and errors are `pair_report`'s of d̃.
    """
    names = None if clusters is None else list(clusters)
    d, predictive, label = _finite(difference_C), _finite(predictive_logit_C), _finite(label_C)
    gain = mean_interval(_log_loss(d, label) - _log_loss(predictive, label), names)
    return PredictiveReport(pair_report(predictive, label, clusters=names), gain)


def label_report(
    logit_S: npt.ArrayLike,
    label_S: npt.ArrayLike,
    clusters: Iterable[Hashable] | None = None,
    length_S: npt.ArrayLike | None = None,
) -> LabelReport:
    """What logits z of "right" are worth against labels y: 1 right, 0 wrong, a share between.

        log loss = mean of −y log σ(z) − (1−y) log σ(−z),   Brier = mean of (σ(z) − y)²
        ECE = Σ_b n_b/n |mean y − mean σ(z)|, b of [0, 1]

    Accuracy and AUC take y > ½ as right and leave y = ½ out (`undecided`); a logit of exactly 0
    counts ½. `base_rate` is the mean label; `constant_accuracy` that of always saying what most
    labels say, `constant_log_loss` that of predicting the base rate. With `clusters` (a name an
    answer, such as its problem) the intervals of accuracy and AUC are `clustered_interval`'s; with
    lengths, `by_length` has the accuracy in bins of about equal counts, with such intervals.
    Source: Brier 1950, Mon. Weather Rev. 78:1; Guo et al. 2017 [1706.04599] eq. 3; AUC as in
    `auc_interval`.
    Raises ValueError for a value that is not finite.
    """
    from scipy.special import expit

    z, y = _finite(logit_S), _finite(label_S)
    names = None if clusters is None else codes(clusters)
    decided = y != 0.5
    positive = y[decided] > 0.5
    reliability = _bins(expit(z), y, np.linspace(0, 1, BINS + 1))
    rate, share = _mean(y), _mean(positive.astype(np.float64))
    return LabelReport(
        **_common(z, y, names, reliability, None if length_S is None else _finite(length_S)),
        undecided=int(z.size - decided.sum()),
        auc=auc_interval(z[decided], positive, _at(names, decided)),
        base_rate=rate,
        constant_accuracy=max(share, 1 - share),
        constant_log_loss=-sum(q * math.log(q) for q in (rate, 1 - rate) if q != 0),
    )


def length_correlation(score_S: npt.ArrayLike, length_S: npt.ArrayLike) -> dict[str, Any]:
    """Pearson's and Spearman's correlation of scores with lengths (in tokens), None if either is
    constant, with their number. Raises ValueError for a value that is not finite.
    """
    scores, lengths = _finite(score_S), _finite(length_S)
    correlations = {"pearson": pearson(scores, lengths), "spearman": spearman(scores, lengths)}
    return {"n": scores.size, **correlations}


def first_error_report(
    predicted: Sequence[int | None],
    true: Sequence[int | None],
    clusters: Iterable[Hashable] | None = None,
) -> FirstErrorReport:
    """How well the first wrong step is found; None says that no step is wrong.

        F1 = 2 a_wrong a_right / (a_wrong + a_right)

    with a_wrong the accuracy (the very step) on traces that have a wrong step, a_right on those
    that have none; 0 if both are 0, NaN if there are no traces of one sort.
    `constant_answer` is the most frequent of `true`, so the best constant that there is with the
    answers known (of equals None, then the earliest step). `gain` is Student's interval of the
    difference trace by trace, the accuracies' are Wilson's; with `clusters` they are those of
    `mean_interval` and `clustered_interval`.
    Source: Zheng et al. 2024 [2412.06559] §3 (ProcessBench).
    """
    names = None if clusters is None else codes(clusters)
    hit = np.array([p == t for p, t in zip(predicted, true, strict=True)], dtype=np.float64)
    wrong = np.array([t is not None for t in true], dtype=bool)
    on_wrong = share_interval(hit[wrong], _at(names, wrong))
    on_right = share_interval(hit[~wrong], _at(names, ~wrong))
    both = on_wrong.mean + on_right.mean
    counts = Counter(true)
    most = max(counts.values(), default=0)
    answers = sorted((t for t in counts if counts[t] == most), key=lambda t: -1 if t is None else t)
    answer = answers[0] if answers else None
    constant = np.array([t == answer for t in true], dtype=np.float64)
    return FirstErrorReport(
        n=len(true),
        accuracy=share_interval(hit, names),
        on_wrong=on_wrong,
        on_right=on_right,
        f1=0.0 if both == 0 else 2 * on_wrong.mean * on_right.mean / both,
        constant_answer=answer,
        constant_accuracy=_mean(constant),
        gain=mean_interval(hit - constant, names),
    )


# ---------------------------------------------------------------- parts


def _common(
    x: Array, y: Array, names: Codes | None, bins: tuple[Bin, ...], length: Array | None
) -> dict[str, Any]:
    """What reports on pairs and on single answers share: of logits x and labels y."""
    from scipy.special import expit

    decided = y != 0.5
    right = (np.sign(np.where(y > 0.5, x, -x)[decided]) + 1) / 2
    kept = _at(names, decided)
    return {
        "n": x.size,
        "clusters": None if names is None else np.unique(names).size,
        "accuracy": share_interval(right, kept),
        "log_loss": _mean(_log_loss(x, y)),
        "brier": _mean((expit(x) - y) ** 2),
        "ece": sum(b.n / x.size * abs(b.observed.mean - b.predicted) for b in bins if b.n)
        if x.size
        else math.nan,
        "bins": bins,
        "by_length": () if length is None else _by_length(right, length[decided], kept),
    }


def _finite(values: npt.ArrayLike) -> Array:
    """Raises ValueError for a value that is not a finite number."""
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    if not np.isfinite(x).all():
        raise ValueError(f"{int((~np.isfinite(x)).sum())} of {x.size} values are not finite")
    return x


def _at(names: Codes | None, kept: npt.NDArray[np.bool_]) -> Codes | None:
    return None if names is None else names[kept]


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else math.nan


def _log_loss(x: Array, y: Array) -> Array:
    """−y log σ(x) − (1−y) log σ(−x), with −log σ(x) = log(1 + e^−x) at any size."""
    return np.asarray(y * np.logaddexp(0, -x) + (1 - y) * np.logaddexp(0, x))


def _bins(predicted: Array, observed: Array, edges: Array) -> tuple[Bin, ...]:
    """Those of equal width that hold each prediction; the last takes its upper edge too."""
    index = np.minimum(np.searchsorted(edges, predicted, side="right") - 1, len(edges) - 2)
    out = []
    for number in range(len(edges) - 1):
        inside = index == number
        found = share_interval(observed[inside])
        low, high = float(edges[number]), float(edges[number + 1])
        out.append(Bin(low, high, int(inside.sum()), _mean(predicted[inside]), found))
    return tuple(out)


def _margins(margin_C: Array) -> Margins:
    if margin_C.size == 0:
        return Margins((0.0, 1.0), (0,), *(math.nan,) * 5, 0)
    size = np.abs(margin_C)
    # A few far away must not press the rest into one bin: beyond four times the 90 % quantile they
    # are counted in the bin at the end.
    most = float(size.max()) or 1.0
    reach = min(most, 4 * float(np.quantile(size, 0.9))) or most
    width = max(reach / MARGIN_BINS, float(np.finfo(np.float64).tiny))
    index = np.floor(np.clip(margin_C, -reach, reach) / width).astype(int)
    index = np.clip(index, -MARGIN_BINS, MARGIN_BINS - 1)
    first, last = min(int(index.min()), -1), max(int(index.max()), 0)
    return Margins(
        edges=tuple(width * number for number in range(first, last + 2)),
        counts=tuple(np.bincount(index - first, minlength=last - first + 1).tolist()),
        mean=float(margin_C.mean()),
        std=most * float((margin_C / most).std()),
        median=float(np.median(margin_C)),
        below=float((margin_C < 0).mean()),
        at_zero=float((margin_C == 0).mean()),
        beyond=int((size > reach).sum()),
    )


def _length_bias(d: Array, p: Array, length: Array, names: Codes | None) -> LengthBias:
    both = np.concatenate([d, -d]), np.concatenate([length, -length])
    unequal = length != 0
    model = (np.sign(d * np.sign(length))[unequal] + 1) / 2
    label = np.where(length > 0, p, 1 - p)[unequal]
    return LengthBias(
        pearson(*both),
        spearman(*both),
        share_interval(model, _at(names, unequal)),
        share_interval(label, _at(names, unequal)),
    )


def _by_length(right: Array, length: Array, names: Codes | None) -> tuple[LengthBin, ...]:
    """The accuracy in bins of about equal counts; equal lengths are in one bin."""
    order = np.argsort(length, kind="stable")
    right, length = right[order], length[order]
    cuts = [len(length) * number // LENGTH_BINS for number in range(1, LENGTH_BINS)]
    starts = np.searchsorted(length, length[cuts] if length.size else []).tolist()
    ends = [*sorted({start for start in starts if start}), len(length)]
    found, start = [], 0
    for end in ends if length.size else ():
        inside = share_interval(
            right[start:end], None if names is None else names[order[start:end]]
        )
        found.append(LengthBin(float(length[start]), float(length[end - 1]), inside))
        start = end
    return tuple(found)
