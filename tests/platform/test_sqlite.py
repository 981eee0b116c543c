"""A SQLite file that several processes open."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from pathlib import Path

import pytest

from keel.platform.sqlite import Database
from keel.preferences.records import FORMAT
from keel.types import KeelError


@pytest.fixture
def other(tmp_path: Path) -> sqlite3.Connection:
    """Another process's connection to a new file, in the middle of writing to it."""
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    return other


def test_opening_waits_for_a_process_that_makes_the_file(
    other: sqlite3.Connection, tmp_path: Path
) -> None:
    end = threading.Timer(0.5, lambda: other.execute("COMMIT"))
    end.start()
    Database(tmp_path / "a.db", FORMAT, "store", timeout=60.0).close()
    end.join()
    other.close()


def test_opening_waits_no_longer_than_it_may(other: sqlite3.Connection, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"store cannot be used: .* locked.*wait for it to end"):
        Database(tmp_path / "a.db", FORMAT, "store", timeout=0.2)
    other.close()


def test_folder_that_does_not_fit_on_the_disk_asks_for_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(KeelError, match=r"No space left on device: free space on its disk$"):
        Database(tmp_path / "new" / "a.db", FORMAT, "store")
