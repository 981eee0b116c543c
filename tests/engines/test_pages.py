"""Pages against a dictionary of what each entry was given."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from keel.engines.scheduler import PagePool, PageTable, page_numbers
from keel.models.kernels.decode import PAGE

LIKE = torch.empty(0)


def moves(movers: list[int], holes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(movers, dtype=np.int64), np.array(holes, dtype=np.int64)


def places(*counts: int) -> np.ndarray:
    return np.array(counts, dtype=np.int64)


def test_pages_lie_apart_and_are_given_out_again() -> None:
    numbers = page_numbers(3, 2, 8)
    assert numbers == 3 * 2 * 2 * PAGE * 8
    pool = PagePool(numbers, LIKE)
    first = pool.take(5)
    more = pool.take(40)
    ends = sorted([*first, *more])
    assert len(set(ends)) == 45
    assert all(b - a >= 4 * numbers for a, b in pairwise(ends))
    pool.give(more[:3])
    assert set(pool.take(3)) == set(more[:3])


def test_an_entry_that_grows_or_moves_keeps_its_pages() -> None:
    table = PageTable(PagePool(4, LIKE))
    table.reserve(places(1, PAGE, PAGE + 1))
    one, two, three = (table.pages[e, :n].tolist() for e, n in enumerate((1, 1, 2)))
    table.reserve(places(1, PAGE + 1, 5 * PAGE))
    assert table.pages[0, 0] == one[0]
    assert table.pages[1, 0] == two[0]
    assert table.pages[2, :2].tolist() == three
    assert len({int(p) for e, n in enumerate((1, 2, 5)) for p in table.pages[e, :n]}) == 8
    whole = table.pages[2, :5].tolist()
    gone = table.pages[0, 0]
    table.close(moves([2], [0]), 2)
    assert table.pages[0, :5].tolist() == whole
    assert table.pages[1, 0] == two[0]
    # What the entry that is gone had is the next to be given.
    table.reserve(places(1, 1, 1))
    assert table.pages[2, 0] == gone
