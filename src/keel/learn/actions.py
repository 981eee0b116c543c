"""What the loss reads of the actions taken, whatever they are: tokens, or moves in a game.

A batch changes its type on the way: `Actions` as they were sampled, with what the models say of
them; `Estimates` of their advantages; `TrainBatch`, with the weights of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Generic, Self, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

A = TypeVar("A", bound="Actions")


@dataclass(frozen=True, eq=False, kw_only=True)
class Actions:
    """Sequences (S) of actions (N), end to end, without padding.

    `lengths` is the number of actions of each sequence; sequences of one of `groups_S` have their
    start in common. Per action there are log-probabilities: of the engine that sampled it; of the
    policy before the update (`old_log_prob_N`; None on an on-policy step with one update, whose
    current ones are equal); of the reference; and values. The last two are None where the algorithm
    has no such model.
    """

    lengths: tuple[int, ...]
    groups_S: Int[Tensor, " S"]
    engine_log_prob_N: Float[Tensor, " N"]
    old_log_prob_N: Float[Tensor, " N"] | None = None
    reference_log_prob_N: Float[Tensor, " N"] | None = None
    value_N: Float[Tensor, " N"] | None = None

    @property
    def lengths_S(self) -> Int[Tensor, " S"]:
        """The number of actions of each sequence."""
        return torch.tensor(self.lengths, dtype=torch.long, device=self.groups_S.device)

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    def action_index(self, indices: Sequence[int]) -> Int[Tensor, " K"]:
        """The places among the N of the actions of these sequences."""
        first = starts(self.lengths)
        spans = [(first[i], self.lengths[i]) for i in indices]
        return ranges(spans, self.groups_S.device)

    def select(self, indices: Sequence[int]) -> Self:
        """These sequences, in this order; sequences are never cut."""
        chosen_S = torch.tensor(list(indices), device=self.groups_S.device, dtype=torch.long)
        return replace(
            self,
            lengths=tuple(self.lengths[i] for i in indices),
            groups_S=self.groups_S[chosen_S],
            **self._per_action(self.action_index(indices)),
        )

    def _per_action(self, index_K: Int[Tensor, " K"]) -> dict[str, Tensor]:
        """The fields that have one value an action, at these places."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if "_N" in f.name}
        return {name: value[index_K] for name, value in values.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Estimates:
    """What is estimated of each action from the rewards, in float64.

    `advantage_N` is not whitened; `return_N` is the value model's target, None without one;
    `rewarded_N` says which actions are in a sequence with a reward, None where all are.
    """

    advantage_N: Float[Tensor, " N"]
    return_N: Float[Tensor, " N"] | None = None
    rewarded_N: Bool[Tensor, " N"] | None = None

    def select(self, index_K: Int[Tensor, " K"]) -> Estimates:
        """The estimates of the actions at these places."""
        return Estimates(
            self.advantage_N[index_K],
            None if self.return_N is None else self.return_N[index_K],
            None if self.rewarded_N is None else self.rewarded_N[index_K],
        )


@dataclass(frozen=True, eq=False)
class TrainBatch(Generic[A]):
    """An optimizer batch, or a micro-batch of one, ready for the loss.

    `advantage_N` is whitened where the algorithm asks for it. The weights were set once for the
    whole optimizer batch: `weight_N` for the surrogate and the divergence; `token_weight`, 1/N of
    all its actions, for value loss and entropy; `metric_weight`, 1/N of the actions that enter the
    loss, for metrics.
    """

    actions: A
    advantage_N: Float[Tensor, " N"]
    weight_N: Float[Tensor, " N"]
    return_N: Float[Tensor, " N"] | None
    token_weight: float
    metric_weight: float

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.actions.lengths

    @property
    def sequences(self) -> int:
        return self.actions.sequences

    def select(self, indices: Sequence[int]) -> TrainBatch[A]:
        """These sequences, in this order, with the weights that they have."""
        index_K = self.actions.action_index(indices)
        return replace(
            self,
            actions=self.actions.select(indices),
            advantage_N=self.advantage_N[index_K],
            weight_N=self.weight_N[index_K],
            return_N=None if self.return_N is None else self.return_N[index_K],
        )


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each of several pieces begins placed end to end."""
    return list(accumulate(lengths, initial=0))[:-1]


def ranges(spans: Sequence[tuple[int, int]], device: torch.device) -> Int[Tensor, " K"]:
    """The numbers of all spans (start, count), one span after the other."""
    first = torch.tensor([start for start, _ in spans], dtype=torch.long)
    counts = torch.tensor([count for _, count in spans], dtype=torch.long)
    shift = (first + counts - counts.cumsum(0)).repeat_interleave(counts)
    return (shift + torch.arange(len(shift))).to(device)
