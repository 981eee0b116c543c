"""A SQLite file that several processes open."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from keel.data.database import Database
from keel.data.preferences.store.tables import FORMAT
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
