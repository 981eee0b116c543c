"""The small recipe of these tests, and the comparison of two runs of it."""

from __future__ import annotations

from pathlib import Path

from keel.runs import checkpoint
from keel.runs.reader import load
from tests.soak.killing import FREE, differences

TINY = (
    "threads=1",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "evaluation.prompts=4",
    "checkpoints.every=2",
    "checkpoints.keep=9",
    "rewards.functions=[{function='tests.durability.harm:digits'}]",
)
RUN = (*TINY, "steps=4")


def same(a: Path, b: Path) -> None:
    """All that both runs hold is the same, byte for byte, checkpoints and pictures too."""
    assert differences(a, b) == []


def contents(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    return [name for name in names if name not in FREE]


def whole(folder: Path) -> list[int]:
    """The steps of the checkpoints there are, each of them whole, and nothing half-written."""
    entries = load(folder).checkpoints()
    for entry in entries:
        assert checkpoint.damage(entry.path) is None
    assert not [*folder.glob("*/.tmp-*")]
    return [entry.place.step for entry in entries]


def one_line(err: str) -> str:
    """The message of a run that stopped: one line, no traceback."""
    assert err.count("\n") == 1, err
    assert err.startswith("keel: error: ")
    return err.strip()
