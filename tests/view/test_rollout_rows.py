"""Recorded rollouts: single steps, their lines in tables, and the search. Without a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.runs.writer import Recorder, truncate_after
from keel.types import KeelError
from keel.view import rollout_rows
from keel.view.address import Address
from keel.view.frame import columns_of
from keel.view.rollout_rows import RolloutIndex, StepRows, step_rows, summary, verdicts
from tests.view.hostile import RECIPE, row


def stepped(path: Path, steps: int = 1) -> RunFolder:
    folder = RunFolder.create(path, RECIPE.format(name="stepped"))
    with Recorder(folder) as recorder:
        for step in range(1, steps + 1):
            recorder.metrics(0, step, {"reward": 0.0})
            rewards = (2.0, 10.0, None, -1.0)
            rows = [
                row(f"answer {at}", group=at // 3, reward=reward, prompt=[{"role": "user",
                    "content": "hi"}] if at == 3 else "hi") for at, reward in enumerate(rewards)
            ]  # fmt: skip
            recorder.rollouts(0, step, rows)
    return folder


def test_rows_of_a_table_are_those_of_the_run(tmp_path: Path) -> None:
    run = load(stepped(tmp_path / "run").path)
    rows = StepRows(run.rollout_table(1))
    assert list(rows) == run.rollouts(1)
    assert rows[3]["prompt"] == [{"role": "user", "content": "hi"}]
    assert rows.by_group == {0: [1, 0, 2], 1: [3]}
    assert rows.widest == [[1, 0, 2], [3]]
    assert rows.loss["loss"] == pytest.approx(sum(sum(one["loss/policy"]) for one in rows))
    with pytest.raises(IndexError):
        rows[4]


def test_groups_with_different_rewards_come_first(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RECIPE.format(name="groups"))
    rewards = [(0, 1.0), (1, 0.2), (0, 1.0), (1, 0.9), (2, 0.4), (2, None), (3, 0.1), (3, 0.2)]
    with Recorder(folder) as recorder:
        rows = [row(f"answer {at}", group=g, reward=r) for at, (g, r) in enumerate(rewards)]
        recorder.rollouts(0, 1, rows)
    found = StepRows(load(folder.path).rollout_table(1))
    assert found.widest == [[3, 1], [7, 6], [0, 2], [4, 5]]
    assert [*found.by_group] == [0, 1, 2, 3]


def test_steps_are_read_once_and_again_if_written(tmp_path: Path) -> None:
    run = load(stepped(tmp_path / "run", 2).path)
    last = step_rows(run, "rl", 2)
    assert step_rows(run, "rl", 2) is last
    with Recorder(run.folder) as recorder:  # a resumed run writes a step again
        recorder.rollouts(0, 2, [row("new")])
    assert len(last) == 4
    assert len(step_rows(run, "rl", 2)) == 1
    with pytest.raises(KeelError, match="no rollouts of step 9"):
        step_rows(run, "rl", 9)


def test_figures_of_tables_are_numbers() -> None:
    lines = [
        summary({**vars_of(reward), "reward/a": 0.125, "reward/b": None})
        for reward in (2.0, 10.0, None, 123456.7, 1 / 3)
    ]
    assert [line["reward"] for line in lines] == [2.0, 10.0, None, 123457.0, 0.3333]
    aligned = {one["name"]: one["align"] for one in columns_of(lines, list(lines[0]))}
    assert aligned["reward"] == aligned["reward/a"] == aligned["length"] == "right"
    assert aligned["completion"] == aligned["reward/b"] == "left"


def vars_of(reward: float | None) -> dict[str, object]:
    return {"reward": reward, "written": [True], "finish": "eos", "completion": "x"}


def test_words_of_a_reward_go_with_its_score() -> None:
    scores = {"judge": 0.5, "judge_strict": 0.25, "outcome": None}
    said = {"judge_reason": "brief", "judge_unparsed": "", "judge_strict_reason": "long"}
    said |= {"extracted": "7", "judgement": "other"}
    row = {f"reward/{name}": score for name, score in scores.items()}
    found = verdicts({**row, **{f"extra/{name}": text for name, text in said.items()}})
    assert [(one.name, one.score, one.words) for one in found] == [
        ("judge", 0.5, (("reason", "brief"),)),
        ("judge_strict", 0.25, (("reason", "long"),)),  # the longest name that fits
        ("outcome", None, ()),
        ("extracted", None, (("", "7"),)),
        ("judgement", None, (("", "other"),)),
    ]


WORDS = ("apple", "Banana", "cherry pie", "ÄPFEL")


def searched(path: Path, steps: int) -> RunFolder:
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
    index = RolloutIndex(searched(tmp_path / "run", 3))
    hits = index.search(query)
    found = [(hit["step"], hit["row"]) for hit in hits.rows]
    assert found == [(step, place) for step in steps for place in places]
    assert hits.total == len(found)


@pytest.mark.parametrize("kept", [0, 2**30])
def test_searches_follow_the_files(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_rows, "KEPT", kept)
    folder = searched(tmp_path / "run", 5)
    reads: list[str] = []
    read = rollout_rows.pq.read_table
    monkeypatch.setattr(
        rollout_rows.pq, "read_table", lambda path, **k: reads.append(path.name) or read(path, **k)
    )
    index = RolloutIndex(folder)
    hits = index.search(Address(), limit=3)
    assert (hits.searched, hits.total, len(hits.rows)) == (20, 20, 3)
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
    folder = searched(tmp_path / "run", 2)
    folder.rollouts(0, 1).write_bytes(b"PAR1 no table")
    hits = RolloutIndex(folder).search(Address())
    assert [hit["step"] for hit in hits.rows] == [2] * 4
    assert hits.damaged == ("step-000001.parquet",)


def test_only_tokens_of_the_policy_count_as_length(tmp_path: Path) -> None:
    folder = searched(tmp_path / "run", 1)
    mixed = row("one two three", written=np.array([True, False, True]))
    with Recorder(folder) as recorder:
        recorder.rollouts(0, 2, [row("one two"), mixed])
    index = RolloutIndex(folder)
    assert [hit["length"] for hit in index.search(Address(first_step=2)).rows] == [2, 2]
