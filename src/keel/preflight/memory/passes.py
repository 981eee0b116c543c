"""The passes of each kind of stage, as a dry run makes them.

They go through the project's own models, engine store and head, with token ids that mean nothing:
what a pass takes depends on lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from keel.engines.kv_cache import DecodeRows, Prefill
from keel.engines.model_runner import ModelRunner, pass_of
from keel.engines.prefix_cache import PrefixCache
from keel.engines.sampler import draw
from keel.engines.scheduler import DecodeBatch
from keel.models.backbone import autocast_for
from keel.models.families import head_of
from keel.models.head import steady_logits
from keel.models.packed import Packed, PackedSizes, sizes_on
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.models.reward import RewardModel
from keel.models.reward_inputs import PackedAnswers
from keel.models.value import Critic, ValueHead
from keel.types import Sampling

PREFILL_TOKENS = 16_384
"""The native engine's own bound on prompt tokens that enter in one step."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How long a sequence is: tokens before the first scored one, and the scored ones.

    Neighbours of one `group` have those before in common (-1: of none).
    """

    before: int
    scored: int
    group: int = -1

    @property
    def tokens(self) -> int:
        return self.before + self.scored


Row = tuple[Extent, ...]
"""Sequences that enter a pass together: one of them, or the two answers of a pair."""


@dataclass(frozen=True, eq=False)
class Twins:
    """The models of a stage on fake tensors."""

    policy: Policy
    reference: Reference | None = None
    value_head: ValueHead | None = None
    critic: Critic | None = None
    reward_model: RewardModel | None = None
    judges: tuple[RewardModel, ...] = ()

    def trained(self) -> list[nn.Parameter]:
        """The parameters that an optimizer of the stage moves."""
        if self.reward_model is not None:
            modules: list[nn.Module | None] = [self.reward_model]
        else:
            modules = [self.policy, self.value_head, self.critic]
        every = (p for module in modules if module is not None for p in module.parameters())
        return [p for p in every if p.requires_grad]


def tokens_of(rows: Sequence[Row]) -> int:
    """Tokens of rows that lie in one pass: what a reward model reads."""
    return PackedSizes(_lengths(rows), _shared(rows)).entering(slice(0, len(rows)))


def fed(rows: Sequence[Row]) -> int:
    """Those of them that enter a model which predicts tokens: all but each sequence's last."""
    return tokens_of(rows) - sum(map(len, rows))


def micro_batches(rows: Sequence[Row], token_budget: int, device: torch.device) -> list[list[Row]]:
    """The rows in order, cut as `PackedSizes` does."""
    sizes = sizes_on(device, _lengths(rows), _shared(rows))
    return [list(rows[span]) for span in sizes.spans(token_budget)]


def _lengths(rows: Sequence[Row]) -> list[int]:
    return [sum(extent.tokens for extent in row) for row in rows]


def _shared(rows: Sequence[Row]) -> list[int]:
    """Tokens that each row has in common with the one before it."""
    return [
        row[0].before if i and _together(rows[i - 1][0], row[0]) else 0
        for i, row in enumerate(rows)
    ]


def _together(one: Extent, other: Extent) -> bool:
    """Whether they answer one prompt. An answer without tokens is left with a prompt of its own."""
    return one.group == other.group != -1 and one.scored > 0 and other.scored > 0


def learn(
    twins: Twins, rows: Sequence[Row], *, temperature: float, full: bool, pairs: bool
) -> list[Tensor]:
    """The forward pass of one micro-batch, with gradients: what `backward` is called on.

    `full`: the loss compares whole distributions with the reference's. `pairs`: the reference
    reads the same answers behind it, as DPO has it.
    """
    if twins.reward_model is not None:
        return [twins.reward_model.logits(_reading(rows, twins.reward_model.device))]
    packed = packed_of(rows, twins.policy.device)
    scores = twins.policy.scores(
        packed,
        temperature,
        entropy=not pairs,
        value_head=twins.value_head,
        reference=twins.reference if full else None,
    )
    said = [scores.log_prob_N, scores.entropy_N, scores.value_N, scores.full_kl_N]
    if twins.critic is not None:
        said.append(twins.critic.values(packed))
    if pairs and twins.reference is not None:
        twins.reference.log_probs(packed, temperature)
    return [value for value in said if value is not None and value.requires_grad]


@torch.no_grad()
def measure(twins: Twins, rows: Sequence[Row], temperature: float) -> None:
    """One micro-batch through policy, critic and reference, without gradients."""
    packed = packed_of(rows, twins.policy.device)
    kept = [twins.policy.scores(packed, temperature, value_head=twins.value_head).log_prob_N]
    if twins.critic is not None:
        kept.append(twins.critic.values(packed))
    if twins.reference is not None:
        twins.reference.log_probs(packed, temperature)


@torch.no_grad()
def judge(model: RewardModel, rows: Sequence[Row], token_budget: int) -> None:
    """The largest pass of a reward model over the answers."""
    # A reward model reads each answer behind a prompt of its own.
    apart = [(replace(extent, group=-1),) for row in rows for extent in row]
    parts = micro_batches(apart, token_budget, model.device)
    model.logits(_reading(max(parts, key=tokens_of), model.device))


@dataclass(frozen=True, slots=True)
class SampledPass:
    """One call of the engine: a prompt's tokens and budget each, and answers to each.

    With a `dtype` on a copy of the weights. `turns`: of more than one, what was said stays for the
    next.
    """

    prompts: tuple[int, ...]
    budget: int
    answers: int
    max_rows: int
    dtype: torch.dtype | None = None
    turns: int = 1


@torch.no_grad()
def sample(policy: Policy, call: SampledPass, sampling: Sampling) -> None:
    """The engine's first step, and its last with all rows at their budget: store, logits, draw;
    and what these leave to a next turn."""
    model, device = policy.model, policy.device
    total = call.answers * len(call.prompts)
    rows = min(call.max_rows, total)
    lengths = np.array(call.prompts, dtype=np.int64)
    limits = np.full(len(lengths), call.budget)
    batch = DecodeBatch(lengths, limits, call.answers, rows, PREFILL_TOKENS)
    beginnings = PrefixCache(call.max_rows if call.turns > 1 else 0)
    forward = pass_of(model, int(lengths.max()), call.budget, call.dtype, beginnings)
    said = steady_logits(head_of(model))
    with autocast_for(model, policy.autocast):
        # As long as rows are free prompts enter; those that do later find rows beside them.
        while (entry := batch.waiting()).sequences:
            new = np.sort(lengths[entry.prompts.start : entry.prompts.stop])
            if len(new):
                entering = Prefill(new, len(batch.prompt))
                forward.admit(entering, batch.prompts_ahead(entry))
                _draw(said(_enter(forward, entering, device)), sampling)
            batch.add(entry)
        live = len(batch.sequence)
        for places in range(1, call.budget + 1):
            forward.reserve(np.full(live, places), rows)
        batch.made += call.budget
        for waiting in range(total - live):  # They may have been before these, and be kept.
            forward.keep(replace(batch.ended(0), sequence=total + waiting, alone=False))
        end = np.full(live, call.budget - 1)
        row = torch.zeros(live, dtype=torch.long, device=device)
        decoded = DecodeRows(batch.slot, end, batch.length, device)
        _draw(said(forward(row, row, Prefill(lengths[:0], 0), decoded)), sampling)
        for last in reversed(range(live if call.turns > 1 else 0)):
            forward.keep(batch.ended(last))
            rows_moved, slots_moved = batch.drop(np.arange(last + 1) == last)
            forward.drop(rows_moved, last, slots_moved, len(batch.prompt))


def _enter(forward: ModelRunner, entering: Prefill, device: torch.device) -> Tensor:
    """Prompts through the model; the states behind each."""
    tokens = torch.zeros(entering.tokens, dtype=torch.long, device=device)
    last = torch.zeros(len(entering.lengths), dtype=torch.long, device=device)
    return forward(tokens, tokens, entering, None).index_select(0, last)


def _draw(logits_RV: Tensor, sampling: Sampling) -> None:
    """A token from each row: a prompt's logits serve each of its answers."""
    uniform = torch.zeros(len(logits_RV), dtype=torch.float64, device=logits_RV.device)
    draw(logits_RV, uniform, sampling)


def packed_of(rows: Sequence[Row], device: torch.device) -> Packed:
    """The rows as one input, neighbours of a group behind one prompt; elsewhere the shortest
    sequence first, so that no token need be moved."""
    extents = [extent for row in rows for extent in row]
    if all(extent.group == -1 for extent in extents):
        extents.sort(key=lambda e: e.tokens)
    lengths: list[int] = []
    follows: list[int] = []
    targets, start = [], 0
    for (group, some), run in groupby(extents, key=lambda e: (e.group, e.scored > 0)):
        answers = list(run)
        if group == -1 or not some or len(answers) == 1:
            pieces = [(e.tokens, max(e.before, 1), -1) for e in answers]
        else:
            prompt = len(lengths)
            pieces = [(answers[0].before, answers[0].before, -1)]
            pieces += [(e.scored, 0, prompt) for e in answers]
        for size, unscored, first in pieces:
            targets.append(torch.arange(start + unscored, start + size))
            start += size
            lengths.append(size)
            follows.append(first)
    return Packed(
        torch.zeros(start, dtype=torch.long, device=device),
        tuple(lengths),
        torch.cat(targets).to(device),
        tuple(follows) if max(follows) >= 0 else (),
    )


def _reading(rows: Sequence[Row], device: torch.device) -> PackedAnswers:
    packed = packed_of(rows, device)
    # One judged token each; a process model's steps are so few that they do not count.
    at_K = torch.zeros(len(packed.lengths), dtype=torch.long, device=device)
    return PackedAnswers(packed, at_K)
