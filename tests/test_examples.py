"""The numbered examples run as they stand."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.config.entry import load_entry
from keel.runs.reader import load
from tests.shared import ROOT

FAILS = f"""
import sys

sys.path.insert(0, {str(ROOT / "examples")!r})
import lookup


async def run(given):
    made = await lookup.run(given)
    if given.index % 4 == 1:
        raise OSError("down")
    return made
"""
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
SCRIPTS = sorted((ROOT / "examples").glob("[0-9]*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    words = ["steps=2", "threads=1", "--run", str(run), "--quiet"]
    assert main(["train", str(path.relative_to(ROOT)), *words]) == 0
    assert json.loads((run / "run.json").read_text())["finished"] is True
    assert main(["explain", str(path.relative_to(ROOT))]) == 0


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs_and_learns(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    space = runpy.run_path(str(path))
    rewards = space.get("rewards_by_step")
    if rewards is None:
        rewards = [record["reward"] for record in space["run"].metrics()]
    assert rewards[-1] > rewards[0] + 0.3
    assert f"{rewards[-1]:.2f} at step {len(rewards)}" in capsys.readouterr().out


def test_task_of_the_examples_separates_its_splits() -> None:
    task = load_entry(f"{ROOT}/examples/squares.py:Squares", "task")()
    splits = {
        split: {task.prompt(split, i).content for i in range(task.size(split))}
        for split in ("train", "validation")
    }
    assert len(splits["train"]) == 90
    assert len(splits["validation"]) == 10
    assert not splits["train"] & splits["validation"]


@pytest.mark.slow
def test_run_goes_on_without_programs_that_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(FAILS)
    words = ["threads=1", "steps=2", "rollout.program=own.py:run", "evaluation.prompts=8"]
    command = ["train", str(ROOT / "examples" / "05_program.toml"), *words, "--quiet", "--run"]
    monkeypatch.chdir(tmp_path)
    assert main([*command, "stops"]) == 2
    assert main([*command, "skips", "rollout.on_error=skip"]) == 0
    run = load("skips")
    for step in (1, 2):
        rows = run.rollouts(step)
        failed = [row for row in rows if row["extra/program_error"] is not None]
        assert 0 < len(failed) < len(rows)
        assert {row["extra/program_error"] for row in failed} == {"OSError: down"}
        assert all(row["reward"] is None for row in failed)
        assert not any(x for row in failed for x in row["advantages"])
        assert all(row["reward"] is not None for row in rows if row not in failed)
        assert run.metrics()[step - 1]["rewards/program/failures"] == len(failed)


@pytest.mark.slow
def test_program_learns_to_use_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy cannot know the number, so without asking, which earns 0.2, it is right once in
    four. One layer learns it in two thirds of the steps."""
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "run"
    words = ["threads=1", "steps=120", "model.build.layers=1", "algorithm.entropy=0.03"]
    words += ["optimizer.learning_rate=2e-3", "evaluation.prompts=40"]
    command = ["train", "examples/05_program.toml", *words, "--run", str(folder), "--quiet"]
    assert main(command) == 0
    records = load(folder).metrics()
    right, earned = (
        [record[f"rewards/{name}/mean"] for record in records] for name in ("right", "returned")
    )
    assert earned[0] - right[0] < 0.05
    assert (sum(earned[-20:]) - sum(right[-20:])) / 20 > 0.15
    assert sum(right[-20:]) / 20 > 0.7
    assert records[-1]["eval/pass@1"] > 0.9
    assert right[0] < 0.25


@pytest.mark.slow
def test_check_of_a_program_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["check", "examples/05_program.toml", "threads=1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"sampled completions +64\n", shown)
    assert "not checked: memory and time of rollout.program and of its requests" in shown
