"""Run folders of earlier versions of Keel: what they lack means what it meant then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from keel.cli.main import main
from keel.config.load import load_recipe, load_run_recipe
from keel.runs.reader import load
from keel.training.evaluation import evaluate
from keel.training.run import train
from tests.durability.same import same
from tests.training.small import FAST, Notes

TEMPLATE = (
    "{% for m in messages %}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}00{% endif %}"
)


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of a model with a chat template, whose prompts are read as they stand."""
    folder = tmp_path_factory.mktemp("earlier") / "run"
    choices = [*FAST, "steps=4", "tasks=[{name='sort_digits', raw=true}]"]
    recipe = load_recipe("tiny", [*choices, f'model.chat_template="{TEMPLATE}"'])
    return train(recipe, folder).path


@pytest.fixture
def earlier(chat_run: Path, tmp_path: Path) -> Path:
    """The run at step 2, as a version without `raw` and record.json left it."""
    run = shutil.copytree(chat_run, tmp_path / "run")
    file = run / "recipe.toml"
    text = file.read_text()
    assert text.count("\nraw = true\n") == 1
    file.write_text(text.replace("\nraw = true\n", "\n"))
    shutil.rmtree(run / "checkpoints" / "step-000004")
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "record.json").unlink()
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        del manifest["files"]["record.json"]
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return run


def test_resume_without_raw_skips_the_chat_template(chat_run: Path, earlier: Path) -> None:
    run = earlier
    callback = Notes()
    train(None, run, resume=True, callbacks=[callback])
    # The prompts of the steps that were repeated, and all that follows from them.
    for name in ("metrics.jsonl", "rollouts/step-000004.parquet"):
        assert (run / name).read_bytes() == (chat_run / name).read_bytes()
    assert load(run).rollouts(4)[0]["prompt"] == load(chat_run).rollouts(4)[0]["prompt"]
    assert isinstance(load(run).rollouts(4)[0]["prompt"], str)
    message = [note for note in callback.notes if "has no key raw" in note]
    assert len(message) == 1
    assert "plain prompts go without the chat template" in message[0]
    without = [note for note in callback.notes if "has no record.json" in note]
    assert len(without) == 1
    assert "checkpoint step-000002" in without[0]


def test_resume_of_a_current_run_has_no_notes(chat_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(chat_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-000004")
    callback = Notes()
    train(None, run, resume=True, callbacks=[callback])
    assert callback.notes == []
    same(run, chat_run)


def test_eval_of_an_earlier_run_skips_the_chat_template(chat_run: Path, earlier: Path) -> None:
    run = earlier
    found = evaluate(run, prompts=4)
    assert found == evaluate(chat_run, checkpoint="step-000002", prompts=4)
    assert isinstance(found["examples"][0]["prompt"], str)


def test_resume_refuses_an_invalid_run_json(
    chat_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(chat_run, tmp_path / "run")
    (run / "run.json").write_text('{"evaluation": ')
    assert main(["train", "--resume", "--run", str(run)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"cannot read {run}/run.json: " in message
    # What does not read it goes on working.
    assert evaluate(run, prompts=4)["n"] == 4


def test_best_step_of_an_unknown_stage_is_ignored(chat_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(chat_run, tmp_path / "run")
    whole = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**whole, "best": {"warmup": 3}}))
    train(None, run, resume=True)
    assert load(run).info()["finished"] is True


def recipe(*stages: dict[str, Any]) -> dict[str, Any]:
    return {"name": "x", "model": {"name": "some/model"}, "stages": list(stages)}


def test_raw_is_added_to_each_source_of_prompts(tmp_path: Path) -> None:
    learned = {"function": "outcome", "options": {"stage": "judge"}}
    other = {"function": "length"}
    stages = (
        {"stage": "reward_model", "name": "judge", "data": {"name": "jsonl", "path": "a"}},
        {"stage": "dpo", "sampled": {"tasks": [{"name": "addition"}]}},
        {
            "stage": "rl",
            "tasks": [{"name": "addition"}, {"name": "multiplication", "system": "Be brief."}],
            "rewards": {"functions": [learned, other]},
        },
    )
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe(*stages)))
    made = load_run_recipe(path).model_dump()["stages"]
    assert made[0]["data"]["raw"] is True
    assert made[1]["sampled"]["tasks"][0]["raw"] is True
    # A system message makes a conversation, which `raw` says nothing of.
    assert [task["raw"] for task in made[2]["tasks"]] == [True, False]
    options = [reward["options"] for reward in made[2]["rewards"]["functions"]]
    assert options == [{"stage": "judge", "raw": True}, {}]


def test_raw_is_not_added_where_the_recipe_has_it(tmp_path: Path) -> None:
    tasks = [{"name": "addition", "raw": False}, {"name": "multiplication"}]
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe({"stage": "rl", "tasks": tasks})))
    assert [task.raw for task in load_run_recipe(path).stages[0].tasks] == [False, False]  # type: ignore[union-attr]
