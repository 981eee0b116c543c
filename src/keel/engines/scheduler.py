"""Which sequences are decoded and which wait, and the pages of their keys and values.

An entry has the pages that it needs, growing it moves nothing, and a later call may begin with the
pages of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from keel.engines.sampler import Answers, Stops, Uniforms
from keel.models.kernels.decode import PAGE
from keel.types import Group, Sampling

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Request:
    """One call of `sample`: `n` sequences for each prompt, at most `rows` of them at once.

    `limits_P` are the budgets of prompts, and at most `prefill_tokens` tokens enter in one pass.
    """

    prompts: Sequence[Ints]
    limits_P: Ints
    n: int
    sampling: Sampling
    stops: Stops
    uniforms: Uniforms
    answers: Answers
    rows: int
    prefill_tokens: int

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, its prompt included."""
        pairs = zip(self.prompts, self.limits_P.tolist(), strict=True)
        return max(len(tokens) + int(limit) for tokens, limit in pairs)


@dataclass(frozen=True, eq=False)
class DecodeEntry:
    """What enters at a step: `sequences`, the first `held` of which answer a prompt that is
    computed already; and `prompts`, to be computed now."""

    prompts: range
    sequences: range
    held: int


Moves = tuple[Ints, Ints]
"""The old and the new numbers of entries that move."""


class DecodeBatch:
    """The live rows with their prompts, and the queue of sequences before them.

    Sequence s is completion s mod n of prompt s div n. Sequences enter in order, so at
    most one group has entered in part; its prompt is computed only once. The first `known_P` tokens
    of prompt p need not be computed. Row r of the arrays is entry r of the answers' keys and
    values, and slot g entry g of the prompts': those with an unfinished answer.
    """

    def __init__(
        self,
        lengths_P: Ints,
        limits_P: Ints,
        n: int,
        max_num_seqs: int,
        prefill_tokens: int,
        known_P: Ints | int = 0,
    ) -> None:
        self.n = n
        self._lengths_P = lengths_P
        self._entering_P = lengths_P - known_P
        self._limits_P = limits_P
        self._max_num_seqs = max_num_seqs
        self._prefill_tokens = prefill_tokens
        self._total = n * len(lengths_P)
        self._next = 0
        self._left_P = np.full(len(lengths_P), n, dtype=np.int64)
        self._slot_P = np.full(len(lengths_P), -1, dtype=np.int64)
        self.prompt = np.empty(0, dtype=np.int64)
        """The prompt of each slot."""
        self.sequence = np.empty(0, dtype=np.int64)
        self.made = np.empty(0, dtype=np.int64)
        """Tokens sampled so far."""
        self.token = np.empty(0, dtype=np.int64)
        """The last token sampled, which is the next to enter the model."""
        self._update()

    def _update(self) -> None:
        """Derive what changes only when rows enter or leave."""
        prompts = self.sequence // self.n
        self._before: Ints = self._lengths_P[prompts]
        self.slot: Ints = self._slot_P[prompts]
        """The slot of each row's prompt; the array is replaced, never written to."""
        self.limit: Ints = self._limits_P[prompts]
        """The budget of each row, in sampled tokens."""
        self.length: Ints = self._lengths_P[self.prompt]
        """Tokens of the prompt in each slot."""

    @property
    def live(self) -> bool:
        """Whether anything is left to do."""
        return self._next < self._total or len(self.sequence) > 0

    @property
    def place(self) -> Ints:
        """The position of each row's last token."""
        return self._before + self.made - 1

    @property
    def ahead(self) -> int:
        """The most rows that can be live from now on."""
        return min(self._max_num_seqs, len(self.sequence) + self._total - self._next)

    def prompts_ahead(self, entry: DecodeEntry) -> int:
        """The most slots that will be in use from this entry on."""
        now = len(self.prompt) + len(entry.prompts)
        return (
            now
            if entry.sequences.stop == self._total
            else max(now, self._max_num_seqs // self.n + 2)
        )

    def left(self, prompts: Ints) -> Ints:
        """How many answers of each of these prompts are unfinished."""
        left: Ints = self._left_P[prompts]
        return left

    def waiting(self) -> DecodeEntry:
        """What enters now: as many sequences as free rows and the token budget allow."""
        first = self._next
        stop = min(first + self._max_num_seqs - len(self.sequence), self._total)
        computed = -(-first // self.n)  # prompts before this one have been computed
        budget = self._prefill_tokens
        prompt = computed
        while prompt * self.n < stop:
            budget -= int(self._entering_P[prompt])
            if budget < 0 and prompt > computed:
                stop = prompt * self.n
                break
            prompt += 1
        held = min(computed * self.n, stop) - first
        return DecodeEntry(range(computed, prompt), range(first, stop), held)

    def add(self, entry: DecodeEntry) -> None:
        """The entry's sequences become the last rows, with nothing sampled yet."""
        if not entry.sequences:
            return
        none = np.zeros(len(entry.sequences), dtype=np.int64)
        new = np.array(entry.prompts, dtype=np.int64)
        self._slot_P[new] = len(self.prompt) + np.arange(len(new))
        self.prompt = np.concatenate([self.prompt, new])
        self._next = entry.sequences.stop
        self.sequence = np.concatenate([self.sequence, np.array(entry.sequences, dtype=np.int64)])
        self.made = np.concatenate([self.made, none])
        self.token = np.concatenate([self.token, none])
        self._update()

    def drop(self, done: npt.NDArray[np.bool_]) -> tuple[Moves, Moves]:
        """Remove finished rows, and prompts without rows; the last entries move to their places.

        Returns the moves of rows and of slots.
        """
        np.subtract.at(self._left_P, self.sequence[done] // self.n, 1)
        rows = _moves(done)
        for name in ("sequence", "made", "token"):
            setattr(self, name, _closed(getattr(self, name), rows, len(done) - done.sum()))
        over = self._left_P[self.prompt] == 0
        slots = _moves(over)
        self.prompt = _closed(self.prompt, slots, len(over) - over.sum())
        self._slot_P[self.prompt] = np.arange(len(self.prompt))
        self._update()
        return rows, slots


def _moves(gone: npt.NDArray[np.bool_]) -> Moves:
    """The last entries that stay, and the places of removed ones before them."""
    left = len(gone) - int(np.count_nonzero(gone))
    return left + np.flatnonzero(~gone[left:]), np.flatnonzero(gone[:left])


def _closed(values: Ints, moves: Moves, left: int) -> Ints:
    movers, holes = moves
    kept = values[:left].copy()
    kept[holes] = values[movers]
    return kept


# ---------------------------------------------------------------- pages


class PagePool:
    """Pages of `numbers` numbers in the dtype of `like`, by their addresses.

    Memory is allocated in slabs that live as long as the pool; returned pages are reused first.
    """

    def __init__(self, numbers: int, like: Tensor) -> None:
        self._numbers, self._like = numbers, like
        self._slabs: list[Tensor] = []
        self._free: list[int] = []
        self._pages = 0

    def take(self, count: int) -> list[int]:
        """Pages of undefined content."""
        if count > len(self._free):
            self._grow(count - len(self._free))
        kept = len(self._free) - count
        taken, self._free = self._free[kept:], self._free[:kept]
        return taken

    def give(self, pages: list[int]) -> None:
        """Return pages to the pool."""
        self._free.extend(pages)

    def _grow(self, count: int) -> None:
        size = self._numbers * self._like.element_size()
        count = max(count, self._pages // 4)
        slab = self._like.new_empty(count, self._numbers)
        start = slab.data_ptr()
        self._slabs.append(slab)
        self._pages += count
        self._free.extend(start + size * page for page in reversed(range(count)))


class Pages:
    """Numbered pages of a pool, which several sequences may share. Page 0 is never taken."""

    def __init__(self, count: int) -> None:
        self.count = 0
        self._free: list[int] = []
        self._users = np.zeros(0, dtype=np.int64)
        self.grow(count)

    def grow(self, count: int) -> None:
        """Have `count` pages; taken ones keep their numbers."""
        self._free = [*range(count - 1, max(self.count, 1) - 1, -1), *self._free]
        self._users = np.concatenate([self._users, np.zeros(count - self.count, dtype=np.int64)])
        self.count = count

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many are taken."""
        return max(self.count - 1, 0) - len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages of undefined content, each with one user; `count` must be free."""
        if count <= 0:
            return []
        taken = self._free[-count:][::-1]
        assert len(taken) == count
        del self._free[-count:]
        self._users[taken] += 1
        return taken

    def keep(self, pages: Sequence[int]) -> None:
        """Each of these pages has one more user."""
        self._users[list(pages)] += 1

    def give(self, pages: Sequence[int]) -> None:
        """Each of these pages has one user less; without any it is free."""
        self._users[list(pages)] -= 1
        self._free += [page for page in pages if not self._users[page]]


class SlotMapping(NamedTuple):
    """Where the keys and values of tokens are: addresses of pages, and places in these."""

    page: Ints
    place: Ints


def joined(first: SlotMapping, second: SlotMapping) -> SlotMapping:
    """The first mapping, then the second."""
    return SlotMapping(*map(np.concatenate, zip(first, second, strict=True)))


class PageTable:
    """The pages of each entry in order: the first `PAGE` places of entry e are in `pages[e, 0]`."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: Ints = np.zeros((0, 1), dtype=np.int64)
        self._count: Ints = np.zeros(0, dtype=np.int64)

    def reserve(self, places_E: Ints, first: int = 0) -> None:
        """Get pages for these places of each entry from `first` on; new entries start empty."""
        last = first + len(places_E)
        need = -(-places_E // PAGE)
        if last <= len(self._count) and not (need > self._count[first:last]).any():
            return
        self._widen(last, int(need.max(initial=1)))
        have = self._count[first:last]
        for entry in np.flatnonzero(need > have).tolist():
            taken = self._pool.take(int(need[entry] - have[entry]))
            self.pages[first + entry, have[entry] : need[entry]] = taken
            have[entry] = need[entry]

    def adopt(self, entry: int, pages: list[int]) -> None:
        """Give pages of the same pool to an entry that has none."""
        self._widen(entry + 1, len(pages))
        self.pages[entry, : len(pages)] = pages
        self._count[entry] = len(pages)

    def release(self, entry: int) -> list[int]:
        """Take an entry's pages away and return them."""
        pages: list[int] = self.pages[entry, : self._count[entry]].tolist()
        self._count[entry] = 0
        return pages

    def close(self, moves: Moves, left: int) -> None:
        """Remove entries so that `left` remain: `moves` are old and new numbers of those that move.
        The pages of removed entries go back to the pool."""
        movers, holes = moves
        # A row that ended at its first token has no page.
        self._widen(max(left, int(movers.max(initial=-1)) + 1), 1)
        gone = np.ones(len(self._count), dtype=np.bool_)
        gone[:left] = False
        gone[holes], gone[movers] = True, False
        for entry in np.flatnonzero(gone).tolist():
            self._pool.give(self.pages[entry, : self._count[entry]].tolist())
        self.pages[holes], self._count[holes] = self.pages[movers], self._count[movers]
        self.pages, self._count = self.pages[:left].copy(), self._count[:left].copy()

    def locate(self, entry_T: Ints, place_T: Ints) -> SlotMapping:
        """Page and offset of each entry's place."""
        return SlotMapping(self.pages[entry_T, place_T // PAGE], place_T % PAGE)

    def _widen(self, entries: int, most: int) -> None:
        old, wide = self.pages.shape
        if entries <= old and most <= wide:
            return
        if most > wide:
            most = max(most, 2 * wide)
        new = np.zeros((max(entries, old), max(most, wide)), dtype=np.int64)
        new[:old, :wide] = self.pages
        self.pages = new
        self._count = np.concatenate([self._count, np.zeros(len(new) - old, dtype=np.int64)])


def page_numbers(layers: int, heads: int, width: int) -> int:
    """Of keys and values (layers, 2, heads, `PAGE` * width), as `kernels/decode.c` reads them."""
    return layers * 2 * heads * PAGE * width


class Pool(Protocol):
    """What gives and takes pages."""

    def give(self, pages: list[int]) -> None: ...


P = TypeVar("P", bound=Pool)


class PrefixCache:
    """Sequences by their tokens, each with the pages of its keys and values.

    They are valid for one set of weights. A call of the engine `take`s those that its prompts begin
    with, and the others are freed; it `hold`s the pages of at most `most` of its own sequences, and
    `name`s these by their tokens at its end. `runner` is what the last call ran the model with,
    if a later one may use it, and `waiting` are prompts of later calls, whose pages stay.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self.runner: Any = None
        self.waiting: Sequence[Ints] = ()
        self._pool: Any = None
        self._held: dict[int, list[int]] = {}
        self._named: dict[bytes, list[list[int]]] = {}
        self._lengths: set[int] = set()

    @property
    def lasts(self) -> bool:
        """Whether it is for several calls."""
        return self._most > 0

    @property
    def full(self) -> bool:
        """Whether no further sequence can be held."""
        return len(self._held) >= self._most

    def pool(self, make: Callable[[], P]) -> P:
        """The pool of all pages, made at the first call."""
        if self._pool is None:
            self._pool = make()
        made: P = self._pool
        return made

    def take(self, prompts: Sequence[Ints]) -> tuple[Ints, list[list[int]]]:
        """How many of each prompt's first tokens have keys and values (never the last one), and
        their pages, for those prompts that have any.

        In order, each prompt takes the longest beginning that is left.
        """
        found = [self._pop(tokens) for tokens in prompts]
        kept = [one for tokens in self.waiting if (one := self._pop(tokens))]
        self._forget()
        for length, name, pages in kept:
            self._file(length, name, pages)
        known = np.array([one[0] if one else 0 for one in found], dtype=np.int64)
        return known, [one[2] for one in found if one]

    def _pop(self, tokens: Ints) -> tuple[int, bytes, list[int]] | None:
        """The longest beginning of a prompt that is left: its length, name and pages."""
        lengths = sorted(length for length in self._lengths if length < len(tokens))
        for length, name in reversed(list(_names(tokens, lengths))):
            if pages := self._named.get(name):
                return length, name, pages.pop()
        return None

    def _file(self, length: int, name: bytes, pages: list[int]) -> None:
        self._named.setdefault(name, []).append(pages)
        self._lengths.add(length)

    def hold(self, sequence: int, pages: list[int]) -> None:
        """Keep the pages of a sequence, numbered as in a `Request`."""
        self._held[sequence] = pages

    def name(self, groups: Sequence[Group]) -> None:
        """File held pages by their tokens: all but a completion's last, which was not fed."""
        for sequence, pages in self._held.items():
            prompt, index = divmod(sequence, len(groups[0].completions))
            group = groups[prompt]
            own = group.completions[index].tokens[:-1]
            tokens = np.concatenate([np.array(group.prompt.tokens, dtype=np.int64), own])
            ((length, name),) = _names(tokens, [len(tokens)])
            self._file(length, name, pages)
        self._held = {}

    def drop_held(self) -> None:
        """Free the pages of this call's sequences, and of those that wait."""
        self._forget()
        for pages in self._held.values():
            self._pool.give(pages)
        self._held = {}

    def close(self) -> None:
        """Free all memory; nothing is held from now on."""
        self.drop_held()
        self.clear()
        self._most = 0

    def clear(self) -> None:
        """Free all memory, as after an interrupted call whose pages are unknown."""
        self._pool, self._held, self._named, self._lengths = None, {}, {}, set()
        self.runner = None

    def _forget(self) -> None:
        """Free what no prompt begins with."""
        for entries in self._named.values():
            for pages in entries:
                self._pool.give(pages)
        self._named, self._lengths = {}, set()


def _names(tokens: Ints, lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Each length, ascending, and a hash of that number of first tokens."""
    digest, done = sha256(), 0
    for length in lengths:
        digest.update(tokens[done:length].tobytes())
        done = length
        yield length, digest.copy().digest()
