"""What a shipped recipe says to expect, in its list and next to what came out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.config.load import expectations, expected_of, load_recipe, shipped

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (["seed=7", "threads=1", "trackers.tensorboard=true", "checkpoints.every=3"], True),
        (["steps=13"], False),
        (["optimizer.learning_rate=1e-3"], False),
        (["name=mine"], False),
        (["tasks.name=addition"], False),
    ],
)
def test_a_changed_recipe_expects_nothing(overrides: list[str], same: bool) -> None:
    assert (expected_of(load_recipe("tiny", overrides)) is not None) == same


@pytest.mark.parametrize(
    ("name", "same"), [(".models/smollm2-135m-instruct", True), ("Qwen/Qwen3-0.6B", False)]
)
def test_a_model_is_the_same_in_a_folder(name: str, same: bool) -> None:
    made = load_recipe("smollm2-grpo", [f"model.name={name}"])
    assert (expected_of(made) is not None) == same


def test_each_shipped_recipe_says_what_to_expect(capsys: Capture) -> None:
    assert expectations().keys() == shipped().keys()
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    assert "expected: 98.7 ± 1.7 % (eval/pass@1, 6 seeds)" in text
    assert "not run by Keel's authors" in text
    assert "56.7 % by PPO" in text
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gsm8k-grpo"]["expected"]["run_here"] is False


def test_a_recipe_that_extends_another_expects_its_own(tmp_path: Path) -> None:
    path = tmp_path / "quickstart.toml"
    path.write_text('extends = "tiny"\n')
    assert load_recipe(path).expected is None
    assert load_recipe("quickstart-gspo").expected != load_recipe("quickstart").expected


def test_the_end_of_a_run_shows_what_was_expected(tmp_path: Path, capsys: Capture) -> None:
    words = ["train", "tiny", "threads=1", "--run"]
    assert main([*words, str(tmp_path / "same")]) == 0
    assert "\nexpected: 0.0 ± 0.0 % (eval/pass@1, 5 seeds)\n" in capsys.readouterr().out
    assert main([*words, str(tmp_path / "other"), "steps=2"]) == 0
    assert "expected" not in capsys.readouterr().out
