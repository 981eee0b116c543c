"""Keys and values in pages: an entry has what it needs, growing it moves nothing, and a later call
may begin with those of an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt
from torch import Tensor

from keel.engines.scheduler import Moves
from keel.models.kernels.decode import PAGE
from keel.types import Group

Ints = npt.NDArray[np.int64]


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


@dataclass(frozen=True, eq=False)
class SlotMapping:
    """Where the keys and values of tokens are: addresses of pages, and places in these."""

    page: Ints
    place: Ints


def joined(first: SlotMapping, second: SlotMapping) -> SlotMapping:
    """The first mapping, then the second."""
    page, place = (
        np.concatenate([getattr(first, name), getattr(second, name)]) for name in ("page", "place")
    )
    return SlotMapping(page, place)


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


class PrefixCache:
    """Sequences by their tokens, each with the pages of its keys and values.

    They are valid for one set of weights. A call of the engine `take`s those that its prompts begin
    with, and the others are freed; it `hold`s the pages of at most `most` of its own sequences, and
    `name`s these by their tokens at its end.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._pool: PagePool | None = None
        self._held: dict[int, list[int]] = {}
        self._named: dict[bytes, list[list[int]]] = {}
        self._lengths: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether no further sequence can be held."""
        return len(self._held) >= self._most

    def pool(self, numbers: int, like: Tensor) -> PagePool:
        """The pool of all pages, created at the first call."""
        if self._pool is None:
            self._pool = PagePool(numbers, like)
        return self._pool

    def take(self, prompts: Sequence[Ints]) -> tuple[Ints, list[list[int]]]:
        """How many of each prompt's first tokens have keys and values (never the last one), and
        their pages, for those prompts that have any.

        In order, each prompt takes the longest beginning that is left.
        """
        known = np.zeros(len(prompts), dtype=np.int64)
        taken = []
        lengths = sorted(self._lengths)
        for number, tokens in enumerate(prompts):
            names = list(_names(tokens, [n for n in lengths if n < len(tokens)]))
            for length, name in reversed(names):
                if pages := self._named.get(name):
                    known[number] = length
                    taken.append(pages.pop())
                    break
        self._forget()
        return known, taken

    def hold(self, sequence: int, pages: list[int]) -> None:
        """Keep the pages of a sequence, numbered as in `DecodeBatch`."""
        self._held[sequence] = pages

    def name(self, groups: Sequence[Group]) -> None:
        """File held pages by their tokens: all but a completion's last, which was not fed."""
        for sequence, pages in self._held.items():
            prompt, index = divmod(sequence, len(groups[0].completions))
            group = groups[prompt]
            own = group.completions[index].tokens[:-1]
            tokens = np.concatenate([np.array(group.prompt.tokens, dtype=np.int64), own])
            ((length, name),) = _names(tokens, [len(tokens)])
            self._named.setdefault(name, []).append(pages)
            self._lengths.add(length)
        self._held = {}

    def close(self) -> None:
        """Free all memory; nothing is held from now on."""
        self.clear()
        self._most = 0

    def clear(self) -> None:
        """Free all memory, as after an interrupted call whose pages are unknown."""
        self._pool, self._held, self._named, self._lengths = None, {}, {}, set()

    def _forget(self) -> None:
        """Free what no prompt begins with."""
        for entries in self._named.values():
            for pages in entries:
                assert self._pool is not None
                self._pool.give(pages)
        self._named, self._lengths = {}, set()


def _names(tokens: Ints, lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Each length, ascending, and a hash of that number of first tokens."""
    digest, done = sha256(), 0
    for length in lengths:
        digest.update(tokens[done:length].tobytes())
        done = length
        yield length, digest.copy().digest()
