"""Nothing that may be a key is written into a run folder, or printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.cli.main import main
from keel.config.load import load_recipe
from keel.types import KeelError

RECIPE = """
[[tasks]]
name = "sort_digits"
[[rewards.functions]]
function = "judge"
options = {{ model = "m", {option} }}
[model.build]
family = "llama"
[algorithm]
preset = "grpo"
"""


@pytest.mark.parametrize("option", ['api_key_env = "sk-proj-SESAME-1"', 'api_key = "SESAME"'])
def test_a_key_in_a_recipe_is_refused_before_anything_is_written(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(option=option))
    assert main(["train", str(path), "--run", str(tmp_path / "run")]) == 2
    message = capsys.readouterr()
    assert "SESAME" not in message.out + message.err
    assert "api_key_env" in message.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("token", "####", False),
        ("secret", "blue", False),
        ("start", "sk-learn-style-estimator-names", False),
        ("system", "log in at https://you@example.com and say hi", False),
        ("api_key", 12, False),
        ("secret_key", "abc", True),
        ("aws_secret_access_key", "abc", True),
        ("private-key", "abc", True),
        ("api_key", "12345678901", True),
    ],
)
def test_reward_options_hold_no_secrets(name: str, value: object, refused: bool) -> None:
    reward = {"function": "a:b", "options": {name: value}}
    recipe = {"extends": "tiny", "rewards": {"functions": [reward]}}
    if not refused:
        load_recipe(recipe)
        return
    with pytest.raises(KeelError, match="a recipe is kept in the run folder"):
        load_recipe(recipe)
