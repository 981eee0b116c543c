"""Whether a reward model's uncertainty is right: standard deviations against errors. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keel.analysis.calibration import BINS, CalibrationReport, PairReport, pair_report
from keel.analysis.proportions import clustered_mean, share_interval
from keel.analysis.ranks import spearman
from keel.analysis.statistics import Array, Interval

WITHIN = 1.959963984540054
"""Standard deviations that hold 95 % of normal errors."""


@dataclass(frozen=True, slots=True)
class SpreadReport(CalibrationReport):
    """Errors in units of the standard deviation that was predicted for each.

    `ratio` is 1 where the deviations are right on average, above 1 where they are too small;
    `within` is the share of errors below 1.96 of them, 95 % where errors are normal too;
    `rank` the rank correlation of deviation and absolute error, None where either is constant.
    """

    n: int
    ratio: Interval
    within: Interval
    rank: float | None


@dataclass(frozen=True, slots=True)
class PredictiveReport(CalibrationReport):
    """A predictive probability on labelled pairs, and by how much it beats that of the mean alone.

    `gain` is the log loss with σ(mean difference) less that with the predictive probability.
    """

    pairs: PairReport
    gain: Interval


def spread_report(
    error_C: npt.ArrayLike,
    deviation_C: npt.ArrayLike,
    clusters: Iterable[Hashable] | None = None,
) -> SpreadReport:
    """Whether predicted standard deviations s of reward differences match their errors e.

        ratio = √(mean of (e/s)²),   within = share of |e| ≤ 1.96 s

    The true difference must be known: from a synthetic reward, or from a model trained on far more
    labels. `ratio` has the root of `clustered_mean`'s interval, `within` `share_interval`'s.
    Source: the reduced χ² of residuals, Bevington and Robinson 2003, Data Reduction and Error
    Analysis for the Physical Sciences.

    Raises:
        ValueError: lengths that do not fit, or a deviation that is not above 0.
    """
    error, deviation = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (error_C, deviation_C))
    if error.size != deviation.size or not (deviation > 0).all():
        raise ValueError(f"{deviation.size} deviations above 0 for {error.size} errors")
    names = None if clusters is None else list(clusters)
    squared = clustered_mean((error / deviation) ** 2, names)
    ratio, low, high = (
        math.sqrt(max(end, 0.0)) for end in (squared.mean, squared.low, squared.high)
    )
    inside = (np.abs(error) <= WITHIN * deviation).astype(np.float64)
    return SpreadReport(
        n=error.size,
        ratio=Interval(ratio, low, high, squared.n),
        within=share_interval(inside, names),
        rank=spearman(deviation, np.abs(error)),
    )


def predictive_report(
    difference_C: npt.ArrayLike,
    predictive_logit_C: npt.ArrayLike,
    label_C: npt.ArrayLike,
    clusters: Iterable[Hashable] | None = None,
    bins: int = BINS,
) -> PredictiveReport:
    """Predicted probabilities against labels in bins, and whether the variance earns its place.

        gain = mean of ℓ(d) − ℓ(d̃),   ℓ(x) = −v log σ(x) − (1 − v) log σ(−x)

    with d the mean difference, d̃ the predictive log-odds (a variance pulls them towards 0) and v
    the label. Bins, losses and errors are `pair_report`'s of d̃.
    """
    names = None if clusters is None else list(clusters)
    report = pair_report(predictive_logit_C, label_C, clusters=names, bins=bins)
    label = np.asarray(label_C, dtype=np.float64).reshape(-1)
    plain, predictive = (
        _log_loss(np.asarray(x, dtype=np.float64).reshape(-1), label)
        for x in (difference_C, predictive_logit_C)
    )
    return PredictiveReport(report, clustered_mean(plain - predictive, names))


def _log_loss(logit: Array, label: Array) -> Array:
    return np.asarray(label * np.logaddexp(0, -logit) + (1 - label) * np.logaddexp(0, logit))
