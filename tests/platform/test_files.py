"""Files that several processes replace at the same time, and the lock of a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keel.platform import files
from keel.types import KeelError
from tests.runs.example import one_stage

OURS, THEIRS = b"ours " * 1_000, b"theirs " * 1_000


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_two_writers_of_a_file_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other begins and ends after ours is written and before it is in place."""
    path = tmp_path / "report.html"
    sync, seen = files.sync_path, []

    def sync_path(synced: Path) -> None:
        if not seen:
            seen.append(synced)
            files.write_bytes(path, THEIRS)
            assert path.read_bytes() == THEIRS
        sync(synced)

    monkeypatch.setattr(files, "sync_path", sync_path)
    files.write_bytes(path, OURS)
    assert path.read_bytes() == OURS
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    files.write_bytes(path, OURS)
    with pytest.raises(ZeroDivisionError), files.replacing(path) as file:
        file.write(THEIRS[: 1 // 0])
    assert path.read_bytes() == OURS
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_file_go_with_its_next_write(tmp_path: Path, dead: int) -> None:
    names = [
        f"{dead}-01234567-a.html",
        f"{os.getpid()}-01234567-a.html",
        f"{dead}-01234567-b-a.html",
    ]
    for name in names:
        (tmp_path / f"{files.ASIDE}{name}").write_text("half")
    files.write_bytes(tmp_path / "a.html", OURS)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["a.html", *(f"{files.ASIDE}{name}" for name in names[1:])]
    )
    assert [path.name for path in files.remove_leftovers(tmp_path)] == [f"{files.ASIDE}{names[2]}"]


def test_the_holder_of_a_folder_writes_under_one_name(tmp_path: Path) -> None:
    """A start that was killed is known by the names of what it left."""
    with files.locked(tmp_path), files.replacing(tmp_path / "recipe.toml"):
        assert files.aside(tmp_path / "recipe.toml").is_file()


def test_one_process_locks_a_folder_once(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    with (
        files.locked(folder.path),
        pytest.raises(KeelError, match="is in use"),
        files.locked(folder.path),
    ):
        pass
    with pytest.raises(ZeroDivisionError), files.locked(folder.path):
        raise ZeroDivisionError
    with files.locked(folder.path):
        pass
    assert folder.lock.read_bytes() == b""
