"""Sequences packed end to end: the only form in which tokens enter a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """How packed tokens belong together: sequences, and prompts shared by several answers.

    `lengths` are the segments' tokens; they add up to T. `follows` gives for each the number of an
    earlier segment that is its prefix, or -1 for none; () where no segment has one. A prefix has no
    prefix itself. Raises ValueError for an empty segment or an impossible prefix.
    """

    lengths: tuple[int, ...]
    follows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.lengths):
            raise ValueError("every sequence needs at least one token")
        if not self.follows:
            return
        if len(self.follows) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} segments but {len(self.follows)} to follow")
        for number, prefix in enumerate(self.follows):
            if prefix != -1 and not (0 <= prefix < number and self.follows[prefix] == -1):
                raise ValueError(f"segment {number} cannot follow segment {prefix}")

    @cached_property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index of each segment's first token."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Tokens of each segment's prefix."""
        if not self.follows:
            return (0,) * len(self.lengths)
        return tuple(0 if prefix == -1 else self.lengths[prefix] for prefix in self.follows)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence, its prefix included."""
        return max(map(sum, zip(self.lengths, self.before, strict=True)), default=0)

    def positions(self, device: torch.device | str = "cpu") -> Int[Tensor, "T"]:
        """The position of each token in its sequence, from 0."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        shift = torch.tensor(self.before, dtype=torch.int64) + lengths - lengths.cumsum(0)
        every = torch.arange(self.tokens)
        return upload(every + shift.repeat_interleave(lengths, output_size=self.tokens), device)

    def previous(self, device: torch.device | str = "cpu") -> Int[Tensor, "T"]:
        """The index of the token before each in its sequence; undefined for a first token."""
        places = torch.arange(self.tokens) - 1
        if self.follows:
            numbers = [number for number, prefix in enumerate(self.follows) if prefix != -1]
            ends = [self.starts[self.follows[n]] + self.before[n] - 1 for n in numbers]
            firsts = torch.tensor([self.starts[n] for n in numbers])
            places[firsts.long()] = torch.tensor(ends, dtype=torch.int64)
        return upload(places, device)

    def own(self, numbers: Iterable[int]) -> Int[Tensor, "K"]:
        """The indices of the tokens of these segments, in this order."""
        return torch.cat([self._span(number) for number in numbers])

    def visible(self, numbers: Iterable[int]) -> Int[Tensor, "K"]:
        """`own`, each segment after its prefix."""
        spans = []
        for number in numbers:
            if self.before[number]:
                spans.append(self._span(self.follows[number]))
            spans.append(self._span(number))
        return torch.cat(spans)

    def _span(self, number: int) -> Tensor:
        return torch.arange(self.starts[number], self.starts[number] + self.lengths[number])


@dataclass(frozen=True, eq=False)
class Packed:
    """A batch of sequences without padding.

    `tokens_T` are the tokens of all segments end to end (`lengths` and `follows` as in `Segments`).
    `target_N` are the ascending indices in `tokens_T` of the completion tokens that are scored;
    each is predicted from the token before it in its sequence, at `source_N`.
    """

    tokens_T: Int[Tensor, "T"]
    lengths: tuple[int, ...]
    target_N: Int[Tensor, "N"]
    follows: tuple[int, ...] = ()

    @cached_property
    def segments(self) -> Segments:
        """How the tokens belong together."""
        return Segments(self.lengths, self.follows)

    @cached_property
    def source_N(self) -> Int[Tensor, "N"]:
        """The index of the token that each target is predicted from."""
        if not self.follows:
            return self.target_N - 1
        return self.segments.previous(self.device)[self.target_N]

    @cached_property
    def fed(self) -> tuple[Packed, Int[Tensor, "N"]]:
        """The tokens that the targets depend on, and the index in them that predicts each target.

        The last token of each sequence is left out, since nothing is predicted from it; a segment
        of a single token stays.
        """
        prefixes = set(self.follows)
        cuts = [n > 1 and number not in prefixes for number, n in enumerate(self.lengths)]
        lengths = tuple(n - cut for n, cut in zip(self.lengths, cuts, strict=True))
        removed = torch.tensor((0, *accumulate(cuts))[:-1], dtype=torch.int64)
        kept = torch.arange(sum(lengths)) + _spread(removed, lengths)
        kept = upload(kept, self.device)
        fed = Packed(self.tokens_T[kept], lengths, self.target_N[:0], self.follows)
        source = self.segments.previous()
        at = upload(source - _spread(removed, self.lengths)[source], self.device)
        return fed, at[self.target_N]

    def positions(self) -> Int[Tensor, "T"]:
        """Position ids, from 0 at the start of each sequence."""
        return self.segments.positions(self.device)

    def scored(self) -> Int[Tensor, "N"]:
        """The ids of the completion tokens that are scored."""
        return self.tokens_T[self.target_N]

    def to(self, device: torch.device | str) -> Packed:
        """The same batch on another device."""
        return replace(self, tokens_T=self.tokens_T.to(device), target_N=self.target_N.to(device))

    @property
    def device(self) -> torch.device:
        return self.tokens_T.device


def upload(values: Tensor | Sequence[int], device: torch.device | str) -> Tensor:
    """Integers of the host on a device, for which a GPU's host does not wait."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _spread(number_P: Int[Tensor, "P"], lengths: Sequence[int]) -> Int[Tensor, "T"]:
    """Each segment's number for each of its tokens."""
    each = torch.tensor(lengths, dtype=torch.int64, device=number_P.device)
    return number_P.repeat_interleave(each, output_size=sum(lengths))


def pack(
    sequences: Sequence[Tensor], targets: Sequence[Tensor], device: torch.device | str = "cpu"
) -> Packed:
    """Pack sequences end to end.

    `sequences` are 1-D token ids; `targets` say for each which of its tokens are scored, as a
    boolean mask of its length or as ascending indices into it.

    Raises ValueError for an empty sequence, targets that do not fit, or a scored first token, which
    nothing predicts.
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
"""Tokens of a pass beyond which a CPU gains nothing and leaves its cache."""


@dataclass(frozen=True)
class PackedSizes:
    """Model-input tokens of sequences, or of pairs of them, to be cut into passes in order.

    `shared` are the tokens that each has in common with the one before, which enter once; () where
    nothing is shared. A pass of `enough` tokens ends where nothing is shared with the next one.
    """

    lengths: Sequence[int]
    shared: Sequence[int] = ()
    enough: int | None = None

    def spans(self, token_budget: int) -> list[slice]:
        """Consecutive passes within the budget; what is longer than it goes alone."""
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
        """Tokens of one pass."""
        return sum(self.lengths[span]) - sum(self.shared[span][1:])


def sizes_on(
    device: torch.device, lengths: Sequence[int], shared: Sequence[int] = ()
) -> PackedSizes:
    """The sizes with what is `enough` on this device."""
    return PackedSizes(lengths, shared, ENOUGH_ON_CPU if device.type == "cpu" else None)


def _indices(target: Tensor, length: int, number: int) -> Tensor:
    """The scored indices of one sequence, checked."""
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
