"""A disk that fills at each kind of write: one line, nothing half-written, and it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.platform.sqlite import Database
from keel.preferences.records import FORMAT
from keel.types import KeelError
from tests.durability import mounts
from tests.durability.harm import plan
from tests.durability.processes import keel
from tests.durability.same import RUN, TINY, contents, one_line, same, whole

pytestmark = pytest.mark.slow

DISK = 24 << 20
ROWS_ONLY = (*TINY, "steps=8", "rollouts_every=0", "checkpoints.every=100")
JUDGED = """
name = "judged"
threads = 1
[model.build]
family = "llama"
alphabet = "0123456789>"
hidden_size = 64
layers = 2
heads = 2
context = 64
[[stages]]
stage = "reward_model"
name = "judge"
steps = 2
evaluation.rows = 8
checkpoints = { every = 2, keep = 9 }
[stages.sampled]
train = 16
validation = 8
group_size = 4
max_tokens = 8
tasks = [{ name = "sort_digits" }]
rewards.functions = [{ function = "tests.durability.harm:digits" }]
"""


def pages(*paths: Path) -> int:
    """The bytes that files take on a disk, in whole pages."""
    files = [f for p in paths for f in (p.rglob("*") if p.is_dir() else [p]) if f.is_file()]
    return sum(-(-f.stat().st_size // mounts.PAGE) * mounts.PAGE for f in files)


def last_row(path: Path) -> int:
    """The bytes, in whole pages, that the last row of a file added to it."""
    *rows, _ = path.read_bytes().splitlines(keepends=True)
    before = sum(map(len, rows))
    return pages(path) - -(-before // mounts.PAGE) * mounts.PAGE


def needed(unharmed: Path) -> int:
    """What the last step of the run takes: evaluation, rollouts, row of metrics and checkpoint."""
    step = "step-000004"
    tables = (unharmed / name / f"{step}.parquet" for name in ("evaluations", "rollouts"))
    return pages(*tables, unharmed / "checkpoints" / step) + last_row(unharmed / "metrics.jsonl")


CASES = {
    # the file of the message: (step of the reward that fills the disk, share left of the space that
    # a step needs, pages more, recorded steps, newest checkpoint)
    "rollouts/step-000003.parquet": (3, 0.0, 0, 2, 2),
    "checkpoints/.tmp-step-000004/trainable.safetensors": (4, 0.3, 0, 4, 2),
    "checkpoints/step-000004": (4, 1.0, -1, 4, 2),  # all but the manifest
    "curve.png": (4, 1.0, 8, 4, 4),
}


@pytest.mark.quick("checkpoints/.tmp-step-000004/trainable.safetensors")
@pytest.mark.parametrize("name", CASES)
def test_run_stops_where_the_disk_is_full_and_resumes(
    name: str, tmp_path: Path, unharmed: Path
) -> None:
    step, share, more, recorded, newest = CASES[name]
    with mounts.small_disk(tmp_path / "disk", DISK) as disk:
        run = disk / "run"
        leave = int(share * needed(unharmed)) // mounts.PAGE * mounts.PAGE + more * mounts.PAGE
        harm = plan(step, fill={"disk": str(disk), "leave": leave})
        code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", run, environment=harm)
        assert code == 2
        assert one_line(err) == (
            f"keel: error: stopped after rl step {recorded} (newest checkpoint: step {newest}): "
            f"cannot write {run / name}: No space left on device: fix the disk or folder; "
            f"resume with: keel train --resume --run {run}"
        )
        assert whole(run) == [s for s in (2, 4) if s <= newest]
        mounts.empty(disk)
        code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
        assert (code, err) == (0, "")
        same(run, unharmed)


def test_records_that_do_not_fit_are_dropped_completely(tmp_path: Path) -> None:
    """Until space is freed the disk stays full: going on changes nothing but the line."""
    run, other = tmp_path / "disk" / "run", tmp_path / "whole"
    with mounts.small_disk(tmp_path / "disk", DISK) as disk:
        harm = plan(3, fill={"disk": str(disk), "leave": 0})
        code, _, err = keel(tmp_path, "train", "tiny", *ROWS_ONLY, "--run", run, environment=harm)
        assert code == 2
        assert f"(no checkpoint yet): cannot write {run}/metrics.jsonl: No space" in one_line(err)
        code, _, err = keel(tmp_path, "train", "--resume", "--run", run)
        assert code == 2
        assert "cannot write" in one_line(err)
        mounts.empty(disk)
        assert keel(tmp_path, "train", "--resume", "--run", run)[0] == 0
        assert keel(tmp_path, "train", "tiny", *ROWS_ONLY, "--run", other)[0] == 0
        same(run, other)


@pytest.mark.slow
def test_reward_model_and_its_samples_are_whole_or_absent(tmp_path: Path) -> None:
    recipe, other = tmp_path / "judged.toml", tmp_path / "whole"
    recipe.write_text(JUDGED)
    assert keel(tmp_path, "train", recipe, "--run", other)[0] == 0
    with mounts.small_disk(tmp_path / "disk", DISK) as disk:
        run = disk / "run"
        harm = plan(0, fill={"disk": str(disk), "leave": 0})
        code, _, err = keel(tmp_path, "train", recipe, "--run", run, environment=harm)
        assert code == 2
        assert one_line(err) == (
            f"keel: error: cannot write {run}/rows/judge-train.jsonl: No space left on device: "
            "fix the disk or folder"
        )
        assert not run.exists()  # there was nothing to keep
        mounts.empty(disk)
        models = pages(other / "models")
        leave = pages(other) - models // mounts.PAGE // 2 * mounts.PAGE
        harm = plan(0, fill={"disk": str(disk), "leave": leave})
        code, _, err = keel(tmp_path, "train", recipe, "--run", run, environment=harm)
        assert code == 2
        printed = one_line(err)
        assert "stopped after judge step 2 (newest checkpoint: step 2): cannot write" in printed
        assert f"{run}/models/judge: No space" in printed
        assert "models/judge/model.safetensors" not in contents(run)
        mounts.empty(disk)
        assert keel(tmp_path, "train", "--resume", "--run", run)[0] == 0
        same(run, other)


def test_disk_without_space_for_a_run_folder_is_not_changed(tmp_path: Path) -> None:
    with mounts.small_disk(tmp_path / "disk", 1 << 20) as disk:
        mounts.fill(disk, 0)
        code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", disk / "run")
        assert code == 2
        assert "No space left on device: fix the disk or folder" in one_line(err)
        mounts.empty(disk)
        assert keel(tmp_path, "train", "tiny", *RUN, "steps=1", "--run", disk / "run")[0] == 2


@pytest.mark.parametrize("left", [0, 4])
def test_full_disk_under_a_database_asks_for_space(left: int, tmp_path: Path) -> None:
    """The log's index is made by what SQLite calls an I/O error where the disk has no room."""
    with mounts.small_disk(tmp_path / "disk", 1 << 20) as disk:
        mounts.fill(disk, left * mounts.PAGE)
        with pytest.raises(KeelError, match=r"^store cannot be used: .*: free space on its disk"):
            Database(disk / "a.db", FORMAT, "store")
        mounts.empty(disk)
        Database(disk / "a.db", FORMAT, "store").close()
