"""What `keel runs list`, `tag`, `untag` and `delete` do with run folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from keel.cli.main import main
from keel.platform.files import locked
from keel.runs.reader import load
from keel.training.run import train
from tests.training.small import small
from tests.view.hostile import MARKUP, write

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    train(small("steps=3", "checkpoints.every=1", "evaluation.prompts=4"), root / "a")
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs/a and runs/b, of the same content."""
    for name in "ab":
        shutil.copytree(made / "a", tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: Capture, *words: str) -> str:
    """The error of a command that ends with 2."""
    capsys.readouterr()
    assert main(["runs", *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    return error


def checkpoints(run: str) -> list[str]:
    return [entry.path.name for entry in load(run).checkpoints()]


def test_list_shows_state_figures_and_size(here: Path, capsys: Capture) -> None:
    write(here / "runs" / "c")
    (here / "runs" / "d").mkdir()
    (here / "runs/d/recipe.toml").write_text("stages = 3")
    assert main(["runs", "list", "--json"]) == 0
    found = {one["run"]: one for one in json.loads(capsys.readouterr().out)}
    one = found["a"]
    last = load("runs/a").metrics()[-1]
    assert (one["recipe"], one["state"], one["step"], one["steps"]) == ("tiny", "finished", 3, 3)
    assert one["newest"] == pytest.approx(last["reward"], rel=1e-3)
    assert one["accuracy"] == last["eval/pass@1"]
    assert one["bytes"] == sum(p.stat().st_size for p in Path("runs/a").rglob("*") if p.is_file())
    assert one["seconds"] == pytest.approx(load("runs/a").seconds(), abs=1e-3)
    assert found["c"]["recipe"] == MARKUP
    assert found["c"]["state"] == "interrupted"
    assert "has no [[stages]]" in found["d"]["error"]
    assert main(["runs", "list", "runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["a", "tiny", "finished", "3/3"]
    assert lines[-1].startswith("4 runs, ")


def test_tags_are_kept_in_the_run_folder(here: Path, capsys: Capture) -> None:
    assert main(["runs", "tag", "runs/a", "good", "v1", "good"]) == 0
    assert main(["runs", "untag", "runs/a", "v1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["runs/a: good v1", "runs/a: good"]
    assert load("runs/a").tags() == ["good"]
    assert "it has good" in refused(capsys, "untag", "runs/a", "v1")
    assert "not a valid tag" in refused(capsys, "tag", "runs/a", "two words")
    assert load("runs/a").tags() == ["good"]
    assert main(["runs", "untag", "runs/a", "good"]) == 0
    assert not (here / "runs/a/tags.json").exists()


def test_delete_keeps_the_newest_whole_checkpoint(here: Path, capsys: Capture) -> None:
    assert checkpoints("runs/a")[-2:] == ["step-000002", "step-000003"]
    (here / "runs/a/checkpoints/step-000003/state.json").write_text("{}")
    before = load("runs/a").disk_use()
    assert main(["runs", "delete", "runs/a", "--keep-last-checkpoint", "--yes", "--json"]) == 0
    freed = json.loads(capsys.readouterr().out)["bytes"]
    assert checkpoints("runs/a") == ["step-000002"]
    assert before - load("runs/a").disk_use() == freed > 0
    assert main(["runs", "delete", "runs/a", "--checkpoints-only", "--yes"]) == 0
    assert checkpoints("runs/a") == []
    assert len(load("runs/a").metrics()) == 3


def test_delete_refuses_running_runs_and_other_folders(here: Path, capsys: Capture) -> None:
    with locked(here / "runs" / "b"):
        error = refused(capsys, "delete", "runs/a", "runs/b", "--yes")
    assert "is running" in error
    (here / "notes").mkdir()
    assert "is not a run folder" in refused(capsys, "delete", "runs/a", "notes", "--yes")
    (here / "latest").symlink_to("runs/a")
    assert "is a link to" in refused(capsys, "delete", "latest/", "--yes")
    assert (here / "runs" / "a").is_dir()
    assert (here / "notes").is_dir()


def test_delete_asks_on_a_terminal(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "add --yes" in refused(capsys, "delete", "runs/a")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    asked: list[str] = []

    def answer(with_: str) -> Any:
        monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or with_)

    answer("")
    assert main(["runs", "delete", "runs/a"]) == 0
    assert (here / "runs" / "a").is_dir()
    answer("y")
    assert main(["runs", "delete", "runs/a", "runs/a"]) == 0
    assert asked[1].startswith("delete 1 folder, ")
    assert [path.name for path in (here / "runs").iterdir()] == ["b"]
