"""Validation metrics of reward models, computed from the model's own scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.calibration import (
    FirstErrorReport,
    LabelReport,
    PairReport,
    first_error_report,
    label_report,
    length_correlation,
    pair_report,
)
from keel.analysis.plots import length_picture, margin_picture, reliability_picture
from keel.config.stage import Records
from keel.data.judged_rows import first_wrong
from keel.models.reward import Answered
from keel.platform.files import make_folder
from keel.training.judging.data import EncodedPair, Marked
from keel.types import KeelError

HEADLINE = ("accuracy", "auc", "log_loss", "brier", "ece", "f1")
Judge = Callable[[Sequence[Answered]], list[list[float]]]
"""A model's scores of answers, at each of their steps' ends."""


@dataclass(frozen=True, eq=False)
class Measured:
    """An evaluation. `calibrated` is the report whose bins are the reliability picture."""

    kind: Records
    report: PairReport | LabelReport | FirstErrorReport
    calibrated: PairReport | LabelReport
    extra: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"kind": self.kind, **self.report.as_dict(), **self.extra}

    def headline(self) -> dict[str, float]:
        """The figures that are worth a curve; intervals by their mean."""
        found: dict[str, float] = {}
        for name, value in self.as_dict().items():
            value = value.get("mean") if isinstance(value, dict) else value
            if name in HEADLINE and isinstance(value, int | float):
                found[name] = float(value)
        return found


def reward_model_metrics(
    records: Records, rows: Sequence[Any], judge: Judge, threshold: float = 0.5
) -> Measured:
    """The metrics of a model on examples of a kind; `threshold` is of labelled steps."""
    if records == "steps":
        return measure_steps(rows, judge, threshold)
    return measure_pairs(rows, judge) if records == "pairs" else measure_labels(rows, judge)


def measure_pairs(rows: Sequence[EncodedPair], judge: Judge) -> Measured:
    """Of pairs: accuracy, log loss, Brier, calibration, margins, and scores against lengths."""
    answers = [answer for row in rows for answer in (row.chosen, row.rejected)]
    score_S = np.array([scores[0] for scores in _finite(judge(answers))])
    length_S = np.array([_length(answer) for answer in answers], dtype=np.float64)
    report = pair_report(
        score_S[0::2] - score_S[1::2],
        [row.probability for row in rows],
        length_S[0::2] - length_S[1::2],
        [row.cluster for row in rows],
    )
    score = {"mean": float(score_S.mean()), "std": float(score_S.std())}
    lengths = length_correlation(score_S, length_S)
    return Measured("pairs", report, report, {"score": score, "score_and_length": lengths})


def measure_labels(rows: Sequence[Marked], judge: Judge) -> Measured:
    """Of labelled answers: accuracy, AUC, log loss, Brier, calibration, scores against lengths."""
    answers = [row.answer for row in rows]
    logit_S = np.array([scores[0] for scores in _finite(judge(answers))])
    length_S = [_length(answer) for answer in answers]
    report = label_report(
        logit_S,
        [float(row.labels[0] or 0) for row in rows],
        [row.cluster for row in rows],
        length_S,
    )
    lengths = length_correlation(logit_S, length_S)
    return Measured("labels", report, report, {"score_and_length": lengths})


def measure_steps(rows: Sequence[Marked], judge: Judge, threshold: float) -> Measured:
    """Of answers in steps: the first wrong step and, step by step, the metrics of `measure_labels`.

    The first step whose probability of being right is under `threshold` is the predicted mistake.
    """
    logits = _finite(judge([row.answer for row in rows]))
    found = first_error_report(
        [first_under(scores, threshold) for scores in logits],
        [first_wrong(row.labels) for row in rows],
        [row.cluster for row in rows],
    )
    judged = [
        (z, y, row.cluster)
        for scores, row in zip(logits, rows, strict=True)
        for z, y in zip(scores, row.labels, strict=True)
        if y is not None
    ]
    z_K, y_K, cluster_K = zip(*judged, strict=True)
    steps = label_report(z_K, y_K, cluster_K)
    plain = steps.as_dict()
    extra = {"steps": plain, **{name: plain[name] for name in ("auc", "log_loss", "brier", "ece")}}
    return Measured("steps", found, steps, extra)


def first_under(logits: Sequence[float], threshold: float) -> int | None:
    """The first step whose probability σ(z) is under the threshold; None if there is none."""
    return next((i for i, z in enumerate(logits) if (1 + np.tanh(z / 2)) / 2 < threshold), None)


def plot_calibration(measured: Measured, folder: Path, name: str, title: str) -> None:
    """Plot NAME-reliability.png, of pairs NAME-margins.png, and NAME-accuracy-by-length.png if
    the report knows the lengths."""
    make_folder(folder)
    reliability_picture(measured.calibrated, folder / f"{name}-reliability.png", title)
    if measured.calibrated.by_length:
        length_picture(measured.calibrated, folder / f"{name}-accuracy-by-length.png", title)
    if isinstance(measured.report, PairReport):
        margin_picture(measured.report, folder / f"{name}-margins.png", title)


def _length(answer: Answered) -> int:
    """Tokens of the answer alone: prompt lengths vary much more."""
    return len(answer.tokens) - answer.begins


def _finite(scores: list[list[float]]) -> list[list[float]]:
    wrong = sum(not np.isfinite(one).all() for one in scores)
    if wrong:
        raise KeelError(
            f"the reward model's scores of {wrong} of {len(scores)} validation answers are not "
            "finite: lower optimizer.learning_rate, or resume from an earlier checkpoint"
        )
    return scores
