from __future__ import annotations

import asyncio
import resource
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from keel.rewards.judge.spending import Cost, SpendLimit
from keel.rewards.judge.store import JudgeStore, StoredAnswer, Ticket
from keel.rewards.judge.writer import Disk
from tests.rewards.judge_server import WAIT

WORST = Cost(100, 10, 1.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JudgeStore]:
    found = JudgeStore(tmp_path / "a.db")
    yield found
    found.close()


def at_once(
    store: JudgeStore,
    works: Callable[[], list[Callable[[], Any]]],
    meanwhile: Callable[[list[asyncio.Task[Any]]], None] = lambda tasks: None,
) -> list[Any]:
    """What calls bring that all wait while the thread is at another one, or their exceptions."""
    begun, gate = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert gate.wait(WAIT)

    async def run() -> list[Any]:
        disk = Disk(store)
        first = asyncio.create_task(disk.run(hold))
        assert await asyncio.to_thread(begun.wait, WAIT)
        tasks = [asyncio.create_task(disk.run(work)) for work in works()]
        while len(disk._waiting) < len(tasks):
            await asyncio.sleep(0)
        meanwhile(tasks)
        for _ in range(3):  # a cancellation is passed on in the loop's next round
            await asyncio.sleep(0)
        gate.set()
        await first
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(disk.close)
        return ends

    return asyncio.run(run())


def reserve(store: JudgeStore, key: str) -> Callable[[], Any]:
    return lambda: store.reserve(key, WORST, SpendLimit())


def commits(store: JudgeStore, into: list[str]) -> None:
    """Note each commit from now on."""
    store._db.set_trace_callback(lambda said: into.append(said) if said == "COMMIT" else None)


def test_what_waits_at_the_same_time_is_one_commit(store: JudgeStore) -> None:
    seen: list[str] = []

    def works() -> list[Callable[[], Any]]:
        return [reserve(store, key) for key in "abcde"]

    ends = at_once(store, works, lambda tasks: commits(store, seen))
    assert [ticket.key for ticket in ends] == list("abcde")
    assert len(seen) == 2  # the one that held the thread, and the five
    assert store.account().open == 5


def test_one_after_the_other_are_commits_of_their_own(store: JudgeStore) -> None:
    seen: list[str] = []
    commits(store, seen)

    async def run() -> None:
        disk = Disk(store)
        for key in "abc":
            assert isinstance(await disk.run(reserve(store, key)), Ticket)
            # On the disk when it returns: another that opens the file sees it.
            with sqlite3.connect(f"file:{store.path}?mode=ro", uri=True) as other:
                row = other.execute("SELECT COUNT(*) FROM requests WHERE key = ?", key).fetchone()
            other.close()
            assert row == (1,)
        await asyncio.to_thread(disk.close)

    asyncio.run(run())
    assert len(seen) == 3


def test_one_that_raises_leaves_the_others(store: JudgeStore) -> None:
    def works() -> list[Callable[[], Any]]:
        def half() -> None:
            with store._transaction():
                store.reserve("half", WORST, SpendLimit())
                raise ValueError("boom")

        return [reserve(store, "a"), half, reserve(store, "b")]

    first, second, third = at_once(store, works)
    assert isinstance(second, ValueError)
    assert (first.key, third.key) == ("a", "b")
    assert store.account().open == 2
    assert isinstance(store.reserve("half", WORST, SpendLimit()), Ticket)


def test_what_is_cancelled_before_it_began_is_left_undone(store: JudgeStore) -> None:
    def works() -> list[Callable[[], Any]]:
        return [reserve(store, key) for key in "abc"]

    ends = at_once(store, works, lambda tasks: tasks[1].cancel() and None)
    assert isinstance(ends[1], asyncio.CancelledError)
    assert (ends[0].key, ends[2].key) == ("a", "c")
    assert store.account().open == 2


def test_where_all_are_cancelled_nothing_is_done(store: JudgeStore) -> None:
    seen: list[str] = []

    def cancel(tasks: list[asyncio.Task[Any]]) -> None:
        commits(store, seen)
        for task in tasks:
            task.cancel()

    ends = at_once(store, lambda: [reserve(store, key) for key in "ab"], cancel)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert len(seen) == 1
    assert store.account().open == 0


@contextmanager
def full(path: Path) -> Iterator[None]:
    """No file of this process may grow beyond the log of a store: as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_commit_that_fails_fails_all_and_leaves_nothing_open(store: JudgeStore) -> None:
    big = StoredAnswer("x" * 300_000, "stop", "", Cost(1, 1, 0.0))
    ticket = store.reserve("k", WORST, SpendLimit())
    assert isinstance(ticket, Ticket)
    before = store.account()
    assert store.path is not None
    with full(store.path.with_name("a.db-wal")):
        ends = at_once(
            store,
            lambda: [
                reserve(store, "a"),
                lambda: store.settle(ticket, big, "m"),
                reserve(store, "b"),
            ],
        )
        assert [type(end) for end in ends] == [sqlite3.OperationalError] * 3
        assert not store._db.in_transaction
    assert store.account() == before
    # There is room again: it goes on.
    assert at_once(store, lambda: [lambda: store.settle(ticket, big, "m")]) == [big]
    assert (store.account().answers, store.account().open) == (1, 0)


def test_a_commit_that_is_refused_fails_all_and_is_undone(store: JudgeStore) -> None:
    """Here the transaction is still there when COMMIT raises."""
    store._db.execute("PRAGMA foreign_keys = ON")
    store._db.execute("CREATE TABLE top (a PRIMARY KEY)")
    store._db.execute("CREATE TABLE sub (a REFERENCES top DEFERRABLE INITIALLY DEFERRED)")

    def orphan() -> None:
        store._db.execute("INSERT INTO sub VALUES (1)")

    ends = at_once(store, lambda: [reserve(store, "a"), orphan])
    assert [type(end) for end in ends] == [sqlite3.IntegrityError] * 2
    assert not store._db.in_transaction
    assert store.account().open == 0
    assert isinstance(store.reserve("a", WORST, SpendLimit()), Ticket)


def test_one_that_ends_the_transaction_fails_all(store: JudgeStore) -> None:
    """As SQLite may by itself when something is badly wrong."""

    def undo() -> None:
        store._db.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")

    ends = at_once(store, lambda: [reserve(store, "a"), undo, reserve(store, "b")])
    assert [str(end) for end in ends] == ["database or disk is full"] * 3
    assert store.account().open == 0


def test_closed_it_takes_nothing(store: JudgeStore) -> None:
    async def run() -> None:
        disk = Disk(store)
        await disk.run(reserve(store, "a"))
        disk.close()
        with pytest.raises(RuntimeError, match="shutdown"):
            await disk.run(reserve(store, "b"))

    asyncio.run(run())
    assert store.account().open == 1
