"""Rollouts of single steps, their lines in tables, and the state of a run. Without a browser."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keel.platform.files import locked
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.runs.writer import Recorder, update_run_json
from keel.types import KeelError
from keel.view import library
from keel.view.frame import columns_of
from keel.view.library import Library
from keel.view.rollout_rows import StepRows, step_rows, summary, verdicts
from tests.view.hostile import RECIPE, row


def written(path: Path, steps: int = 1) -> RunFolder:
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
    run = load(written(tmp_path / "run").path)
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
    run = load(written(tmp_path / "run", 2).path)
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
    said = {"extra/judge_reason": "brief", "extra/judge_unparsed": "", "extra/extracted": "7",
            "extra/judgement": "other"}  # fmt: skip
    found = verdicts({"reward/judge": 0.5, "reward/outcome": None, **said})
    assert [(one.name, one.score, one.words) for one in found] == [
        ("judge", 0.5, (("reason", "brief"),)),
        ("outcome", None, ()),
        ("extracted", None, (("", "7"),)),
        ("judgement", None, (("", "other"),)),
    ]


def test_words_go_to_the_reward_with_the_longest_name() -> None:
    said = {"extra/judge_reason": "short", "extra/judge_strict_reason": "long"}
    found = verdicts({"reward/judge": 0.5, "reward/judge_strict": 0.25, **said})
    assert [(one.name, one.words) for one in found] == [
        ("judge", (("reason", "short"),)),
        ("judge_strict", (("reason", "long"),)),
    ]


def test_state_is_that_of_the_lock(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    opened = Library([folder.path]).get("run")
    assert opened.state() == "stopped"
    with locked(folder.path):
        assert opened.state() == "running", "a slow step is no end"
    code = (
        "import sys, time, pathlib; from keel.platform.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert opened.state() == "running"
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert opened.state() == "stopped", "a killed run is stopped at once"
    update_run_json(folder, {"finished": True})
    assert opened.state() == "finished"


def test_pictures_are_those_of_the_stage(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    folder.pictures.mkdir()
    for name in ("rl-accuracy-by-length.png", "rl2-margins.png"):
        (folder.pictures / name).write_bytes(b"")
    opened = Library([folder.path]).get("run")
    assert [title for title, _ in library.pictures_of(opened, "rl")] == ["accuracy by length"]
