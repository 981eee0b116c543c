"""The queue: every sequence enters once, within rows and budget; and the pages of each entry."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.engines.scheduler import DecodeBatch, PagePool, PageTable, page_numbers
from keel.models.kernels.decode import PAGE


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    n=st.integers(1, 6),
    max_num_seqs=st.integers(1, 12),
    budget=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_every_sequence_and_every_prompt_enters_once(
    lengths: list[int], n: int, max_num_seqs: int, budget: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    plen = np.array(lengths)
    batch = DecodeBatch(plen, np.full(len(lengths), 5), n, max_num_seqs, budget)
    entered: list[int] = []
    computed: list[int] = []
    finished: list[int] = []
    total = n * len(lengths)
    for _ in range(2000):
        if not batch.live:
            break
        entry = batch.waiting()
        held = [number for number in entry.sequences if number // n in computed]
        assert held == list(entry.sequences[: entry.held])
        assert {s // n for s in entry.sequences[entry.held :]} == set(entry.prompts)
        assert (
            len(entry.prompts) <= 1
            or plen[entry.prompts.start : entry.prompts.stop].sum() <= budget
        )
        computed += entry.prompts
        entered += entry.sequences
        batch.add(entry)
        assert 0 < len(batch.sequence) <= max_num_seqs
        batch.made += 1
        batch.token = batch.sequence * 100 + batch.made
        before = {int(s): int(t) for s, t in zip(batch.sequence, batch.token, strict=True)}
        rows = batch.sequence.copy()
        done = rng.random(len(rows)) < 0.3
        finished += rows[done].tolist()
        prompts = batch.prompt.copy()
        (movers, holes), (from_slots, to_slots) = batch.drop(done)
        assert not set(movers) & set(holes)
        rows[holes] = rows[movers]
        prompts[to_slots] = prompts[from_slots]
        assert batch.prompt.tolist() == prompts[: len(batch.prompt)].tolist()
        # Those with an answer under way or to come, and no others.
        wanted = {p for p in computed if sum(s // n == p for s in finished) < n}
        assert set(batch.prompt.tolist()) == wanted
        assert len(batch.prompt) == len(wanted)
        np.testing.assert_array_equal(batch.prompt[batch.slot], batch.sequence // n)
        np.testing.assert_array_equal(batch.length, plen[batch.prompt])
        left = total - len(entered)
        assert batch.ahead == min(max_num_seqs, len(batch.sequence) + left)
        assert batch.sequence.tolist() == rows[: len(batch.sequence)].tolist()
        assert {int(s): int(t) for s, t in zip(batch.sequence, batch.token, strict=True)} == {
            s: before[s] for s in batch.sequence.tolist()
        }
        np.testing.assert_array_equal(batch.place, plen[batch.sequence // n] + batch.made - 1)
    assert entered == list(range(total))
    assert computed == list(range(len(lengths)))
    assert sorted(finished) == list(range(total))


# ---------------------------------------------------------------- pages


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
