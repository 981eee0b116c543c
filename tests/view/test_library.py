"""The runs that the pages show: by name, and the newest where a folder is made again."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from keel.runs.layout import RunFolder
from keel.runs.writer import Recorder
from keel.types import KeelError
from keel.view.library import Library, OpenRun, status_of

RECIPE = 'name = "x"\n\n[[stages]]\nstage = "rl"\nname = "{}"\nsteps = {}\n'


def write(path: Path, stage: str, steps: int) -> None:
    with Recorder(RunFolder.create(path, RECIPE.format(stage, steps))) as recorder:
        recorder.metrics(0, 1, {"reward": 1.0})


def where(run: OpenRun) -> tuple[str, int, int]:
    run.update()
    status = status_of(run, run.stage())
    return status.stage, status.step, status.steps


def test_run_in_a_folder_made_again_is_the_new_one(tmp_path: Path) -> None:
    write(tmp_path / "run", "rl", 3)
    library = Library([tmp_path])
    assert where(library.get("run")) == ("rl", 1, 3)
    assert library.get("run") is library.get("run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(KeelError, match="no run 'run' here"):
        library.get("run")
    for stage, steps in (("rl", 50), ("other", 7)):
        write(tmp_path / "run", stage, steps)
        assert where(library.get("run")) == (stage, 1, steps)
        shutil.rmtree(tmp_path / "run")


def test_named_runs_are_shown_or_refused(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, "rl", 3)
    library = Library([tmp_path])
    for wanted, found in ((), "a"), (("b", "nope"), "b"), (("b", "a"), "ba"):
        assert "".join(run.name for run in library.chosen(wanted)) == found
    with pytest.raises(KeelError, match="no run 'nope' here"):
        library.chosen(("nope",))


def test_runs_with_numbers_are_sorted_by_these(tmp_path: Path) -> None:
    for name in ("train-10", "train-2", "b/run", "train-1b", "train-1"):
        write(tmp_path / name, "rl", 3)
    assert Library([tmp_path]).names() == ["b/run", "train-1", "train-1b", "train-2", "train-10"]


@pytest.mark.parametrize(
    ("table", "tasks"),
    [
        ('[[stages.tasks]]\nname = "a"\n[[stages.tasks]]\nname = "b"\npath = "none"\n', "a, b"),
        ('[[stages.tasks]]\nname = "jsonl"\npath = "/data/x/gsm8k.jsonl"\n', "gsm8k.jsonl"),
        ('[stages.environment]\nid = "CartPole-v1"\n', "CartPole-v1"),
        ('[stages.data]\nname = "pairs"\npath = "p.parquet"\n', "p.parquet"),
        ("", ""),
    ],
)
def test_run_names_what_it_trains_on(table: str, tasks: str, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", RECIPE.format("rl", 3) + table)
    run = Library([tmp_path]).get("run")
    assert run.tasks == tasks
    os.utime(run.folder.recipe, (0, time.mktime((2026, 3, 4, 5, 6, 0, 0, 0, -1))))
    assert run.begun == "2026-03-04 05:06"


def test_runs_of_one_name_in_two_folders_are_distinct(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write(second / "x", "rl", 7)
    library = Library([first, second])
    assert library.get("x").folder.path == second / "x"
    write(first / "x", "rl", 9)
    assert library.names() == ["x", "x'"]
    for name, folder in (("x", first), ("x'", second)):
        run = library.get(name)
        assert (run.name, run.folder.path) == (name, folder / "x")
