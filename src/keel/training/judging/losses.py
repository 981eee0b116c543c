"""Losses on judged rows: DPO and IPO of a policy, and those of both kinds of reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from keel.learn.token_budget import TokenBudget
from keel.models.packed import Packed, pack, sizes_on
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.models.reward import Answered, RewardModel, pack_answers
from keel.objective import preference
from keel.objective.segments import segment_mean, segment_sum
from keel.training.judging.data import EncodedPair, Marked, sizes_of


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
                for name, value in shown.items():
                    sums[name] = sums.get(name, 0.0) + float(value.sum()) / len(pairs)
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
