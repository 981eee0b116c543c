"""A run that was stopped goes on where its newest whole checkpoint is, and ends the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.algorithms.presets import PRESETS
from keel.cli.main import main
from keel.platform.signals import Interrupted
from keel.preferences.labeller import PeopleLabeller
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.evaluation import evaluate
from keel.training.run import train
from keel.types import KeelError
from tests.soak.cases import CASES
from tests.soak.killing import differences
from tests.training import judged
from tests.training.small import Stop, small

RESUMED = [name for name in CASES if name not in PRESETS or name in ("opd", "rae")]


def damage(folder: RunFolder, stage: int, step: int) -> None:
    """Tear a file of a checkpoint."""
    path = folder.checkpoint(stage, step) / "trainable.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.quick(
    "ppo-head",
    "bfloat16",
    "ahead-lora-reset",
    "dynamic",
    "stored",
    "dpo-ipo-lora",
    "sft-data",
    "sft-streamed",
)
@pytest.mark.parametrize("case", RESUMED)
def test_resume_ends_as_the_uninterrupted_run(case: str, tmp_path: Path) -> None:
    """Stopped after the second step of its last stage, or the one before the last."""
    recipe = CASES[case].make(tmp_path)
    people = PeopleLabeller()
    whole = train(recipe, tmp_path / "whole", labeller=people)
    assert CASES[case].shows(load(whole.path))
    last = recipe.stages[-1]
    step = min(2, (last.steps or 3) - 1)
    stop = Stop(step, stage=last.name)
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "again", callbacks=[stop], labeller=people)
    assert load(tmp_path / "again").checkpoints()[-1].place.step == step
    train(None, tmp_path / "again", resume=True, labeller=people)
    assert differences(whole.path, tmp_path / "again") == []


def test_a_stage_that_has_not_begun_can_change(tmp_path: Path) -> None:
    keys = ("sft.steps=2", "sft.batch_size=8", "steps=2", "evaluation.prompts=4")
    right = small(*keys, recipe="quickstart")
    wrong = small(*keys, "rewards.functions=[{function='tests.training.rewards:raises'}]",
                  "rollout.max_tokens=3", recipe="quickstart")  # fmt: skip
    straight, folder = train(right, tmp_path / "straight"), tmp_path / "fixed"
    with pytest.raises(KeelError, match="after sft step 2"):
        train(wrong, folder)
    for key in ("sft.steps=1", "sft.batch_size=4", "seed=3", "rl.name=other"):
        with pytest.raises(KeelError, match="but the run"):
            train(small(*keys, key, recipe="quickstart"), folder, resume=True)
    fixed = train(right, folder, resume=True)
    assert fixed.metrics.read_bytes() == straight.metrics.read_bytes()
    changed = {one["key"] for one in load(folder).info()["changes"]}
    assert changed >= {"rl.rollout.max_tokens", "rl.rewards.functions[0].function"}
    with pytest.raises(KeelError, match=r"rl\.rollout\.max_tokens is 4"):
        train(small(*keys, "rollout.max_tokens=4", recipe="quickstart"), folder, resume=True)


def test_stop_in_the_first_evaluation_saves_its_result(tmp_path: Path) -> None:
    stage = {"stage": "dpo", "steps": 2, "batch_size": 4, "checkpoints": {"every": 1}}
    stage["data"] = judged.data(tmp_path, judged.ones(24, 1), judged.ones(8, 2))
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(judged.recipe(stage), whole)
    with pytest.raises(Interrupted):
        train(judged.recipe(stage), again, callbacks=[Stop(evaluation=0)])
    assert [entry.place.step for entry in load(again).checkpoints()] == [0]
    measured = json.loads((again / "run.json").read_text())["measured"]
    train(None, again, resume=True)
    assert measured["dpo"].keys() == {"before"}
    assert differences(whole, again) == []


def test_existing_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    folder = train(small("steps=1"), tmp_path / "run")
    before = folder.metrics.read_bytes()
    with pytest.raises(KeelError, match="--resume"):
        train(small("steps=1"), folder.path)
    assert folder.metrics.read_bytes() == before


def test_resume_refuses_an_invalid_run_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(small("steps=1"), tmp_path / "run").path
    (run / "run.json").write_text('{"evaluation": ')
    assert main(["train", "--resume", "--run", str(run)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"cannot read {run}/run.json: " in message
    assert evaluate(run, prompts=4)["n"] == 4  # which does not read it
