"""Sequences laid end to end: the only form in which tokens enter a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor

from keel.models.attention.segments import Pieces


@dataclass(frozen=True, eq=False)
class Packed:
    """A batch of sequences without padding.

    `tokens_T` are the tokens of all pieces end to end: sequences, and prompts that several
    answers share with those answers behind them (`lengths` and `follows` as in `Pieces`).
    `target_N` points into `tokens_T` at every completion token that is scored, in ascending order;
    what the model says of it is read one token earlier in its sequence, at `source_N`.
    """

    tokens_T: Int[Tensor, "T"]
    lengths: tuple[int, ...]
    target_N: Int[Tensor, "N"]
    follows: tuple[int, ...] = ()

    @cached_property
    def pieces(self) -> Pieces:
        """How the tokens belong together."""
        return Pieces(self.lengths, self.follows)

    @cached_property
    def source_N(self) -> Int[Tensor, "N"]:
        """The token behind which each target was chosen."""
        if not self.follows:
            return self.target_N - 1
        return self.pieces.previous(self.device)[self.target_N]

    @cached_property
    def fed(self) -> tuple[Packed, Int[Tensor, "N"]]:
        """What enters the model for the targets' sake, and where in it each is predicted from.

        That is all but the last token of each sequence, behind which nothing is predicted; a piece
        of a single token stays.
        """
        followed = set(self.follows)
        cuts = [n > 1 and piece not in followed for piece, n in enumerate(self.lengths)]
        lengths = tuple(n - cut for n, cut in zip(self.lengths, cuts, strict=True))
        gone = torch.tensor((0, *accumulate(cuts))[:-1], dtype=torch.int64, device=self.device)
        kept = torch.arange(sum(lengths), device=self.device) + _spread(gone, lengths)
        fed = Packed(self.tokens_T[kept], lengths, self.target_N[:0], self.follows)
        return fed, self.source_N - _spread(gone, self.lengths)[self.source_N]

    def positions(self) -> Int[Tensor, "T"]:
        """Position ids, from 0 again at the start of each sequence."""
        return self.pieces.positions(self.device)

    def scored(self) -> Int[Tensor, "N"]:
        """The ids of the completion tokens that are scored."""
        return self.tokens_T[self.target_N]

    def to(self, device: torch.device | str) -> Packed:
        """The same batch on another device."""
        return replace(self, tokens_T=self.tokens_T.to(device), target_N=self.target_N.to(device))

    @property
    def device(self) -> torch.device:
        return self.tokens_T.device


def _spread(number_P: Int[Tensor, "P"], lengths: Sequence[int]) -> Int[Tensor, "T"]:
    """Each piece's number for each of its tokens."""
    each = torch.tensor(lengths, dtype=torch.int64, device=number_P.device)
    return number_P.repeat_interleave(each, output_size=sum(lengths))


def pack(
    sequences: Sequence[Tensor], targets: Sequence[Tensor], device: torch.device | str = "cpu"
) -> Packed:
    """Lay sequences end to end.

    `sequences` are 1-D token ids; `targets` say for each which of its tokens are scored, as a
    boolean mask of its length or as ascending indices into it.

    Raises ValueError for an empty sequence, targets that do not fit, or a scored first token (no
    position before it says anything of it).
    """
    if len(sequences) != len(targets):
        raise ValueError(f"{len(sequences)} sequences but targets for {len(targets)}")
    lengths = tuple(len(tokens) for tokens in sequences)
    starts = [0, *accumulate(lengths)]
    places = [
        _indices(target, length, number) + start
        for number, (target, length, start) in enumerate(
            zip(targets, lengths, starts[:-1], strict=True)
        )
    ]
    none = torch.zeros(0, dtype=torch.int64)
    return Packed(
        tokens_T=torch.cat([none, *(tokens.cpu() for tokens in sequences)]).to(device),
        lengths=lengths,
        target_N=torch.cat([none, *places]).to(device),
    )


ENOUGH_ON_CPU = 640
"""Tokens of a pass beyond which a CPU gains nothing, and pays for memory that it touches anew."""


@dataclass(frozen=True)
class PackedSizes:
    """Model-input tokens of sequences (or of rows of them) in the order in which they are cut.

    `shared` are the tokens that each has in common with the one before, which enter once; () where
    nothing is shared. A pass of `enough` tokens ends where nothing is shared with what follows.
    """

    lengths: Sequence[int]
    shared: Sequence[int] = ()
    enough: int | None = None

    def spans(self, token_budget: int) -> list[slice]:
        """Runs of neighbours whose tokens keep to the budget; one longer than it goes alone."""
        cuts: list[int] = []
        used = 0
        for i, length in enumerate(self.lengths):
            common = self.shared[i] if self.shared else 0
            full = not common and self.enough is not None and used + length > self.enough
            if not cuts or full or used + length - common > token_budget:
                cuts.append(i)
                used = common = 0
            used += length - common
        return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(self.lengths)], strict=True)]

    def entering(self, span: slice) -> int:
        """Tokens of one of the runs."""
        return sum(self.lengths[span]) - sum(self.shared[span][1:])


def sizes_on(
    device: torch.device, lengths: Sequence[int], shared: Sequence[int] = ()
) -> PackedSizes:
    """What is cut for this device."""
    return PackedSizes(lengths, shared, ENOUGH_ON_CPU if device.type == "cpu" else None)


def _indices(target: Tensor, length: int, number: int) -> Tensor:
    """The scored positions of one sequence, checked."""
    if length == 0:
        raise ValueError(f"sequence {number} is empty")
    target = target.cpu()
    if target.dtype == torch.bool:
        if len(target) != length:
            raise ValueError(
                f"sequence {number} has {length} tokens but its target mask {len(target)}"
            )
        target = target.nonzero()[:, 0]
    target = target.to(torch.int64)
    if len(target) == 0:
        return target
    if int(target.min()) < 1 or int(target.max()) >= length:
        raise ValueError(
            f"targets of sequence {number} must lie in 1..{length - 1}: "
            "the first token has no position before it"
        )
    if bool((target.diff() <= 0).any()):
        raise ValueError(f"targets of sequence {number} must ascend")
    return target
