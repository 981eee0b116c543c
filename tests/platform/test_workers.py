from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.platform.worker_pool import WorkerPool, WorkerResult
from keel.types import KeelError
from tests.platform.processes import children, eventually, processes_with
from tests.source_tree import ROOT

MODULE = "tests.platform.odd_worker"
LONG = 600.0
"""Seconds that no test waits for."""


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "src"))))


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(MODULE, workers=2, memory_mb=512)
    yield made
    made.close()


def test_answers_come_in_order(pool: WorkerPool) -> None:
    assert children() == set() or not pool._workers  # nothing starts before it is needed
    items = [["echo", "x" * 200_000], ["echo", {"a": [1, None]}], *(["echo", n] for n in range(9))]
    assert [one.value for one in pool.map(items, LONG)] == [value for _, value in items]
    assert pool.map([], LONG) == []


def test_workers_stay_and_there_are_no_more_than_asked(pool: WorkerPool) -> None:
    results = [pool.map([["print", "noise\n[true, 1]"]] * 6, LONG) for _ in range(2)]
    pids = {one.value for answers in results for one in answers}
    assert len(pool._workers) == 2
    assert 1 <= len(pids) <= 2
    assert pids <= children()


def test_one_that_hangs_is_killed_and_the_next_is_still_judged(pool: WorkerPool) -> None:
    before = children()  # of other tests in this process
    # The last items wait until a new worker has started.
    items = [["sleep", LONG], ["hold", 10**9], ["echo", 1], ["echo", 2]]
    results = pool.map(items, 1.0)
    assert [one.wrong for one in results] == ["timed out", "timed out", None, None]
    assert [one.value for one in results[2:]] == [1, 2]
    assert len(children() - before) <= 2


def test_one_that_dies_raises_or_eats_memory(pool: WorkerPool) -> None:
    items = [["exit", 0], ["raise", "no"], ["take", 10**10], ["echo", 3], ["exit", 1], ["echo", 4]]
    results = pool.map(items, LONG)
    assert [one.wrong for one in results] == ["died", "raised", "raised", None, "died", None]
    assert results[1].message == "ValueError: no"
    assert results[2].message.startswith("MemoryError")
    assert [results[3].value, results[5].value] == [3, 4]


def test_from_threads_at_the_same_time(pool: WorkerPool) -> None:
    results: dict[int, list[WorkerResult]] = {}

    def work(n: int) -> None:
        results[n] = pool.map([["sleep", n / 100]] * 20, LONG)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: {one.value for one in answers} for n, answers in results.items()} == {
        n: {n / 100} for n in range(4)
    }


def test_close_ends_the_workers_and_a_call_under_way() -> None:
    pool = WorkerPool(MODULE, workers=1)
    before = children()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            pool.map([["sleep", LONG]], LONG)
        except KeelError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert eventually(lambda: bool(pool._workers) and pool._workers[0].item == 0)
    pool.close()
    thread.join(60.0)
    assert not thread.is_alive()
    assert [str(error) for error in errors] == ["the pool of workers is closed"]
    assert children() <= before
    with pytest.raises(KeelError, match="closed"):
        pool.map([["echo", 1]], LONG)


def test_a_pool_that_is_let_go_of_leaves_nothing() -> None:
    before = children()
    pool = WorkerPool(MODULE, workers=1)
    pool.map([["echo", 1]], LONG)
    assert children() != before
    del pool
    assert children() <= before


def test_a_worker_that_does_not_start_says_why() -> None:
    pool = WorkerPool("tests.graders.no_such_worker")
    with pytest.raises(KeelError, match=r"no_such_worker does not start \(died\): .*No module"):
        pool.map([["echo", 1]], LONG)
    assert pool._workers == []


def test_after_a_call_that_fails_no_answer_of_its_items_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = WorkerPool(MODULE, workers=2)
    pool.map([["echo", 0]], LONG)
    module = pool.module
    pool.module = "tests.graders.no_such_worker"  # a second one does not start
    with pytest.raises(KeelError, match="does not start"):
        pool.map([["wait", str(tmp_path / "go")], ["wait", str(tmp_path / "go")]], LONG)
    pool.module = module
    (tmp_path / "go").touch()
    assert [one.value for one in pool.map([["echo", 1]] * 3, LONG)] == [1, 1, 1]
    # Nor after one whose item cannot be sent: the worker would wait for it.
    with pytest.raises(TypeError):
        pool.map([["echo", 2], ["echo", object()]], LONG)
    assert pool._workers == []
    assert [one.value for one in pool.map([["echo", 3]] * 3, LONG)] == [3, 3, 3]
    pool.close()


def test_workers_do_not_shadow_modules_with_files_of_the_folder(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("json.py", "w") as file:
        file.write("raise SystemExit")
    pool = WorkerPool(MODULE, workers=1)
    assert pool.map([["echo", 1]], LONG)[0].value == 1
    pool.close()


def test_no_worker_outlives_a_parent_that_is_killed() -> None:
    """Not even one that is deep in C code, with Python's lock held."""
    code = (
        "import json, threading, time\n"
        "from keel.platform.worker_pool import WorkerPool\n"
        f"pool = WorkerPool({MODULE!r}, workers=2)\n"
        "results = pool.map([['print', '']] * 2, 600)\n"
        "items = [['hold', 10**9], ['sleep', 600]]\n"
        "threading.Thread(target=pool.map, args=(items, 600)).start()\n"
        "while len([w for w in pool._workers if w.item is not None]) < 2: time.sleep(0.01)\n"
        "print(json.dumps([w.process.pid for w in pool._workers]), flush=True)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = set(json.loads(parent.stdout.readline()))
    assert len(pids) == 2
    assert pids <= set(processes_with(MODULE))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: not pids & set(processes_with(MODULE)))


def test_workers_must_be_some() -> None:
    with pytest.raises(KeelError, match="workers = 0: give at least 1"):
        WorkerPool(MODULE, workers=0)
