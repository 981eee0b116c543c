"""The commands that a finished run prints."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file

from keel.cli.main import main
from keel.config.load import to_toml
from tests.training.judged import recipe, write
from tests.training.test_judging_stages import pairs

TEXTS = [{"text": f"{at}>{at}"} for at in range(20)]


@pytest.mark.quick("dpo")
@pytest.mark.parametrize("kind", ["dpo", "reward_model", "sft dpo", "chats"])
def test_commands_that_a_run_prints_succeed(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {"name": "sort_digits"}
    stages = {
        "sft": {"stage": "sft", "steps": 1, "batch_size": 4, "tasks": [task]},
        "chats": {
            "stage": "sft",
            "steps": 1,
            "data": [{"path": write(tmp_path / "a.jsonl", TEXTS)}],
        },
        "dpo": pairs(tmp_path, stage="dpo", steps=1),
        "reward_model": pairs(tmp_path, steps=1),
    }
    written = tmp_path / "recipe.toml"
    written.write_text(to_toml(recipe(*(stages[one] for one in kind.split()))))
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(written), "--run", "a run"]) == 0
    printed = capsys.readouterr().out.partition("next\n")[2].splitlines()
    commands = [shlex.split(line)[1:] for line in printed]
    assert [words[0] for words in commands] == (
        ["report", "eval", "export"] if "sft" in kind else ["report", "export"]
    )
    for words in commands:
        assert main(words) == 0, words
    model = "a run-model/model.safetensors"
    saved = "reward_model" if kind == "reward_model" else "policy"
    assert any("score" in name for name in load_file(model)) == (saved == "reward_model")
