"""A run folder that turns read-only, vanishes or is replaced while the run goes on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.durability import mounts
from tests.durability.harm import plan
from tests.durability.processes import keel
from tests.durability.same import TINY, one_line, same, whole

RUN = (*TINY, "steps=4")
GONE = "is gone, or another has its place: mount or move it back"


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("whole")
    assert keel(tmp_path, "train", "tiny", *RUN, "--run", tmp_path / "run")[0] == 0
    return tmp_path / "run"


def goes_on(tmp_path: Path, run: Path, unharmed: Path) -> None:
    code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
    assert (code, err) == (0, "")
    same(run, unharmed)


@pytest.mark.slow
def test_a_disk_that_fails_and_turns_read_only(tmp_path: Path, unharmed: Path) -> None:
    image, place = tmp_path / "image", tmp_path / "disk"
    with mounts.breakable_disk(image, place, 64 << 20):
        run = place / "run"
        harm = plan(3, **{"break": str(place)})
        code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm)
        assert code == 2
        printed = one_line(err)
        assert "stopped after rl step 2 (newest checkpoint: step 2): cannot write" in printed
        assert f"{run}/metrics.jsonl: Read-only file system: fix the disk or folder;" in printed
        code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
        assert code == 2
        assert f"cannot write {run}/.lock: Read-only file system" in one_line(err)
        mounts.mend_disk(image, place)
        assert whole(run) == [2]
        goes_on(tmp_path, run, unharmed)


@pytest.mark.quick("False")
@pytest.mark.parametrize("inside", [True, False])
def test_a_mount_that_vanishes(inside: bool, tmp_path: Path, unharmed: Path) -> None:
    """Below it lies an empty folder, in which nothing may be made."""
    source, place = tmp_path / "source", tmp_path / "place"
    with mounts.borrowed(source, place):
        run = place / "run" if inside else place
        harm = plan(3, vanish=str(place))
        code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm)
        assert code == 2
        assert one_line(err) == (
            "keel: error: stopped after rl step 2 (newest checkpoint: step 2): "
            f"run folder {run} {GONE}; go on with: keel train --resume --run {run}"
        )
        assert list(place.iterdir()) == []
        code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
        assert code == 2
        one_line(err)
        assert list(place.iterdir()) == []
        mounts.bring_back(source, place)
        assert whole(run) == [2]
        goes_on(tmp_path, run, unharmed)


@pytest.mark.slow
def test_a_folder_moved_away_and_another_in_its_place(tmp_path: Path, unharmed: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    harm = plan(3, exchange=[str(run), str(moved)])
    code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm)
    assert code == 2
    assert GONE in one_line(err)
    assert [path.name for path in run.iterdir()] == ["mine.txt"]
    goes_on(tmp_path, moved, unharmed)


def test_a_folder_exchanged_before_there_is_anything_to_keep(tmp_path: Path) -> None:
    """What fails before its first row deletes its folder, but not another one in its place."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    harm = plan(1, exchange=[str(run), str(moved)])
    code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm)
    assert code == 2
    assert GONE in one_line(err)
    assert [path.name for path in run.iterdir()] == ["mine.txt"]


def test_a_folder_that_may_not_change(tmp_path: Path, unharmed: Path) -> None:
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
    goes_on(tmp_path, run, unharmed)
