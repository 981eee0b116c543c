"""What pages show when the files of a run change under them. Without a browser."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from keel.types import KeelError
from keel.view import curves, rollouts, runs
from keel.view.address import Address
from keel.view.library import Library
from tests.view import hostile
from tests.view.simulated import marked, simulate, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the files often."""
    for module in (curves, rollouts, runs):
        monkeypatch.setattr(module, "EVERY", 0.02)


def problems(user: Any) -> list[str]:
    return [one.text for one in marked(user, "problem")]


def test_list_without_runs_is_empty_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        hostile.write(tmp_path / name)
    library = Library([tmp_path])

    async def use(user: Any) -> None:
        (table,) = marked(user, "runs")
        assert [row["id"] for row in table.rows] == ["a", "b"]
        shutil.move(tmp_path / "a", tmp_path / ".a")
        await until(lambda: [row["id"] for row in table.rows] == ["b"])
        shutil.move(tmp_path / "b", tmp_path / ".b")
        await until(lambda: table.rows == [])
        with pytest.raises(KeelError) as error:
            library.names()
        assert problems(user) == [str(error.value)]
        shutil.move(tmp_path / ".b", tmp_path / "b")
        await until(lambda: [row["id"] for row in table.rows] == ["b"])
        assert problems(user) == []

    simulate(lambda: runs.runs_page(library, Address()), use)
    assert "Traceback" not in capfd.readouterr().err


def test_links_of_the_list_keep_the_theme(tmp_path: Path) -> None:
    hostile.write(tmp_path / "a")
    (hostile.write(tmp_path / "b").metrics).write_text("no record\n")

    async def use(user: Any) -> None:
        (table,) = marked(user, "runs")
        links = [row["link"] for row in table.rows]
        assert links == [f"/curves?run={name}&theme=dark" for name in "ab"]

    simulate(lambda: runs.runs_page(Library([tmp_path]), Address(theme="dark")), use)
