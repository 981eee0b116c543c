"""The searchable table of all rollouts of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keel.runs.layout import RunFolder
from keel.runs.writer import Recorder, truncate_after
from keel.view import rollout_index
from keel.view.rollout_index import Query, RolloutIndex
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
        (Query(), [1, 2, 3], [0, 1, 2, 3]),
        (Query(text="APPLE"), [1, 2, 3], [0]),
        (Query(text="banana 2"), [2], [1]),
        (Query(text="äpfel"), [1, 2, 3], [3]),
        (Query(text=".*"), [], []),
        (Query(min_reward=2.0), [1, 2, 3], [2, 3]),
        (Query(max_reward=0.0, first_step=2), [2, 3], [0]),
        (Query(min_length=3), [1, 2, 3], [2]),
        (Query(max_length=2, last_step=1), [1], [0, 1, 3]),
        (Query(prompt_id="p2"), [1, 2, 3], [2]),
        (Query(finish="length"), [], []),
        (Query(stage="other"), [], []),
    ],
)
def test_query_finds_what_fits(
    query: Query, steps: list[int], places: list[int], tmp_path: Path
) -> None:
    index = RolloutIndex(written(tmp_path / "run", 3))
    index.update()
    hits = index.search(query)
    found = [(hit["step"], hit["row"]) for hit in hits.rows]
    assert found == [(step, place) for step in steps for place in places]
    assert hits.total == len(found)


def test_more_hits_than_shown_are_counted(tmp_path: Path) -> None:
    index = RolloutIndex(written(tmp_path / "run", 5))
    index.update()
    hits = index.search(Query(), limit=3)
    assert (hits.total, len(hits.rows)) == (20, 3)


def test_parts_on_disk_serve_the_next_process_and_follow_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_index, "CHUNK", 8)
    folder = written(tmp_path / "run", 5)
    first = RolloutIndex(folder)
    first.update()
    assert first.rows == 20
    assert len(list((folder.path / "view").glob("*.arrow"))) == 2
    reads: list[str] = []
    read = rollout_index.pq.read_table
    monkeypatch.setattr(
        rollout_index.pq, "read_table", lambda path, **k: reads.append(path.name) or read(path, **k)
    )
    second = RolloutIndex(folder)
    second.update()
    assert second.rows == 20
    assert reads == ["step-000005.parquet"]  # too few rows for a part of its own
    # A resumed run removes what came after its checkpoint and writes other rollouts.
    truncate_after(folder, 0, 3)
    with Recorder(folder) as recorder:
        recorder.rollouts(0, 4, [row("dates")])
    for index in (second, RolloutIndex(folder)):
        index.update()
        assert index.rows == 13
        assert [hit["step"] for hit in index.search(Query(text="dates")).rows] == [4]


def test_overlapping_parts_count_each_rollout_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "run", 4)
    for chunk in (8, 16):  # two servers that looked at different times
        monkeypatch.setattr(rollout_index, "CHUNK", chunk)
        RolloutIndex(folder).update()
        for path in (folder.path / "view").glob("step-*.arrow"):
            path.rename(path.with_name(f".{chunk}-{path.name}"))
    held = list((folder.path / "view").glob(".*.arrow"))
    assert len(held) == 3
    for path in held:
        path.rename(path.with_name(path.name[1:]))
    index = RolloutIndex(folder)
    index.update()
    assert (index.rows, index.search(Query()).total) == (16, 16)


def test_damaged_files_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_index, "CHUNK", 4)
    folder = written(tmp_path / "run", 2)
    folder.rollouts(0, 1).write_bytes(b"PAR1 no table")
    (folder.path / "view").mkdir()
    (folder.path / "view" / "step-000009.arrow").write_bytes(b"no table either")
    index = RolloutIndex(folder)
    index.update()
    assert [hit["step"] for hit in index.search(Query()).rows] == [2] * 4
    assert index.damaged == ("step-000001.parquet",)
    again = RolloutIndex(folder)  # from what the first left on disk
    again.update()
    assert again.damaged == index.damaged


def test_only_tokens_of_the_policy_count_as_length(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 1)
    mixed = row("one two three", written=np.array([True, False, True]))
    with Recorder(folder) as recorder:
        recorder.rollouts(0, 2, [row("one two"), mixed])
    index = RolloutIndex(folder)
    index.update()
    assert [hit["length"] for hit in index.search(Query(first_step=2)).rows] == [2, 2]
