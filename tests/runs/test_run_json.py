"""run.json of other shapes, as one edited by hand has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.cli.main import main
from keel.runs.reader import load, read_run_json
from keel.runs.writer import update_run_json
from keel.types import KeelError
from tests.runs.example import one_stage

RESULT = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 4}
EXAMPLE = {"prompt": "3 1 2 =", "completion": "1 2 3", "reward": 1.0}

WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([1], "it holds no JSON object"),
    "evaluation without a mean": (
        {"evaluation": {"rl": {"after": {"n": 4}}}},
        "evaluation.rl.after.mean: ",
    ),
    "a mean in words": (
        {"evaluation": {"rl": {"after": {**RESULT, "mean": "0.5"}}}},
        "evaluation.rl.after.mean: ",
    ),
    "an example without its completion": (
        {"examples": {"rl": {"after": [{"prompt": "1", "reward": None}]}}},
        "examples.rl.after.0.completion: ",
    ),
    "best in words": ({"best": {"rl": "last"}}, "best.rl: "),
    "versions a list": ({"versions": ["torch"]}, "versions: "),
}


@pytest.mark.parametrize("what", WRONG)
def test_run_json_of_another_shape_is_one_line(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = one_stage(tmp_path)
    content, key = WRONG[what]
    folder.run_json.write_text(json.dumps(content))
    for read in (lambda: update_run_json(folder, {"seed": 1}), lambda: load(folder.path).info()):
        with pytest.raises(KeelError) as caught:
            read()
        assert str(caught.value).startswith(f"cannot read {folder.run_json}: {key}")
        assert "fix it, or delete it" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert json.loads(folder.run_json.read_text()) == content
    assert main(["runs", "diff", str(folder.path), str(folder.path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_keys_that_keel_does_not_read_are_kept(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    content = {"mine": [1], "evaluation": {"rl": {"after": {**RESULT, "mean": None, "more": "x"}}}}
    folder.run_json.write_text(json.dumps(content))
    assert read_run_json(folder) == content


def test_examples_may_hold_messages_without_a_text(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    calls = [{"function": {"name": "f", "arguments": {}}}]
    for turn in ({"role": "assistant", "content": None, "tool_calls": calls}, {"role": "user"}):
        example = {"prompt": [turn], "completion": "7", "reward": None}
        content = {"examples": {"rl": {"after": [example]}}}
        folder.run_json.write_text(json.dumps(content))
        assert read_run_json(folder) == content


def test_timings_without_a_total_are_one_line(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    folder.timings.write_text('{"stage": "rl", "step": 1}\n')
    with pytest.raises(KeelError, match=r"timings\.jsonl has a record without its total"):
        load(folder.path).seconds()
