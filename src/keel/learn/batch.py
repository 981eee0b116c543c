"""The flat batch: what the loss reads, end to end, with no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Int
from torch import Tensor

from keel.learn.actions import Actions
from keel.models.packed import Packed, spans_within
from keel.types import Group


@dataclass(frozen=True, eq=False)
class Batch(Actions):
    """Sequences with the completion tokens (N) that the policy wrote in them.

    `tokens_T` are the model's inputs, `input_lengths` how many of them each sequence has;
    `target_N` points at each completion token among the T.
    """

    tokens_T: Int[Tensor, " T"]
    input_lengths: tuple[int, ...]
    target_N: Int[Tensor, " N"]

    @property
    def packed(self) -> Packed:
        """The model's view of the batch."""
        return Packed(self.tokens_T, self.input_lengths, self.target_N)

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
            torch.tensor(lengths, device=device), output_size=sum(lengths)
        )
        per_token["target_N"] = per_token["target_N"] + shift_N
        return replace(
            self,
            tokens_T=self.tokens_T[input_T],
            input_lengths=input_lengths,
            lengths=lengths,
            groups_S=self.groups_S[torch.tensor(list(indices), device=device, dtype=torch.long)],
            **per_token,
        )

    def micro_batches(self, token_budget: int) -> list[Batch]:
        """The batch in order, cut where the model's input would pass the budget.

        A sequence longer than the budget goes alone.
        """
        spans = spans_within(self.input_lengths, token_budget)
        every = range(len(self.input_lengths))
        return [self] if len(spans) == 1 else [self.select(every[span]) for span in spans]


def from_groups(groups: Sequence[Group], device: torch.device | str = "cpu") -> Batch:
    """The batch of all completions of the groups, in order; only written tokens are among the N."""
    tokens: list[int] = []
    targets: list[int] = []
    engine: list[float] = []
    lengths: list[int] = []
    input_lengths: list[int] = []
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
            index.append(g)
    return Batch(
        tokens_T=torch.tensor(tokens, dtype=torch.long, device=device),
        input_lengths=tuple(input_lengths),
        target_N=torch.tensor(targets, dtype=torch.long, device=device),
        lengths=tuple(lengths),
        groups_S=torch.tensor(index, dtype=torch.long, device=device),
        engine_log_prob_N=torch.tensor(engine, dtype=torch.float32, device=device),
    )


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts[:-1]


def _ranges(spans: Sequence[tuple[int, int]], device: torch.device) -> Int[Tensor, " K"]:
    if not spans:
        return torch.zeros(0, dtype=torch.long, device=device)
    return torch.cat([torch.arange(start, start + n, device=device) for start, n in spans])
