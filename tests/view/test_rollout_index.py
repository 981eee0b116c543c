"""The searchable table of all rollouts of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keel.runs.layout import RunFolder
from keel.runs.writer import Recorder, truncate_after
from keel.view import rollout_rows
from keel.view.address import Address
from keel.view.rollout_rows import RolloutIndex
from tests.view.hostile import RECIPE, row

WORDS = ("apple", "Banana", "cherry pie", "ÄPFEL")


def written(path: Path, steps: int) -> RunFolder:
    folder = RunFolder.create(path, RECIPE.format(name="searched"))
    with Recorder(folder) as recorder:
        for step in range(1, steps + 1):
            recorder.metrics(0, step, {"reward": 0.0})
            rows = [
                row(f"{word} {step}", group=at, reward=float(at), prompt_id=f"p{at}")
                for at, word in enumerate(WORDS)
            ]
            recorder.rollouts(0, step, rows)
    return folder


@pytest.mark.parametrize(
    ("query", "steps", "places"),
    [
        (Address(), [1, 2, 3], [0, 1, 2, 3]),
        (Address(text="APPLE"), [1, 2, 3], [0]),
        (Address(text="banana 2"), [2], [1]),
        (Address(text="äpfel"), [1, 2, 3], [3]),
        (Address(text=".*"), [], []),
        (Address(min_reward=2.0), [1, 2, 3], [2, 3]),
        (Address(max_reward=0.0, first_step=2), [2, 3], [0]),
        (Address(min_length=3), [1, 2, 3], [2]),
        (Address(max_length=2, last_step=1), [1], [0, 1, 3]),
        (Address(prompt="p2"), [1, 2, 3], [2]),
        (Address(finish="length"), [], []),
        (Address(stage="other"), [], []),
    ],
)
def test_query_finds_what_fits(
    query: Address, steps: list[int], places: list[int], tmp_path: Path
) -> None:
    index = RolloutIndex(written(tmp_path / "run", 3))
    hits = index.search(query)
    found = [(hit["step"], hit["row"]) for hit in hits.rows]
    assert found == [(step, place) for step in steps for place in places]
    assert hits.total == len(found)


def test_more_hits_than_shown_are_counted(tmp_path: Path) -> None:
    index = RolloutIndex(written(tmp_path / "run", 5))
    hits = index.search(Address(), limit=3)
    assert (hits.total, len(hits.rows)) == (20, 3)


@pytest.mark.parametrize("kept", [0, 2**30])
def test_searches_follow_the_files(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_rows, "KEPT", kept)
    folder = written(tmp_path / "run", 5)
    reads: list[str] = []
    read = rollout_rows.pq.read_table
    monkeypatch.setattr(
        rollout_rows.pq, "read_table", lambda path, **k: reads.append(path.name) or read(path, **k)
    )
    index = RolloutIndex(folder)
    assert index.search(Address()).searched == 20
    assert index.search(Address()).searched == 20
    assert len(reads) == (5 if kept else 10)
    # A resumed run removes what came after its checkpoint and writes other rollouts.
    truncate_after(folder, 0, 3)
    with Recorder(folder) as recorder:
        recorder.rollouts(0, 4, [row("dates")])
    hits = index.search(Address(text="dates"))
    assert hits.searched == 13
    assert [hit["step"] for hit in hits.rows] == [4]


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 2)
    folder.rollouts(0, 1).write_bytes(b"PAR1 no table")
    hits = RolloutIndex(folder).search(Address())
    assert [hit["step"] for hit in hits.rows] == [2] * 4
    assert hits.damaged == ("step-000001.parquet",)


def test_only_tokens_of_the_policy_count_as_length(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 1)
    mixed = row("one two three", written=np.array([True, False, True]))
    with Recorder(folder) as recorder:
        recorder.rollouts(0, 2, [row("one two"), mixed])
    index = RolloutIndex(folder)
    assert [hit["length"] for hit in index.search(Address(first_step=2)).rows] == [2, 2]
