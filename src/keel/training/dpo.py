"""DPO: the policy learns from pairs against its own beginning, without a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from keel.config.judging import DPOStage
from keel.learn.optimizer import AdamW
from keel.learn.token_budget import TokenBudget
from keel.models.packed import Packed, pack, sizes_on
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.models.reward import Answered
from keel.objective import preference
from keel.objective.segments import segment_mean, segment_sum
from keel.runs.writer import RunWriter
from keel.training import supervised as fit
from keel.training.judged_data import EncodedPair, Ready
from keel.training.judged_steps import judged_rows, sizes_of
from keel.training.reward_metrics import Measured, measure_pairs
from keel.training.state import Progress


@dataclass(frozen=True, eq=False)
class Preferring:
    """What a DPO stage works with."""

    stage: DPOStage
    policy: Policy
    reference: Reference
    optimizer: AdamW
    budget: TokenBudget
    rows: Ready[EncodedPair]
    show: Callable[[Measured], None]
    writer: RunWriter
    seed: int


def run(work: Preferring, progress: Progress) -> Progress:
    """From `progress` to the last step of the stage, or until the run is asked to stop."""
    stage = work.stage
    return fit.run(
        fit.Fit(
            steps=stage.steps,
            rows=judged_rows(
                work.rows,
                stage.batch_size,
                work.seed,
                work.policy.device,
                lambda rows, tokens: learn(work, rows, tokens),
            ),
            policy=work.policy,
            optimizer=work.optimizer,
            choice=stage.optimizer,
            budget=work.budget,
            on_nonfinite=stage.on_nonfinite,
            checkpoints=stage.checkpoints,
            writer=work.writer,
            modules={},
            reference=work.reference,
            evaluate=(lambda: measure(work)) if work.rows.heldout else None,
            evaluate_every=stage.evaluation.every,
            show=work.show,
        ),
        progress,
    )


def learn(work: Preferring, rows: Sequence[EncodedPair], token_budget: int) -> fit.Learned:
    """The gradient of the mean loss over the pairs."""
    stage = work.stage
    sums: dict[str, float] = {}
    for span in sizes_of(rows, work.policy.device).spans(token_budget):
        part = rows[span]
        answers = [answer for row in part for answer in (row.chosen, row.rejected)]
        now_S = log_probs(work, answers, reference=False)
        with torch.no_grad():
            then_S = log_probs(work, answers, reference=True)
        gap_C = preference.log_ratio_gap(now_S[0::2], now_S[1::2], then_S[0::2], then_S[1::2])
        loss_C = pair_loss(stage, gap_C, gap_C.new_tensor([row.probability for row in part]))
        (loss_C.sum() / len(rows)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            implied_S = stage.beta * (now_S - then_S)
            shown = {
                "loss": loss_C,
                "rewards/chosen": implied_S[0::2],
                "rewards/rejected": implied_S[1::2],
                "rewards/margins": stage.beta * gap_C,
                "rewards/accuracies": gap_C > 0,
            }
            for name, value in shown.items():
                sums[name] = sums.get(name, 0.0) + float(value.sum()) / len(rows)
    return fit.Learned(sums, sum(row.length for row in rows))


def pair_loss(
    stage: DPOStage, gap_C: Float[Tensor, " C"], probability_C: Float[Tensor, " C"]
) -> Float[Tensor, " C"]:
    """The stage's loss of each pair."""
    if stage.loss == "ipo":
        return preference.ipo(gap_C, probability_C, beta=stage.beta)
    return preference.dpo(gap_C, probability_C, beta=stage.beta, smoothing=stage.smoothing)


def log_probs(
    work: Preferring, answers: Sequence[Answered], reference: bool
) -> Float[Tensor, " S"]:
    """Of each answer: summed over its tokens, or their mean (ipo)."""
    packed, lengths = packed_answers(answers, work.policy.device)
    if reference:
        log_prob_N = work.reference.log_probs(packed)
    else:
        log_prob_N = work.policy.scores(packed).log_prob_N
    lengths_S = torch.tensor(lengths, device=packed.device)
    reduce = segment_mean if work.stage.loss == "ipo" else segment_sum
    return reduce(log_prob_N, lengths_S)


def packed_answers(answers: Sequence[Answered], device: torch.device) -> tuple[Packed, list[int]]:
    """The answers as one input, all tokens after the prompts scored; how many those are."""
    lengths = [len(answer.tokens) - answer.begins for answer in answers]
    return pack(
        [torch.tensor(answer.tokens) for answer in answers],
        [torch.arange(answer.begins, len(answer.tokens)) for answer in answers],
        device,
    ), lengths


def measure(work: Preferring) -> Measured:
    """What the held-out pairs say of the reward that the policy implies."""

    @torch.no_grad()
    def judge(answers: Sequence[Answered]) -> list[list[float]]:
        scores: list[list[float]] = []
        lengths = [len(answer.tokens) for answer in answers]
        for span in sizes_on(work.policy.device, lengths).spans(work.budget.tokens):
            now_S = log_probs(work, answers[span], reference=False)
            then_S = log_probs(work, answers[span], reference=True)
            scores += [[value] for value in (work.stage.beta * (now_S - then_S)).tolist()]
        return scores

    return measure_pairs(work.rows.heldout, judge)
