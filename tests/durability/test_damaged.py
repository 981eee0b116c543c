"""Damaged checkpoints are reported, the one before is used, and nothing is deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from keel.runs import lifecycle
from keel.runs.reader import load
from keel.types import KeelError
from tests.durability.processes import keel
from tests.durability.same import contents, one_line, same

pytestmark = pytest.mark.slow

TENSORS = "trainable.safetensors"


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def flip(path: Path, at: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3 if at is None else at] ^= 4
    path.write_bytes(content)


def test_resume_passes_over_damaged_checkpoints(tmp_path: Path, unharmed: Path) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    flip(at(run, 4) / TENSORS)
    code, out, err = keel(tmp_path, "train", "--resume", "--run", run)
    assert (code, err) == (0, "")
    why = f"{TENSORS} differs from its checksum"
    assert f"checkpoint {at(run, 4)} is damaged ({why}" in out
    assert "going on from the one before" in out
    assert "rl (rl): 4 steps, 2 done" in out
    same(run, unharmed)
    events = [row for row in load(run).events() if row["event"] == "damaged"]
    assert [(row["checkpoint"], row["why"]) for row in events] == [("step-000004", why)]


def test_run_without_a_whole_checkpoint_is_refused_and_not_touched(
    tmp_path: Path, unharmed: Path
) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    for step in (2, 4):
        (at(run, step) / TENSORS).unlink()
    before = contents(run)
    for verb in (("train", "--resume", "--run"), ("eval",), ("export",)):
        more = [tmp_path / "model"] if verb == ("export",) else []
        code, _, err = keel(tmp_path, *verb, run, *more)
        assert code == 2
        assert "whole" in one_line(err.splitlines(keepends=True)[-1])
        if verb[0] == "train":
            assert one_line(err) == (
                f"keel: error: no checkpoint in {run}/checkpoints is whole (step-000004: {TENSORS} "
                f"is missing; step-000002: {TENSORS} is missing): bring one back, or "
                "delete them all and --resume begins at the first step"
            )
    assert contents(run) == before
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    code, out, _ = keel(tmp_path, "train", "--resume", "--run", run)
    assert code == 0
    assert "4 steps, 0 done" in out
    same(run, unharmed)


# ---------------------------------------------------------------- records before a checkpoint


def edit_record(run: Path, number: int, change: Callable[[bytes], bytes]) -> None:
    """Replace a line of metrics.jsonl."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = change(lines[number - 1])
    path.write_bytes(b"".join(lines))


def rollouts(run: Path, step: int) -> Path:
    return run / "rollouts" / f"step-{step:06d}.parquet"


BEFORE: dict[str, Callable[[Path], object]] = {
    "dropped": lambda run: edit_record(run, 3, lambda _: b""),
    "changed": lambda run: edit_record(run, 3, lambda line: line.replace(b"0.", b"1.", 1)),
}


@pytest.mark.parametrize("what", BEFORE)
def test_metrics_changed_before_the_checkpoint_are_refused(
    what: str, tmp_path: Path, unharmed: Path
) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    BEFORE[what](run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with (
        pytest.raises(KeelError) as error,
        lifecycle.run_lifecycle(lifecycle.resume_run(run), True),
    ):
        pass
    assert str(error.value) == (
        f"{run}/metrics.jsonl is not what checkpoint step-000004 was written with: restore it from "
        "a copy, or delete checkpoints step-000004, and --resume repeats what they hold"
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_resume_after_the_suggested_deletion_ends_the_same(tmp_path: Path, unharmed: Path) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    edit_record(run, 1, lambda _: b"")
    code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
    assert code == 2
    assert "delete checkpoints step-000002 to step-000004, and --resume repeats" in one_line(err)
    for step in (2, 4):
        shutil.rmtree(at(run, step))
    assert keel(tmp_path, "train", "--resume", "--run", run)[0] == 0
    same(run, unharmed)


def test_lost_rollouts_are_noted_and_the_run_goes_on(tmp_path: Path, unharmed: Path) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    shutil.rmtree(at(run, 4))
    rollouts(run, 1).unlink()
    flip(rollouts(run, 2))
    code, out, err = keel(tmp_path, "train", "--resume", "--run", run)
    assert (code, err) == (0, "")
    (note,) = [row["text"] for row in load(run).events() if row["event"] == "note"]
    lost = ("step-000001.parquet is missing", "step-000002.parquet is damaged")
    assert note.startswith(", ".join(f"rollouts/{what}" for what in lost) + ": the run goes on")
    assert note in out
    # All but what was lost is as in the unharmed run, the last checkpoint too.
    assert not rollouts(run, 1).exists()
    for step in (1, 2):
        shutil.copy(rollouts(unharmed, step), rollouts(run, step))
    same(run, unharmed)


def test_rollouts_are_verified_by_page_checksums(tmp_path: Path, unharmed: Path) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    column = pq.read_metadata(rollouts(run, 3)).row_group(0).column(0)
    flip(rollouts(run, 3), column.data_page_offset + column.total_compressed_size - 1)
    with pytest.raises(KeelError, match=r"step-000003\.parquet.*leave this step out"):
        load(run).rollouts(3)


def test_checkpoints_of_stages_not_in_the_recipe_are_not_deleted(
    tmp_path: Path, unharmed: Path
) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(
        recipe + '\n[[stages]]\nstage = "rl"\nname = "more"\ntasks = [{name = "sort_digits"}]\n'
    )
    before = contents(run)
    code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
    assert code == 2
    assert "no stage that made checkpoint step-000002" in one_line(err)
    assert contents(run) == before
