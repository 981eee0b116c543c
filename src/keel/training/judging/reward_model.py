"""Reward models: an outcome model on pairs or labels, a process model on steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keel.models.reward import RewardModel, pack_answers
from keel.objective.preference import bradley_terry, centering, label_cross_entropy
from keel.training.judging.data import EncodedPair, Marked, sizes_of
from keel.training.supervised import GradientStep


def pairs_backward(
    model: RewardModel, centering_weight: float, rows: Sequence[EncodedPair], token_budget: int
) -> GradientStep:
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
        loss_C = bradley_terry(chosen_C, rejected_C, probability_C, margin_C)
        centre_C = centering(chosen_C, rejected_C)
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
    return GradientStep(sums, sum(row.length for row in rows))


def labels_backward(model: RewardModel, rows: Sequence[Marked], token_budget: int) -> GradientStep:
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
        loss_K = label_cross_entropy(logit_K, label_K)
        (loss_K.sum() / max(judged, 1)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            _add(sums, judged, loss=loss_K, mean_reward=logit_K)
            _add(sums, decided, accuracy=_right(logit_K, label_K))
    return GradientStep(sums, sum(row.length for row in rows))


def _right(logit_K: Tensor, label_K: Tensor) -> Tensor:
    """1 where the sign is that of the label, ½ at a logit of 0; 0 where the label is ½."""
    toward_K = torch.where(label_K > 0.5, logit_K, -logit_K).sign()
    return torch.where(label_K == 0.5, torch.zeros_like(toward_K), (toward_K + 1) / 2)


def _add(sums: dict[str, float], total: int, **values: Tensor) -> None:
    """Add each value's share of a mean over `total` to the sums."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value.sum()) / max(total, 1)
