"""From verdicts to advantages: what a rollout's rewards make of a measured batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.algorithms.spec import Algorithm
from keel.learn.batch import Batch
from keel.learn.loss import advantages, penalties, reads_steps, returns
from keel.objective import segments
from keel.objective.signals import Signals
from keel.types import Group, KeelError, Verdict

ROUNDING = 1e-9
"""A reward that differs from the sum of its steps by less, relative to them, holds nothing else."""


@dataclass(frozen=True, eq=False)
class RolloutRewards:
    """Rewards as tensors, for the sequences of a batch in their order; NaN where none spoke.

    `baseline_S` is the reward of the greedy completion of each sequence's prompt. Steps (K) are
    those of process rewards, with the outcomes as steps that end with the completion; they add up
    to `reward_S`. `step_end_K` counts from the start of the step's own sequence.
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
    dtype: torch.dtype = torch.float64,
) -> RolloutRewards:
    """The groups' verdicts, flat. Step ends are moved from completion tokens to written
    ones; a completion without written tokens has no place for any.

    Where there are steps, what the reward holds besides them (an outcome, a punishment of length)
    is a step that ends with the completion: of every completion of a group, 0 included, as soon as
    one of them has it.
    """
    rewards: list[float] = []
    steps: list[tuple[float, int, int]] = []
    outcomes: list[tuple[float, int, int]] = []
    for group, judged in zip(groups, verdicts, strict=True):
        ends: list[tuple[float, int, int]] = []
        given = False
        for completion, verdict in zip(group.completions, judged, strict=True):
            written = completion.written.cumsum()
            place = len(rewards)
            rewards.append(float("nan") if verdict.reward is None else verdict.reward)
            if verdict.reward is None or not completion.written.any():
                continue
            steps += [(s.reward, max(int(written[s.end]) - 1, 0), place) for s in verdict.steps]
            own = outcome_of(verdict)
            given |= own is not None
            ends.append((own or 0.0, int(written[-1]) - 1, place))
        outcomes += ends if given else []
    baseline = None
    if greedy is not None:
        sizes = torch.tensor([len(group.completions) for group in groups])
        baseline = torch.tensor(list(greedy), dtype=dtype).repeat_interleave(sizes)
    reward_S = torch.tensor(rewards, dtype=dtype)
    if not steps:
        return RolloutRewards(reward_S, baseline)
    values, places, sequences = zip(*steps, *outcomes, strict=True)
    return RolloutRewards(
        reward_S,
        baseline,
        step_reward_K=torch.tensor(values, dtype=dtype),
        step_end_K=torch.tensor(places),
        step_sequence_K=torch.tensor(sequences),
    )


def outcome_of(verdict: Verdict) -> float | None:
    """What the reward holds besides its steps; None where it is nothing but them."""
    if verdict.outcome is not None or verdict.reward is None:
        return verdict.outcome
    own = [step.reward for step in verdict.steps]
    rest = verdict.reward - math.fsum(own)
    scale = max(1.0, math.fsum(map(abs, own)))
    return rest if abs(rest) > ROUNDING * scale else None


def check_steps(row: Algorithm, there: bool) -> None:
    """Raise KeelError where rewards of steps are there and the row cannot learn from them, or the
    reverse."""
    kind = row.advantage.kind
    if there and not reads_steps(row):
        raise KeelError(
            f'algorithm.advantage "{kind}" is of whole answers, and rewards.functions gives '
            "rewards of steps, whose places would be lost: set algorithm = "
            '"grpo_process" or "ppo", or give one number for each answer (of the reward "process" '
            'with the option aggregate = "min")'
        )
    if row.needs_steps and not there:
        raise KeelError(
            f'algorithm.advantage "{kind}" needs rewards of steps and there are none: name a '
            "process reward in rewards.functions (for each completion a list of "
            "(index of the step's last token, reward))"
        )


def estimate(row: Algorithm, batch: Batch, judged: RolloutRewards, beta: float) -> Batch:
    """The measured batch with advantages (before whitening) and returns, in float64.

    Raises KeelError where there are rewards of steps that the advantage cannot use.
    """
    if row.needs_steps and judged.step_reward_K is None:
        judged = _as_steps(judged, batch.lengths_S)
    check_steps(row, judged.step_reward_K is not None)
    device = batch.target_N.device
    lengths_S = batch.lengths_S
    outcome_S = judged.reward_S.to(device)
    penalty_N = penalties(row, batch, beta).to(outcome_S)
    starts_S = lengths_S.cumsum(0) - lengths_S
    step_reward_K = _on(judged.step_reward_K, device)
    step_sequence_K = _on(judged.step_sequence_K, device)
    step_end_K = None
    if step_reward_K is None or step_sequence_K is None or judged.step_end_K is None:
        placed_N = segments.on_last(outcome_S, lengths_S)
    else:
        step_end_K = judged.step_end_K.to(device) + starts_S[step_sequence_K]
        silent_S = torch.where(outcome_S.isnan(), outcome_S, torch.zeros_like(outcome_S))
        placed_N = segments.on_last(silent_S, lengths_S)
        placed_N = placed_N.index_add(0, step_end_K, step_reward_K)
    reward_N = penalty_N + placed_N
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
        step_reward_K=step_reward_K,
        step_sequence_K=step_sequence_K,
        step_end_K=step_end_K,
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


def _as_steps(judged: RolloutRewards, lengths_S: Tensor) -> RolloutRewards:
    """Each completion's reward as its one step: no reward of the batch has given any, as where a
    gate has shut all of them out."""
    lengths_S = lengths_S.cpu()
    at = (~judged.reward_S.isnan() & (lengths_S > 0)).nonzero().flatten()
    return replace(
        judged,
        step_reward_K=judged.reward_S[at],
        step_end_K=lengths_S[at] - 1,
        step_sequence_K=at,
    )


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
