"""The runs that the pages show: by name, and the newest where a folder is made again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keel.runs.layout import RunFolder
from keel.runs.writer import Recorder
from keel.types import KeelError
from keel.view.library import Library, OpenRun
from keel.view.status import status_of

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
