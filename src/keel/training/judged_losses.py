"""Losses on judged rows (DPO and IPO of a policy, those of both kinds of reward model), and metrics
on the validation rows, from the model's own scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

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
from keel.config.judging import HEADLINE
from keel.config.stage import Records
from keel.data.judged_rows import first_wrong
from keel.learn.batch import TokenBudget
from keel.models.packed import Packed, pack, sizes_on
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.models.reward import Answered, RewardModel, pack_answers
from keel.objective import preference
from keel.objective.segments import segment_mean, segment_sum
from keel.platform.files import make_folder
from keel.training.judged_data import EncodedPair, Marked, sizes_of
from keel.types import KeelError


@dataclass(frozen=True, eq=False)
class DPO:
    """The loss on pairs, and the models that it scores them with."""

    policy: Policy
    reference: Reference
    budget: TokenBudget
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    beta: float = 0.1
    smoothing: float = 0.0

    def backward(self, pairs: Sequence[EncodedPair], token_budget: int) -> dict[str, float]:
        """The gradient of the mean loss over the pairs."""
        sums: dict[str, float] = {}
        for span in sizes_of(pairs, self.policy.device).spans(token_budget):
            part = pairs[span]
            answers = [answer for pair in part for answer in (pair.chosen, pair.rejected)]
            now_S = self.log_probs(answers, reference=False)
            with torch.no_grad():
                then_S = self.log_probs(answers, reference=True)
            gap_C = preference.log_ratio_gap(now_S[0::2], now_S[1::2], then_S[0::2], then_S[1::2])
            loss_C = self.pair_loss(gap_C, gap_C.new_tensor([pair.probability for pair in part]))
            (loss_C.sum() / len(pairs)).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                implied_S = self.beta * (now_S - then_S)
                shown = {
                    "loss": loss_C,
                    "rewards/chosen": implied_S[0::2],
                    "rewards/rejected": implied_S[1::2],
                    "rewards/margins": self.beta * gap_C,
                    "rewards/accuracies": gap_C > 0,
                }
                _add(sums, len(pairs), **shown)
        return sums

    def pair_loss(
        self, gap_C: Float[Tensor, " C"], probability_C: Float[Tensor, " C"]
    ) -> Float[Tensor, " C"]:
        """The loss of each pair."""
        if self.loss == "ipo":
            return preference.ipo(gap_C, probability_C, beta=self.beta)
        return preference.dpo(gap_C, probability_C, beta=self.beta, smoothing=self.smoothing)

    def log_probs(self, answers: Sequence[Answered], reference: bool) -> Float[Tensor, " S"]:
        """Of each answer given its prompt: summed over its tokens, or their mean (ipo)."""
        packed, lengths = packed_answers(answers, self.policy.device)
        if reference:
            log_prob_N = self.reference.log_probs(packed)
        else:
            log_prob_N = self.policy.scores(packed).log_prob_N
        lengths_S = torch.tensor(lengths, device=packed.device)
        reduce = segment_mean if self.loss == "ipo" else segment_sum
        return reduce(log_prob_N, lengths_S)

    @torch.no_grad()
    def implied_rewards(self, answers: Sequence[Answered]) -> list[list[float]]:
        """The reward of each answer that the policy implies: β (log π − log π_ref)."""
        rewards: list[list[float]] = []
        lengths = [len(answer.tokens) for answer in answers]
        for span in sizes_on(self.policy.device, lengths).spans(self.budget.tokens):
            now_S = self.log_probs(answers[span], reference=False)
            then_S = self.log_probs(answers[span], reference=True)
            rewards += [[value] for value in (self.beta * (now_S - then_S)).tolist()]
        return rewards


def packed_answers(answers: Sequence[Answered], device: torch.device) -> tuple[Packed, list[int]]:
    """The answers as one input, with their own tokens scored; how many those are."""
    lengths = [len(answer.tokens) - answer.begins for answer in answers]
    return pack(
        [torch.tensor(answer.tokens) for answer in answers],
        [torch.arange(answer.begins, len(answer.tokens)) for answer in answers],
        device,
    ), lengths


def pairs_backward(
    model: RewardModel, centering_weight: float, rows: Sequence[EncodedPair], token_budget: int
) -> dict[str, float]:
    """The gradient of the mean Bradley–Terry loss over pairs, and of the centring."""
    sums: dict[str, float] = {}
    decided = sum(row.probability != 0.5 for row in rows)
    for span in sizes_of(rows, model.device).spans(token_budget):
        part = rows[span]
        logit_K = model.logits(
            pack_answers(
                [answer for row in part for answer in (row.chosen, row.rejected)], model.device
            )
        )
        chosen_C, rejected_C = logit_K[0::2], logit_K[1::2]
        probability_C = logit_K.new_tensor([row.probability for row in part])
        margin_C = logit_K.new_tensor([row.margin for row in part])
        loss_C = preference.bradley_terry(chosen_C, rejected_C, probability_C, margin_C)
        centre_C = preference.centering(chosen_C, rejected_C)
        ((loss_C + centering_weight * centre_C).sum() / len(rows)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            gap_C = chosen_C - rejected_C
            _add(
                sums,
                len(rows),
                loss=loss_C + centering_weight * centre_C,
                margin=gap_C,
                mean_reward=(chosen_C + rejected_C) / 2,
            )
            _add(sums, decided, accuracy=_right(gap_C, probability_C))
    return sums


def labels_backward(
    model: RewardModel, rows: Sequence[Marked], token_budget: int
) -> dict[str, float]:
    """The gradient of the mean cross-entropy over all labels of the step's answers."""
    sums: dict[str, float] = {}
    every = [label for row in rows for label in row.labels if label is not None]
    judged, decided = len(every), sum(label != 0.5 for label in every)
    for span in sizes_of(rows, model.device).spans(token_budget):
        part = rows[span]
        logit_K = model.logits(pack_answers([row.answer for row in part], model.device))
        labels = [label for row in part for label in row.labels]
        there_K = torch.tensor([y is not None for y in labels], device=model.device)
        label_K = logit_K.new_tensor([0.0 if y is None else y for y in labels])[there_K]
        logit_K = logit_K[there_K]
        loss_K = preference.label_cross_entropy(logit_K, label_K)
        (loss_K.sum() / max(judged, 1)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            _add(sums, judged, loss=loss_K, mean_reward=logit_K)
            _add(sums, decided, accuracy=_right(logit_K, label_K))
    return sums


def _right(logit_K: Tensor, label_K: Tensor) -> Tensor:
    """1 if the sign is that of the label, ½ at a logit of 0; 0 if the label is ½."""
    toward_K = torch.where(label_K > 0.5, logit_K, -logit_K).sign()
    return torch.where(label_K == 0.5, torch.zeros_like(toward_K), (toward_K + 1) / 2)


def _add(sums: dict[str, float], total: int, **values: Tensor) -> None:
    """Add each value's share of a mean over `total` to the sums."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value.sum()) / max(total, 1)


# ---------------------------------------------------------------- validation metrics


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
