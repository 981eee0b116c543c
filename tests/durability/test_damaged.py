"""Checkpoints damaged on the disk are reported; the one before is used, and nothing deleted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from keel.runs import lifecycle
from keel.runs.reader import load
from keel.types import KeelError
from tests.durability.processes import keel
from tests.durability.same import TINY, contents, one_line, same, whole

RUN = (*TINY, "steps=6")
TENSORS = "trainable.safetensors"


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("whole")
    assert keel(tmp_path, "train", "tiny", *RUN, "--run", tmp_path / "run")[0] == 0
    assert whole(tmp_path / "run") == [2, 4, 6]
    return tmp_path / "run"


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def cut(run: Path) -> None:
    path = at(run, 6) / TENSORS
    path.write_bytes(path.read_bytes()[:-1])


def flip(run: Path) -> None:
    path = at(run, 6) / TENSORS
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def name_outside(run: Path) -> None:
    path = at(run, 6) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../step-000004/state.json"] = manifest["files"].pop("state.json")
    path.write_text(json.dumps(manifest))


def exchange_file(run: Path) -> None:
    shutil.copy(at(run, 4) / TENSORS, at(run, 6) / TENSORS)


def exchange_whole(run: Path) -> None:
    shutil.rmtree(at(run, 6))
    shutil.copytree(at(run, 2), at(run, 6))


HARMS: list[tuple[str, Callable[[Path], object]]] = [
    (f"{TENSORS} has ", cut),
    (f"{TENSORS} differs from its checksum", flip),
    ("state.json is missing", lambda run: (at(run, 6) / "state.json").unlink()),
    ("manifest.json is missing", lambda run: (at(run, 6) / "manifest.json").unlink()),
    (
        "manifest.json is damaged",
        lambda run: (at(run, 6) / "manifest.json").write_bytes(b"\0" * 99),
    ),
    ("manifest.json names a file outside the checkpoint: ../step-000004/state.json", name_outside),
    (f"{TENSORS} differs from its checksum", exchange_file),
    ("it is step-000002, under another name", exchange_whole),
]


@pytest.mark.quick("manifest.json is damaged-<lambda>")
@pytest.mark.parametrize(("why", "harm"), HARMS)
def test_the_newest_is_damaged(
    why: str, harm: Callable[[Path], object], tmp_path: Path, unharmed: Path
) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    harm(run)
    code, out, err = keel(tmp_path, "train", "--resume", "--run", run)
    assert (code, err) == (0, "")
    assert f"checkpoint {at(run, 6)} is damaged ({why}" in out
    assert "going on from the one before" in out
    assert "rl (rl): 6 steps, 4 done" in out
    same(run, unharmed)
    printed = [row for row in load(run).events() if row["event"] == "damaged"]
    assert [(row["checkpoint"], why in row["why"]) for row in printed] == [("step-000006", True)]


def test_two_are_damaged(tmp_path: Path, unharmed: Path) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    flip(run)
    (at(run, 4) / "state.json").unlink()
    code, out, _ = keel(tmp_path, "train", "--resume", "--run", run)
    assert code == 0
    assert "6 steps, 2 done" in out
    same(run, unharmed)


def test_none_is_whole(tmp_path: Path, unharmed: Path) -> None:
    """To begin again would throw the run away: it is refused, and nothing is touched."""
    run = shutil.copytree(unharmed, tmp_path / "run")
    for step in (2, 4, 6):
        (at(run, step) / TENSORS).unlink()
    before = contents(run)
    for verb in (("train", "--resume", "--run"), ("eval",), ("export",)):
        more = [tmp_path / "model"] if verb == ("export",) else []
        code, _, err = keel(tmp_path, *verb, run, *more)
        assert code == 2
        assert "whole" in one_line(err.splitlines(keepends=True)[-1])
        if verb[0] == "train":
            assert one_line(err) == (
                f"keel: error: no checkpoint in {run}/checkpoints is whole (step-000006: {TENSORS} "
                f"is missing; step-000004: {TENSORS} is missing; and 1 more): bring one back, or "
                "delete them all and --resume begins at the first step"
            )
    assert contents(run) == before
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    code, out, _ = keel(tmp_path, "train", "--resume", "--run", run)
    assert code == 0
    assert "6 steps, 0 done" in out
    same(run, unharmed)


def test_a_file_more_is_no_damage(tmp_path: Path, unharmed: Path) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    shutil.rmtree(at(run, 6))
    (at(run, 4) / "notes.txt").write_text("the good one")
    code, out, _ = keel(tmp_path, "train", "--resume", "--run", run)
    assert code == 0
    assert "6 steps, 4 done" in out
    assert "damaged" not in out
    (at(run, 4) / "notes.txt").unlink()
    same(run, unharmed)


# ---------------------------------------------------------------- what lies before a checkpoint


def row(run: Path, number: int, make: Callable[[bytes], bytes]) -> None:
    """Puts something in the place of a row of metrics.jsonl."""
    path = run / "metrics.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    rows[number - 1] = make(rows[number - 1])
    path.write_bytes(b"".join(rows))


def rollouts(run: Path, step: int) -> Path:
    return run / "rollouts" / f"step-{step:06d}.parquet"


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


BEFORE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a row dropped": (lambda run: row(run, 3, lambda _: b""), "lacks the row of rl step 3"),
    "a row doubled": (lambda run: row(run, 3, lambda r: r + r), "has two rows of rl step 3"),
    "a row changed": (
        lambda run: row(run, 3, lambda r: r.replace(b"0.", b"1.", 1)),
        "is not what checkpoint step-000006 was written with",
    ),
    "cut": (lambda run: row(run, 6, lambda r: r[:-9]), "lacks the row of rl step 6"),
    "emptied": (
        lambda run: (run / "metrics.jsonl").write_bytes(b""),
        "lacks the row of rl step 1",
    ),
}


@pytest.mark.parametrize("what", BEFORE)
def test_a_record_that_is_damaged_before_the_checkpoint_is_refused(
    what: str, tmp_path: Path, unharmed: Path
) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    harm, why = BEFORE[what]
    harm(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with (
        pytest.raises(KeelError) as error,
        lifecycle.run_lifecycle(lifecycle.resume_run(run), True),
    ):
        pass
    assert why in str(error.value)
    assert "restore it from a copy, or delete checkpoints step-0000" in str(error.value)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_way_out_that_is_named_ends_as_the_unharmed(tmp_path: Path, unharmed: Path) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    BEFORE["a row dropped"][0](run)
    code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
    assert code == 2
    assert "delete checkpoints step-000004 to step-000006, and --resume repeats" in one_line(err)
    for step in (4, 6):
        shutil.rmtree(at(run, step))
    assert keel(tmp_path, "train", "--resume", "--run", run)[0] == 0
    same(run, unharmed)


LOST: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda run: rollouts(run, 3).unlink(), "step-000003.parquet is missing:"),
    "emptied": (
        lambda run: rollouts(run, 3).write_bytes(b""),
        "step-000003.parquet is damaged:",
    ),
    "flipped": (lambda run: flipped(rollouts(run, 3)), "step-000003.parquet is damaged:"),
    "all gone": (
        lambda run: [path.unlink() for path in (run / "rollouts").iterdir()],
        "rollouts/step-000002.parquet is missing, rollouts/step-000003.parquet is missing and "
        "1 more:",
    ),
}


@pytest.mark.quick("all gone")
@pytest.mark.parametrize("what", LOST)
def test_rollouts_lost_before_the_checkpoint_are_noted_and_the_run_goes_on(
    what: str, tmp_path: Path, unharmed: Path
) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    shutil.rmtree(at(run, 6))
    harm, message = LOST[what]
    harm(run)
    harmed = {path.name for path in (run / "rollouts").iterdir()} - {rollouts(run, 6).name}
    code, out, err = keel(tmp_path, "train", "--resume", "--run", run)
    assert (code, err) == (0, "")
    notes = [row["text"] for row in load(run).events() if row["event"] == "note"]
    assert len(notes) == 1
    assert message in notes[0]
    assert notes[0] in out
    assert "the run goes on" in notes[0]
    # All but what was lost is as in a run that was never harmed, the last checkpoint too.
    kept = {rollouts(run, step).name for step in (5, 6)} | harmed
    assert {path.name for path in (run / "rollouts").iterdir()} == kept
    for step in range(1, 7):
        if (what == "all gone" and step < 5) or step == 3:
            shutil.copy(rollouts(unharmed, step), rollouts(run, step))
    same(run, unharmed)


def test_rollouts_are_read_by_their_page_checksums(tmp_path: Path, unharmed: Path) -> None:
    run = shutil.copytree(unharmed, tmp_path / "run")
    flipped(rollouts(run, 3))
    with pytest.raises(KeelError, match=r"step-000003\.parquet.*leave this step out"):
        load(run).rollouts(3)


def test_checkpoints_of_stages_that_the_recipe_no_longer_has_are_not_thrown_away(
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
