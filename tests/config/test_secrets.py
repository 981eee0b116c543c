"""Nothing that may be a key is written into a run folder, or printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.cli.main import main

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
