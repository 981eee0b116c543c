"""Processes that write to one store at once, and are killed: what was acknowledged is there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from keel.preferences.records import LabelRecord, PromptRecord
from keel.preferences.store import PreferenceStore
from tests.preferences.made import human, made, taken

PAIRS = 400
WORK = """
import sys
from pathlib import Path
from tests.preferences.test_killed import work
work(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
"""
OPEN = """
import sys
from pathlib import Path
from keel.preferences.records import PromptRecord
from keel.preferences.store import PreferenceStore
with PreferenceStore(Path(sys.argv[1]), create=True) as store:
    store.add([PromptRecord("shared"), PromptRecord(sys.argv[2])])
"""


def work(path: Path, log: Path, name: str) -> None:
    """Labels pairs, as a person and in bulk as a judge, and logs each once the store has it."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with PreferenceStore(path) as store:
        number = 0
        while lease := store.lease_next(name, float(number)):
            label = human(lease.pair, 1.0, name)
            store.submit(lease, label)
            os.write(file, f"{label.id}\n".encode())
            bulk = [LabelRecord(lease.pair, n / 4, "judge", name) for n in range(5)]
            store.add(bulk)
            os.write(file, "".join(f"{label.id}\n" for label in bulk).encode())
            number += 1


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments])


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 6))]
)
def test_killed_writers_lose_nothing_that_was_acknowledged(seed: int, tmp_path: Path) -> None:
    path, generator = tmp_path / "a.db", random.Random(seed)
    made(path, PAIRS).close()
    logs = [tmp_path / f"log-{n}" for n in range(3)]
    writers = [start(WORK, str(path), str(log), f"w{n}") for n, log in enumerate(logs)]
    for writer, log in zip(writers, logs, strict=True):
        # So many acknowledgements, then some instant of the next write or commit.
        wanted = 33 * generator.randint(1, 40)
        while writer.poll() is None and (not log.exists() or log.stat().st_size < wanted):
            time.sleep(0.001)
        time.sleep(generator.random() / 50)
        writer.send_signal(signal.SIGKILL)
    for writer in writers:
        writer.wait()
    acknowledged = [line for log in logs for line in log.read_text().splitlines()]
    assert len(acknowledged) >= 3
    assert len(set(acknowledged)) == len(acknowledged)
    with PreferenceStore(path) as store:
        assert store.database.rows("PRAGMA integrity_check") == [("ok",)]
        assert store.database.rows("PRAGMA foreign_key_check") == []
        labels = list(store.labels())
        there = Counter(label.id for label in labels)
        assert all(there[id] == 1 for id in acknowledged)
        # A bulk of labels is there in whole or not at all.
        judged = Counter(
            (label.pair, label.annotator) for label in labels if label.source != "human"
        )
        assert set(judged.values()) <= {5}
        people = Counter(label.pair for label in labels if label.source == "human")
        assert set(people.values()) == {1}
        assert taken(store)
        # What the killed had leased comes back, and another finishes the rest.
        left = 0
        while lease := store.lease_next("last", 1e9):
            assert store.submit(lease, human(lease.pair, 0.0, "last"))
            left += 1
        assert left == PAIRS - len(people)


@pytest.mark.slow
def test_processes_may_create_one_store_at_once(tmp_path: Path) -> None:
    for attempt in range(3):
        path = tmp_path / f"{attempt}.db"
        writers = [start(OPEN, str(path), f"own {n}") for n in range(4)]
        assert [writer.wait() for writer in writers] == [0] * 4
        with PreferenceStore(path) as store:
            contents = {prompt.content for prompt in store.prompts()}
            assert contents == {"shared", *(f"own {n}" for n in range(4))}
            assert PromptRecord("shared") in list(store.prompts())
