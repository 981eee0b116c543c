"""From verdicts to advantages: what a rollout's rewards make of a measured batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.algorithms.spec import Algorithm
from keel.learn.batch import Batch
from keel.learn.loss import Signals, advantages, penalties, returns
from keel.objective import segments
from keel.types import Group, KeelError, Verdict

ROUNDING = 1e-9
"""A reward that differs from the sum of its steps by less holds nothing beside them."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """Rewards as tensors, for the sequences of a batch in their order; NaN where none spoke.

    `baseline_S` is the reward of the greedy completion of each sequence's prompt. Steps (K) are
    those of process rewards; `step_end_K` counts from the start of the step's own sequence.
    """

    reward_S: Float[Tensor, " S"]
    baseline_S: Float[Tensor, " S"] | None = None
    step_reward_K: Float[Tensor, " K"] | None = None
    step_end_K: Int[Tensor, " K"] | None = None
    step_sequence_K: Int[Tensor, " K"] | None = None


def outcome(
    groups: Sequence[Group],
    verdicts: Sequence[Sequence[Verdict]],
    greedy: Sequence[float] | None,
    dtype: torch.dtype = torch.float32,
) -> Outcome:
    """The groups' verdicts, flat. Step ends are moved from completion tokens to written ones.

    Where there are steps, what the reward holds beside them (an outcome, a punishment of length)
    is a step that ends with the completion.
    """
    rewards: list[float] = []
    steps: list[tuple[float, int, int]] = []
    outcomes: list[tuple[float, int, int]] = []
    for group, judged in zip(groups, verdicts, strict=True):
        for completion, verdict in zip(group.completions, judged, strict=True):
            written = completion.written.cumsum()
            for step in verdict.steps:
                end = max(int(written[step.end]) - 1, 0)
                steps.append((step.reward, end, len(rewards)))
            beside = (verdict.reward or 0.0) - sum(step.reward for step in verdict.steps)
            if abs(beside) > ROUNDING:
                outcomes.append((beside, int(written[-1]) - 1, len(rewards)))
            rewards.append(float("nan") if verdict.reward is None else verdict.reward)
    baseline = None
    if greedy is not None:
        sizes = torch.tensor([len(group.completions) for group in groups])
        baseline = torch.tensor(list(greedy), dtype=dtype).repeat_interleave(sizes)
    reward_S = torch.tensor(rewards, dtype=dtype)
    if not steps:
        return Outcome(reward_S, baseline)
    values, ends, sequences = zip(*steps, *outcomes, strict=True)
    return Outcome(
        reward_S,
        baseline,
        step_reward_K=torch.tensor(values, dtype=dtype),
        step_end_K=torch.tensor(ends),
        step_sequence_K=torch.tensor(sequences),
    )


def estimate(row: Algorithm, batch: Batch, judged: Outcome, beta: float) -> Batch:
    """The measured batch with advantages (before whitening) and returns."""
    if row.needs_steps and judged.step_reward_K is None:
        raise KeelError(
            f'advantage "{row.advantage.kind}" wants rewards per step and there are none: name a '
            "process reward in rewards.functions (for each completion a list of "
            "(index of the step's last token, reward))"
        )
    device = batch.target_N.device
    lengths_S = batch.lengths_S
    outcome_S = judged.reward_S.to(device)
    penalty_N = penalties(row, batch, beta)
    reward_N = penalty_N + segments.on_last(outcome_S, lengths_S)
    starts_S = lengths_S.cumsum(0) - lengths_S
    signals = Signals(
        outcome_S=outcome_S,
        penalty_N=penalty_N,
        reward_S=segments.segment_sum(reward_N, lengths_S),
        reward_N=reward_N,
        lengths_S=lengths_S,
        groups_S=batch.groups_S,
        value_N=batch.value_N,
        next_value_N=None if batch.value_N is None else segments.shift(batch.value_N, lengths_S),
        baseline_S=_on(judged.baseline_S, device),
        step_reward_K=_on(judged.step_reward_K, device),
        step_sequence_K=_on(judged.step_sequence_K, device),
        step_end_K=None
        if judged.step_end_K is None or judged.step_sequence_K is None
        else judged.step_end_K.to(device) + starts_S[judged.step_sequence_K.to(device)],
    )
    advantage_N = advantages(row, signals)
    silent_S = outcome_S.isnan()
    return replace(
        batch,
        advantage_N=advantage_N,
        return_N=returns(row, signals, advantage_N),
        present_N=segments.spread((~silent_S).to(advantage_N), lengths_S) > 0
        if bool(silent_S.any())
        else None,
    )


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
