"""run.json of other shapes: of earlier versions, or edited by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.cli.main import main
from keel.runs.reader import load
from keel.runs.records import update_run_json
from keel.runs.run_json import read_run_json
from keel.types import KeelError
from tests.runs.example import one_stage, two_stages

RESULT = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 4}
EXAMPLE = {"prompt": "3 1 2 =", "completion": "1 2 3", "reward": 1.0}

WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([1], "it holds no JSON object"),
    "a number": (3, "it holds no JSON object"),
    "evaluation a list": ({"evaluation": [RESULT]}, "evaluation: "),
    "evaluation without a mean": (
        {"evaluation": {"rl": {"after": {"n": 4}}}},
        "evaluation.rl.after.mean: ",
    ),
    "a mean in words": (
        {"evaluation": {"rl": {"after": {**RESULT, "mean": "0.5"}}}},
        "evaluation.rl.after.mean: ",
    ),
    "examples a list": ({"examples": [EXAMPLE]}, "examples: "),
    "an example without its completion": (
        {"examples": {"rl": {"after": [{"prompt": "1", "reward": None}]}}},
        "examples.rl.after.0.completion: ",
    ),
    "measured a number": ({"measured": {"judge": 3}}, "measured.judge: "),
    "best in words": ({"best": {"rl": "last"}}, "best.rl: "),
    "versions a list": ({"versions": ["torch"]}, "versions: "),
    "threads in words": ({"threads": "two"}, "threads: "),
}


@pytest.mark.parametrize("what", WRONG)
def test_another_shape_is_one_line(
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


def test_keys_that_are_not_read_are_left_as_they_are(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    content = {"mine": [1], "evaluation": {"rl": {"after": {**RESULT, "mean": None, "more": "x"}}}}
    folder.run_json.write_text(json.dumps(content))
    assert read_run_json(folder) == content


def test_evaluations_of_an_earlier_version_come_under_their_stage(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    later = {**RESULT, "mean": 0.75}
    old = {
        "evaluation": {"before": RESULT, "after": RESULT, "rl": {"after": later}},
        "examples": {"before": [EXAMPLE]},
    }
    folder.run_json.write_text(json.dumps(old))
    # What was written under the stage since is the newer one.
    assert read_run_json(folder) == {
        "evaluation": {"rl": {"before": RESULT, "after": later}},
        "examples": {"rl": {"before": [EXAMPLE]}},
    }
    written = update_run_json(folder, {"tokens": 9})
    assert json.loads(folder.run_json.read_text()) == written
    assert written["evaluation"] == {"rl": {"before": RESULT, "after": later}}


def test_of_several_stages_the_events_say_which_was_evaluated(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    after, lost = {**RESULT, "mean": 0.75}, {**RESULT, "mean": 0.9}
    events = [("warmup", 0, RESULT), ("warmup", 5, after), ("rl", 0, RESULT), ("rl", 3, after)]
    lines = [
        {"event": "evaluation", "stage": stage, "step": step, "mean": r["mean"], "n": r["n"]}
        for stage, step, r in events
    ]
    folder.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.run_json.write_text(json.dumps({"evaluation": {"before": RESULT, "after": after}}))
    assert read_run_json(folder)["evaluation"] == {
        "warmup": {"before": RESULT},
        "rl": {"after": after},
    }
    folder.run_json.write_text(json.dumps({"evaluation": {"before": RESULT, "after": lost}}))
    assert read_run_json(folder) == {
        "evaluation": {"warmup": {"before": RESULT}},
        "earlier_evaluation": {"after": lost},
    }


def test_a_row_of_timings_without_its_total_is_one_line(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    folder.timings.write_text('{"stage": "rl", "step": 1}\n')
    with pytest.raises(KeelError, match=r"timings\.jsonl has a row without its total"):
        load(folder.path).seconds()
