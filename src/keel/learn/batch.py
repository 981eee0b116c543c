"""The flat batch of a language model: completions end to end, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from keel.learn.actions import Actions, ranges, starts
from keel.models.packed import Packed, PackedSizes, sizes_on
from keel.types import Group


@dataclass(frozen=True, eq=False)
class Batch(Actions):
    """Sequences with the completion tokens (N) that the policy wrote in them.

    `tokens_T` are the sequences' tokens, `input_lengths` the number of each; `target_N` is the
    place of each completion token among the T. `prompt_lengths` is the number of tokens before each
    completion, which neighbours of one group have in common; () where they have none.
    """

    tokens_T: Int[Tensor, " T"]
    input_lengths: tuple[int, ...]
    target_N: Int[Tensor, " N"]
    prompt_lengths: tuple[int, ...] = ()

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """How many tokens each sequence has in common with the one before it."""
        if not self.prompt_lengths:
            return (0,) * self.sequences
        groups = self.groups_S.tolist()
        answers = [n > p for n, p in zip(self.input_lengths, self.prompt_lengths, strict=True)]
        return tuple(
            length if i and groups[i] == groups[i - 1] and answers[i] and answers[i - 1] else 0
            for i, length in enumerate(self.prompt_lengths)
        )

    @cached_property
    def packed(self) -> Packed:
        """The model's view of the batch: a prompt once for all its neighbouring answers."""
        if not any(self.shared):
            return Packed(self.tokens_T, self.input_lengths, self.target_N)
        cut = _cut(self.input_lengths, self.shared)
        device = self.target_N.device
        moved = torch.tensor(cut.moved, device=device)
        shift_N = moved.repeat_interleave(self.lengths_S, output_size=sum(self.lengths))
        return Packed(
            tokens_T=self.tokens_T[ranges(cut.spans, device)],
            lengths=tuple(length for _, length in cut.spans),
            target_N=self.target_N + shift_N,
            follows=cut.follows,
        )

    @property
    def sizes(self) -> PackedSizes:
        """What micro-batches are cut by."""
        return sizes_on(self.target_N.device, self.input_lengths, self.shared)

    def select(self, indices: Sequence[int]) -> Batch:
        """The batch of these sequences, in this order; sequences are never cut."""
        device = self.target_N.device
        first = starts(self.input_lengths)
        chosen = super().select(indices)
        input_lengths = tuple(self.input_lengths[i] for i in indices)
        moved = [new - first[i] for new, i in zip(starts(input_lengths), indices, strict=True)]
        moved_N = torch.tensor(moved, device=device, dtype=torch.long).repeat_interleave(
            chosen.lengths_S, output_size=sum(chosen.lengths)
        )
        spans = [(first[i], self.input_lengths[i]) for i in indices]
        return replace(
            chosen,
            tokens_T=self.tokens_T[ranges(spans, device)],
            input_lengths=input_lengths,
            prompt_lengths=tuple(self.prompt_lengths[i] for i in indices if self.prompt_lengths),
            target_N=chosen.target_N + moved_N,
        )

    def spans(self, token_budget: int) -> list[range]:
        """The sequences of each micro-batch, cut as `PackedSizes` does."""
        every = range(self.sequences)
        return [every[span] for span in self.sizes.spans(token_budget)]

    def micro_batches(self, token_budget: int) -> list[Batch]:
        """The batch in order, in micro-batches."""
        spans = self.spans(token_budget)
        return [self] if len(spans) == 1 else [self.select(span) for span in spans]


def from_groups(groups: Sequence[Group], device: torch.device | str = "cpu") -> Batch:
    """The batch of all completions of the groups, in order; only written tokens are among the N."""
    tokens: list[int] = []
    targets: list[int] = []
    engine: list[float] = []
    lengths: list[int] = []
    input_lengths: list[int] = []
    prompt_lengths: list[int] = []
    index: list[int] = []
    for g, group in enumerate(groups):
        prompt = group.prompt.tokens
        for completion in group.completions:
            start = len(tokens) + len(prompt)
            written = completion.written.nonzero()[0]
            tokens.extend(prompt)
            tokens.extend(completion.tokens.tolist())
            targets.extend((written + start).tolist())
            engine.extend(completion.log_probs[written].tolist())
            lengths.append(len(written))
            input_lengths.append(len(prompt) + len(completion))
            prompt_lengths.append(len(prompt))
            index.append(g)
    return Batch(
        tokens_T=torch.tensor(tokens, dtype=torch.long, device=device),
        input_lengths=tuple(input_lengths),
        prompt_lengths=tuple(prompt_lengths),
        target_N=torch.tensor(targets, dtype=torch.long, device=device),
        lengths=tuple(lengths),
        groups_S=torch.tensor(index, dtype=torch.long, device=device),
        engine_log_prob_N=torch.tensor(engine, dtype=torch.float32, device=device),
    )


@dataclass(frozen=True)
class _Cut:
    """Sequences as pieces: the start and length of each among the T, and the piece that it follows.

    `moved` is by how many places the own tokens of each sequence shift.
    """

    spans: tuple[tuple[int, int], ...]
    follows: tuple[int, ...]
    moved: tuple[int, ...]


def _cut(lengths: Sequence[int], shared: Sequence[int]) -> _Cut:
    """Prompts that neighbours share, each before its answers; other sequences are left whole."""
    pieces: list[tuple[int, int, int]] = []
    moved: list[int] = []
    used = prompt = 0
    following = [*shared[1:], 0]
    for start, length, own, after in zip(starts(lengths), lengths, shared, following, strict=True):
        if not own and after:  # the first of several
            prompt = len(pieces)
            pieces.append((start, after, -1))
            used += after
        common = own or after
        pieces.append((start + common, length - common, prompt if common else -1))
        moved.append(used - start - common)
        used += length - common
    spans = tuple((start, length) for start, length, _ in pieces)
    return _Cut(spans, tuple(first for _, _, first in pieces), tuple(moved))
