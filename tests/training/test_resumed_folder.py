"""Resuming in run folders as they are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.config.load import load_recipe
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
    folder = tmp_path_factory.mktemp("resumed") / "run"
    choices = [*FAST, "steps=4", "tasks=[{name='sort_digits', raw=true}]"]
    recipe = load_recipe("tiny", [*choices, f'model.chat_template="{TEMPLATE}"'])
    return train(recipe, folder).path


def test_resume_of_a_current_run_has_no_notes(chat_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(chat_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-000004")
    callback = Notes()
    train(None, run, resume=True, callbacks=[callback])
    assert callback.notes == []
    same(run, chat_run)


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
