"""A run folder that vanishes or is replaced during the run, or may not change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.durability import mounts
from tests.durability.harm import plan
from tests.durability.processes import keel
from tests.durability.same import RUN, one_line, same, whole

GONE = "is gone, or another has its place: mount or move it back"


def resume_to_the_end(tmp_path: Path, run: Path, unharmed: Path) -> None:
    code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
    assert (code, err) == (0, "")
    same(run, unharmed)


@pytest.mark.quick("False")
@pytest.mark.parametrize("inside", [True, False])
def test_run_on_a_mount_that_vanishes_stops(inside: bool, tmp_path: Path, unharmed: Path) -> None:
    """Under it is an empty folder, in which nothing may be made."""
    source, place = tmp_path / "source", tmp_path / "place"
    with mounts.borrowed(source, place):
        run = place / "run" if inside else place
        harm = plan(3, vanish=str(place))
        code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm)
        assert code == 2
        assert one_line(err) == (
            "keel: error: stopped after rl step 2 (newest checkpoint: step 2): "
            f"folder {run} {GONE}; resume with: keel train --resume --run {run}"
        )
        assert list(place.iterdir()) == []
        code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
        assert code == 2
        one_line(err)
        assert list(place.iterdir()) == []
        mounts.bring_back(source, place)
        assert whole(run) == [2]
        resume_to_the_end(tmp_path, run, unharmed)


@pytest.mark.slow
def test_run_whose_folder_is_replaced_stops(tmp_path: Path, unharmed: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    harm = plan(3, exchange=[str(run), str(moved)])
    code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm)
    assert code == 2
    assert GONE in one_line(err)
    assert [path.name for path in run.iterdir()] == ["mine.txt"]
    resume_to_the_end(tmp_path, moved, unharmed)


def test_folder_in_the_place_of_a_failed_run_is_not_deleted(tmp_path: Path) -> None:
    """A run that fails before its first record deletes its folder, but not another in its place."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    harm = plan(1, exchange=[str(run), str(moved)])
    code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm)
    assert code == 2
    assert GONE in one_line(err)
    assert [path.name for path in run.iterdir()] == ["mine.txt"]


def test_checkpoint_folder_that_may_not_change_stops_the_run(
    tmp_path: Path, unharmed: Path
) -> None:
    run = tmp_path / "run"
    folder = run / "checkpoints"
    code, _, err = keel(
        tmp_path, "train", "tiny", *RUN, "--run", run, environment=plan(3, freeze=str(folder))
    )
    try:
        if code == 0:
            pytest.skip("chattr is not there, or not permitted here")
        assert code == 2
        printed = one_line(err)
        assert f"cannot write {folder}/step-000004: Operation not permitted: fix" in printed
        assert "after rl step 4 (newest checkpoint: step 2)" in printed
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=False)
    resume_to_the_end(tmp_path, run, unharmed)
