"""Keys and values in pages: what an entry needs and no more, and nothing is moved as it grows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from keel.engines.scheduler import Moves
from keel.models.kernels.decode import PAGE

Ints = npt.NDArray[np.int64]


class PagePool:
    """Pages of `numbers` numbers like those of `like`, by their addresses.

    Memory is taken in slabs that stay until the pool is gone; a page given back is the next taken.
    """

    def __init__(self, numbers: int, like: Tensor) -> None:
        self._numbers, self._like = numbers, like
        self._slabs: list[Tensor] = []
        self._free: list[int] = []
        self._pages = 0

    def take(self, count: int) -> list[int]:
        """So many pages; what lies in them is undefined."""
        if count > len(self._free):
            self._grow(count - len(self._free))
        kept = len(self._free) - count
        taken, self._free = self._free[kept:], self._free[:kept]
        return taken

    def give(self, pages: list[int]) -> None:
        """Back what `take` gave."""
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
    """Where tokens' keys and values are: pages, by their addresses, and places in these."""

    page: Ints
    place: Ints


def joined(first: SlotMapping, second: SlotMapping) -> SlotMapping:
    """One behind the other."""
    page, place = (
        np.concatenate([getattr(first, name), getattr(second, name)]) for name in ("page", "place")
    )
    return SlotMapping(page, place)


class PageTable:
    """The pages of each entry, in the order of its places: entry e's first `PAGE` in `pages[e, 0]`.

    Entries are the first of the arrays, as in `Batch`.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: Ints = np.zeros((0, 1), dtype=np.int64)
        self._count: Ints = np.zeros(0, dtype=np.int64)

    def reserve(self, places_E: Ints, first: int = 0) -> None:
        """Pages for so many places of each entry from `first` on; new entries begin empty."""
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
        """Pages of the same pool become the first of an entry that has none."""
        self._widen(entry + 1, len(pages))
        self.pages[entry, : len(pages)] = pages
        self._count[entry] = len(pages)

    def release(self, entry: int) -> list[int]:
        """An entry's pages, which it has no more."""
        pages: list[int] = self.pages[entry, : self._count[entry]].tolist()
        self._count[entry] = 0
        return pages

    def close(self, moves: Moves, left: int) -> None:
        """Entries `moves` take the places of others, of which `left` remain; their pages go back
        that are gone."""
        movers, holes = moves
        # Rows that ended at their first token never had a page.
        self._widen(max(left, int(movers.max(initial=-1)) + 1), 1)
        gone = np.ones(len(self._count), dtype=np.bool_)
        gone[:left] = False
        gone[holes], gone[movers] = True, False
        for entry in np.flatnonzero(gone).tolist():
            self._pool.give(self.pages[entry, : self._count[entry]].tolist())
        self.pages[holes], self._count[holes] = self.pages[movers], self._count[movers]
        self.pages, self._count = self.pages[:left].copy(), self._count[:left].copy()

    def homes(self, entry_T: Ints, place_T: Ints) -> SlotMapping:
        """Where the entries' places are."""
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
