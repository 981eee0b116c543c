"""The flat batch: what the loss reads, end to end, with no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor

from keel.learn.actions import Actions
from keel.models.packed import Packed, PackedSizes, sizes_on
from keel.types import Group


@dataclass(frozen=True, eq=False)
class Batch(Actions):
    """Sequences with the completion tokens (N) that the policy wrote in them.

    `tokens_T` are the sequences' tokens, `input_lengths` how many each has; `target_N` points at
    each completion token among the T. `prompt_lengths` says how many tokens a sequence has before
    its completion, which neighbours of one group have in common; () where nothing is.
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
            tokens_T=self.tokens_T[_ranges(cut.spans, device)],
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
        input_starts, starts = _starts(self.input_lengths), _starts(self.lengths)
        token_N = _ranges([(starts[i], self.lengths[i]) for i in indices], device)
        input_T = _ranges([(input_starts[i], self.input_lengths[i]) for i in indices], device)
        lengths = tuple(self.lengths[i] for i in indices)
        input_lengths = tuple(self.input_lengths[i] for i in indices)
        moved = torch.tensor(
            [new - input_starts[i] for new, i in zip(_starts(input_lengths), indices, strict=True)],
            device=device,
            dtype=torch.long,
        )
        per_token = {
            f.name: getattr(self, f.name)[token_N]
            for f in fields(self)
            if f.name.endswith("_N") and getattr(self, f.name) is not None
        }
        shift_N = moved.repeat_interleave(
            torch.tensor(lengths, device=device, dtype=torch.long), output_size=sum(lengths)
        )
        per_token["target_N"] = per_token["target_N"] + shift_N
        return replace(
            self,
            tokens_T=self.tokens_T[input_T],
            input_lengths=input_lengths,
            prompt_lengths=tuple(self.prompt_lengths[i] for i in indices if self.prompt_lengths),
            lengths=lengths,
            groups_S=self.groups_S[torch.tensor(list(indices), device=device, dtype=torch.long)],
            **per_token,
        )

    def micro_batches(self, token_budget: int) -> list[Batch]:
        """The batch in order, cut as `PackedSizes` does."""
        spans = self.sizes.spans(token_budget)
        every = range(len(self.input_lengths))
        return [self] if len(spans) == 1 else [self.select(every[span]) for span in spans]


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
    """Sequences as pieces: where each begins among the T and its tokens, and what it follows.

    `moved` is by how many places the own tokens of each sequence lie elsewhere then.
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
    for start, length, own, after in zip(_starts(lengths), lengths, shared, following, strict=True):
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


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]


def _ranges(spans: Sequence[tuple[int, int]], device: torch.device) -> Int[Tensor, " K"]:
    """The numbers of all spans (start, count), one behind the other."""
    starts, counts = (torch.tensor(column, dtype=torch.long) for column in _columns(spans))
    shift = (starts + counts - counts.cumsum(0)).repeat_interleave(counts)
    return (shift + torch.arange(len(shift))).to(device)


def _columns(spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [start for start, _ in spans], [count for _, count in spans]
