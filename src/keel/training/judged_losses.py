"""Losses on judged rows (of a policy, and of both kinds of reward model), and metrics on the
validation rows, from the model's own scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.preferences import PreferenceLoss
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
from keel.learn.memory import TokenBudget
from keel.models.packed import pack, sizes_on
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.models.reward import Answered, RewardModel, pack_answers
from keel.objective import preference
from keel.objective.segments import segment_sum
from keel.platform.files import make_folder
from keel.training.judged_data import EncodedPair, Marked, sizes_of
from keel.types import KeelError


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """A loss of the policy on judged answers, and the models that score them.

    `keys` are what the loss reads. Answers of other prompts are cut at `limit` tokens.
    """

    policy: Policy
    reference: Reference | None
    budget: TokenBudget
    loss: PreferenceLoss
    keys: Mapping[str, float]
    limit: int | None = None

    def backward(self, rows: Sequence[Any], token_budget: int) -> dict[str, float]:
        """The gradient of the mean loss over the pairs, or over the labelled answers."""
        of_labels = self.loss.records == "labels"
        return (self._labels if of_labels else self._pairs)(rows, token_budget)

    def _pairs(self, pairs: Sequence[EncodedPair], token_budget: int) -> dict[str, float]:
        sums: dict[str, float] = {}
        keys = dict(self.keys)
        nll = keys.pop("nll")
        whole = self.loss.prompt and nll > 0
        answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
        shares = [share for pair in pairs for share in (pair.probability, 1 - pair.probability)]
        tokens = sum(
            share * (len(answer.tokens) - (1 if whole else answer.begins))
            for answer, share in zip(answers, shares, strict=True)
        )
        for span in sizes_of(pairs, self.policy.device).spans(token_budget):
            part = slice(2 * span.start, 2 * span.stop)
            ratio_S, log_prob_S = self._scored(answers[part], whole)
            share_S = ratio_S.new_tensor(shares[part])
            score_S = self.loss.scores(ratio_S)
            gap_C = score_S[0::2] - score_S[1::2]
            loss_C = self.loss(gap_C, share_S[0::2], **keys)
            if nll:
                nll_S = len(pairs) * preference.chosen_nll(log_prob_S, share_S, tokens=tokens)
                loss_C = loss_C + nll * (nll_S[0::2] + nll_S[1::2])
                _add(sums, len(pairs), nll=nll_S.detach())
            (loss_C.sum() / len(pairs)).backward()  # type: ignore[no-untyped-call]
            implied_S = self.keys["beta"] * ratio_S.detach()
            shown = {
                "loss": loss_C.detach(),
                "rewards/chosen": implied_S[0::2],
                "rewards/rejected": implied_S[1::2],
                "rewards/margins": implied_S[0::2] - implied_S[1::2],
                "rewards/accuracies": gap_C > 0,
            }
            _add(sums, len(pairs), **shown)
        return sums

    def _labels(self, rows: Sequence[Marked], token_budget: int) -> dict[str, float]:
        answers, labels = [row.answer for row in rows], [row.labels[0] for row in rows]
        others = self._exchanged(answers)
        point = preference.reference_point(self._ratios(others, token_budget))
        sums = {"kl/mismatched": float(point)}
        desired = sum(label or 0.0 for label in labels)
        for span in sizes_of(rows, self.policy.device).spans(token_budget):
            ratio_S, _ = self._scored(answers[span])
            label_S = ratio_S.new_tensor(labels[span])
            loss_S = self.loss(ratio_S, label_S, point, **self.keys)
            (loss_S.sum() / len(rows)).backward()  # type: ignore[no-untyped-call]
            _add(sums, len(rows), loss=loss_S.detach())
            implied_S = self.keys["beta"] * ratio_S.detach()
            if desired > 0:
                _add(sums, desired, **{"rewards/chosen": label_S * implied_S})
            if desired < len(rows):
                rest = len(rows) - desired
                _add(sums, rest, **{"rewards/rejected": (1 - label_S) * implied_S})
        if 0 < desired < len(rows):
            sums["rewards/margins"] = sums["rewards/chosen"] - sums["rewards/rejected"]
        return sums

    def _exchanged(self, answers: Sequence[Answered]) -> list[Answered]:
        """Each prompt with the answer of the row before it in the step, as TRL pairs them."""
        return [
            replace(
                own, tokens=(own.tokens[: own.begins] + other.tokens[other.begins :])[: self.limit]
            )
            for own, other in zip(answers, (*answers[-1:], *answers[:-1]), strict=True)
        ]

    def _scored(self, answers: Sequence[Answered], whole: bool = False) -> tuple[Tensor, Tensor]:
        """Of each answer its log-ratio to the reference, or the log-probability without one (a sum
        over its tokens, or their mean), and its log-probability, with the prompt's if `whole`."""
        first = [1 if whole else answer.begins for answer in answers]
        packed = pack(
            [torch.tensor(answer.tokens) for answer in answers],
            [torch.arange(at, len(a.tokens)) for at, a in zip(first, answers, strict=True)],
            self.policy.device,
        )
        parts = [
            n
            for at, answer in zip(first, answers, strict=True)
            for n in (answer.begins - at, len(answer.tokens) - answer.begins)
        ]
        parts_P = torch.tensor(parts, device=packed.device)

        def total(log_prob_N: Tensor) -> tuple[Tensor, Tensor]:
            sum_P = segment_sum(log_prob_N, parts_P)
            own_S = sum_P[1::2] / parts_P[1::2] if self.loss.means else sum_P[1::2]
            return own_S, sum_P[0::2] + sum_P[1::2]

        now_S, log_prob_S = total(self.policy.scores(packed).log_prob_N)
        if self.reference is not None:
            now_S = now_S - total(self.reference.log_probs(packed))[0]
        return now_S, log_prob_S

    @torch.no_grad()
    def _ratios(self, answers: Sequence[Answered], token_budget: int) -> Tensor:
        lengths = [len(answer.tokens) for answer in answers]
        spans = sizes_on(self.policy.device, lengths).spans(token_budget)
        return torch.cat([self._scored(answers[span])[0] for span in spans])

    def implied_rewards(self, answers: Sequence[Answered]) -> list[list[float]]:
        """The reward of each answer that the policy implies: β times its log-ratio, or the log-odds
        whose difference is that of ORPO's preference."""
        ratio_S = self._ratios(answers, self.budget.tokens)
        rewards_S = self.loss.scores(ratio_S) if self.loss.odds else self.keys["beta"] * ratio_S
        return [[value] for value in rewards_S.tolist()]


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


def _add(sums: dict[str, float], total: float, **values: Tensor) -> None:
    """Add each value's share of a mean over `total` to the sums."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value.sum()) / (total or 1)


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
            f"the scores of {wrong} of {len(scores)} validation answers are not "
            "finite: lower optimizer.learning_rate, or resume from an earlier checkpoint"
        )
    return scores
