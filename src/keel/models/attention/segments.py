"""How tokens that lie end to end belong together: pieces, of which some go on from another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """A piece is a sequence, or a prompt that several answers share, or one of those answers.

    `lengths` are the pieces' tokens; they add up to T. `follows` names for each the piece that its
    tokens come behind, which follows none itself, or -1 where the piece is a beginning; () where
    all are. Raises ValueError for an empty piece, or one that follows what it cannot.
    """

    lengths: tuple[int, ...]
    follows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.lengths):
            raise ValueError("every sequence needs at least one token")
        if not self.follows:
            return
        if len(self.follows) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} pieces but {len(self.follows)} to follow")
        for piece, first in enumerate(self.follows):
            if first != -1 and not (0 <= first < piece and self.follows[first] == -1):
                raise ValueError(f"piece {piece} cannot follow piece {first}")

    @cached_property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each piece begins among the T."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @cached_property
    def before(self) -> tuple[int, ...]:
        """How many tokens come before each piece."""
        if not self.follows:
            return (0,) * len(self.lengths)
        return tuple(0 if first == -1 else self.lengths[first] for first in self.follows)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence, with what it follows."""
        return max(map(sum, zip(self.lengths, self.before, strict=True)), default=0)

    def positions(self, device: torch.device | str = "cpu") -> Int[Tensor, "T"]:
        """The place of each token in its sequence, from 0."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        shift = torch.tensor(self.before, dtype=torch.int64, device=device)
        shift = shift + lengths - lengths.cumsum(0)
        every = torch.arange(self.tokens, device=device)
        return every + shift.repeat_interleave(lengths, output_size=self.tokens)

    def previous(self, device: torch.device | str = "cpu") -> Int[Tensor, "T"]:
        """The token before each in its sequence; before a first one, what lies there."""
        places = torch.arange(self.tokens, device=device) - 1
        if self.follows:
            heads = [piece for piece, first in enumerate(self.follows) if first != -1]
            ends = [self.starts[self.follows[p]] + self.before[p] - 1 for p in heads]
            begins = torch.tensor([self.starts[p] for p in heads], device=device)
            places[begins.long()] = torch.tensor(ends, dtype=torch.int64, device=device)
        return places

    def families(self) -> Iterator[tuple[slice, slice]]:
        """Neighbours that follow the same piece: their tokens among the T, and its own."""
        for first, run in groupby(range(len(self.follows)), key=lambda piece: self.follows[piece]):
            if first == -1:
                continue
            pieces = list(run)
            own = slice(self.starts[pieces[0]], self.starts[pieces[-1]] + self.lengths[pieces[-1]])
            yield own, slice(self.starts[first], self.starts[first] + self.lengths[first])

    def visible(self, order: Sequence[int]) -> Int[Tensor, "K"]:
        """The tokens that each piece sees, in this order of pieces: what it follows, then it."""
        spans = []
        for piece in order:
            if self.before[piece]:
                start = self.starts[self.follows[piece]]
                spans.append(torch.arange(start, start + self.before[piece]))
            start = self.starts[piece]
            spans.append(torch.arange(start, start + self.lengths[piece]))
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


def alike(kinds: Sequence[Hashable]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """An order that puts pieces of one kind side by side, and the sizes of these runs.

    The order is the one they are in where no two are alike: then nothing is gained by moving.
    """
    counts = Counter(kinds)
    if len(counts) == len(kinds):
        return tuple(range(len(kinds))), (1,) * len(kinds)
    ranks = {kind: rank for rank, kind in enumerate(sorted(counts))}  # type: ignore[type-var]
    order = tuple(sorted(range(len(kinds)), key=lambda piece: ranks[kinds[piece]]))
    return order, tuple(counts[kind] for kind in ranks)
