"""What would stop a run, or teach it nothing, told before the first stage is paid for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.config.load import load_recipe
from keel.preflight.check import Report
from keel.preflight.check import check as whole_check
from keel.training.evaluation import evaluate
from keel.training.run import train
from keel.types import KeelError

DIGITS: dict[str, Any] = {"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 3}}
BUILD = {"family": "llama", "alphabet": "0123456789> ", "hidden_size": 16, "layers": 1, "heads": 2,
         "context": 48}  # fmt: skip
ROLLOUT = {"prompts_per_step": 8, "group_size": 4, "max_tokens": 4}
OWN = """
from keel.types import Prompt


def none(*, completions):
    return [None for _ in completions]


def penalty(*, completions, answer):
    return [0.0 if text.strip() == gold else -1.0 for text, gold in zip(completions, answer)]


class Task:
    def size(self, side):
        return 50

    def prompt(self, side, index):
        return Prompt(f"mine/{side}/{index}", f"{index}>", {"answer": str(index)}, "mine")

    def score(self, prompt, completion):
        return 0.0

    def gold(self, prompt):
        return prompt.columns["answer"]


def make():
    return Task()
"""


def stage(*functions: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "stage": "rl", "steps": 3, "tasks": [DIGITS], "rollout": ROLLOUT,
        "evaluation": {"prompts": 8}, "rewards": {"functions": list(functions)}, **keys,
    }  # fmt: skip


def check(*stages: Mapping[str, Any]) -> Report:
    recipe = {"threads": 1, "model": {"build": BUILD}, "stages": list(stages)}
    return whole_check(recipe, predicts=False)


def stops(report: Report) -> tuple[str, str]:
    """The one finding: its key and its line."""
    (found,) = [one for one in report.findings if one.severity == "error"]
    assert found.kind == "would-stop"
    return found.key, found.evidence


def rows(path: Path, lines: Sequence[Mapping[str, Any] | str]) -> str:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


def asked(n: int, **odd: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows of questions; `r7` is the row 7 in another way."""
    return [odd.get(f"r{at}", {"prompt": f"{at}>", "answer": str(at)}) for at in range(n)]


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    made = [{"prompt": f"{at}>", "chosen": str(at), "rejected": ">"} for at in range(60)]
    return rows(tmp_path / "pairs.jsonl", made)


# ---------------------------------------------------------------- rewards and names

JUDGE = {"function": "judge", "options": {"model": "m", "rubrik": "x"}}
LEARNED = {"function": "outcome", "options": {"stage": "made"}}
WRONG: list[tuple[list[Mapping[str, Any]], str]] = [
    ([JUDGE], "did you mean 'rubric'"),
    ([{"function": "judge", "options": {"model": "m", "rivals": 0}}], "rivals"),
    ([{**LEARNED, "options": {"stage": "made", "token_budgt": 3}}], "did you mean 'token_budget'"),
    ([LEARNED, {"function": "task", "name": "outcome"}], "two rewards are named 'outcome'"),
    ([{**LEARNED, "weight": 0.0}], "every reward has weight 0"),
]


@pytest.mark.parametrize(("functions", "said"), WRONG)
def test_rewards_that_cannot_be_made_yet_are_looked_at(
    functions: list[Mapping[str, Any]], said: str, pairs: str, tmp_path: Path
) -> None:
    """By a check, and by the run before it trains the reward model."""
    data = {"name": "jsonl", "path": pairs}
    first = {"stage": "reward_model", "name": "made", "steps": 2, "data": data}
    key, line = stops(check(first, stage(*functions)))
    assert key == "rl.rewards.functions"
    assert said in line
    recipe = {"threads": 1, "model": {"build": BUILD}, "stages": [first, stage(*functions)]}
    with pytest.raises(KeelError, match=rf"stage 'rl': .*{said}"):
        train(load_recipe(recipe), tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_an_evaluation_by_no_reward(tmp_path: Path) -> None:
    odd = stage(evaluation={"prompts": 8, "component": "tusk"})
    key, line = stops(check(odd))
    assert key == "evaluation.component"
    assert "did you mean 'task'" in line
    recipe = {"model": {"build": BUILD}, "stages": [{"stage": "sft", "tasks": [DIGITS]}, odd]}
    with pytest.raises(KeelError, match=r"stage 'rl': evaluation\.component"):
        train(load_recipe(recipe), tmp_path / "run")
    never = check(stage(evaluation={"prompts": 0, "component": "tusk"}))
    assert [one for one in never.findings if one.severity == "error"] == []


def test_a_stop_id_that_is_no_token() -> None:
    key, line = stops(check(stage(rollout={**ROLLOUT, "stop_ids": [999]})))
    assert key == "rollout.stop_ids"
    assert "999" in line


def test_prompts_of_a_task_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    key, line = stops(check(stage(tasks=[{"name": f"{tmp_path}/own.py:make"}])))
    assert key == "tasks"
    assert "is of task 'mine'" in line


def test_a_reward_that_says_nothing_and_one_that_only_punishes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    none = check(stage({"function": f"{tmp_path}/own.py:none"}))
    assert [(one.kind, one.severity) for one in none.findings] == [("reward-none", "error")]
    path = rows(tmp_path / "rows.jsonl", asked(60))
    task = {"name": "jsonl", "path": path, "answer": "answer"}
    function = f"{tmp_path}/own.py:penalty"
    punished = check(stage({"function": function}, tasks=[task], evaluation={"threshold": 0.0}))
    assert "gold-refused" not in [one.kind for one in punished.findings]


# ---------------------------------------------------------------- rows behind the first step


def test_a_gold_answer_far_behind_that_cannot_be_read(tmp_path: Path) -> None:
    odd = {"prompt": "7 7>", "answer": "none"}
    task = {"name": "jsonl", "path": rows(tmp_path / "rows.jsonl", asked(300, r290=odd)),
            "answer": "answer"}  # fmt: skip
    key, line = stops(check(stage({"function": "numeric_match"}, tasks=[task])))
    assert key == "tasks.answer"
    assert "rows.jsonl:291" in line
    skip = {"functions": [{"function": "numeric_match"}], "on_error": "skip"}
    report = check(stage(tasks=[task], rewards=skip))
    assert [one for one in report.findings if one.severity == "error"] == []


def test_a_demonstration_far_behind_that_is_too_long(tmp_path: Path) -> None:
    odd = {"prompt": "7 7>", "answer": "7" * 60}
    path = rows(tmp_path / "rows.jsonl", asked(300, r290=odd))
    task = {"name": "jsonl", "path": path, "answer": "answer"}
    sft = {"stage": "sft", "steps": 2, "batch_size": 4, "tasks": [task]}
    key, line = stops(check(sft))
    assert key == "prompts.max_tokens"
    assert "tokens, more than the model's context of 48" in line


def test_held_out_rows_that_are_all_too_long(tmp_path: Path, pairs: str) -> None:
    long = [{"prompt": f"9{at}>", "chosen": "1" * 60, "rejected": "0"} for at in range(5)]
    held = rows(tmp_path / "held.jsonl", long)
    dpo = {"stage": "dpo", "data": {"name": "jsonl", "path": pairs, "validation_path": held}}
    key, line = stops(check(dpo))
    assert key == "evaluation.rows"
    assert "each of the 5 held-out rows is longer than 48" in line


def test_rows_left_out_are_counted(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", [*asked(40), "{", "{"])
    task = {"name": "jsonl", "path": path, "answer": "answer", "bad_rows": "quarantine"}
    one = stage(tasks=[task])
    said = str(check(one).stages[0].figures["rows left out"])
    assert said.startswith("2 that cannot be read; the first: ")
    assert "rows.jsonl:41" in said
    recipe = {"threads": 1, "model": {"build": BUILD}, "stages": [{**one, "steps": 1}]}
    train(load_recipe(recipe), tmp_path / "run")
    assert evaluate(tmp_path / "run")["left_out"] == 2


# ---------------------------------------------------------------- leaks


def test_judged_rows_of_prompts_that_are_held_out_later(tmp_path: Path, pairs: str) -> None:
    task = {"name": "jsonl", "path": rows(tmp_path / "rows.jsonl", asked(60)), "answer": "answer"}
    dpo = {"stage": "dpo", "steps": 2, "data": {"name": "jsonl", "path": pairs}}
    report = check(dpo, stage(tasks=[{**task, "validation_fraction": 0.4}]))
    (leak,) = [one for one in report.findings if one.kind == "trained-on-held-out"]
    assert leak.key == "dpo.data.validation_path"
    assert check(dpo, stage(tasks=[task])).findings == ()


def test_one_file_split_twice_within_a_stage(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", asked(200))
    task = {"name": "jsonl", "path": path, "answer": "answer"}
    report = check(stage(tasks=[task, {**task, "validation_fraction": 0.5}]))
    assert "trained-on-held-out" in [one.kind for one in report.findings]


# ---------------------------------------------------------------- secrets

KEPT: list[dict[str, Any]] = [
    {"token": "####"}, {"secret": "blue"}, {"start": "sk-learn-style-estimator-names"},
    {"system": "log in at https://you@example.com and say hi"}, {"api_key": 12},
]  # fmt: skip
HELD: list[dict[str, Any]] = [
    {"secret_key": "abc"}, {"aws_secret_access_key": "abc"}, {"private-key": "abc"},
    {"token": "a1b2c3d4e5"}, {"secret": "correct-horse-battery"}, {"api_key": 12345678901},
    {"x": "github_pat_11ABCDEFG0abcdefghijkl_mnop"}, {"x": "glpat-ABCDEFGHIJKLMNOPQRST"},
    {"x": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozj"},
    {"x": "-----BEGIN RSA PRIVATE KEY-----"}, {"x": "Bearer abcdefghijklmnop"},
    {"x": "https://h/x?token=abcdefghijkl"}, {"x": "sk-proj-0123456789abcdef"},
    {"x": "https://me:word@example.com/x"},
]  # fmt: skip


@pytest.mark.parametrize("options", [*KEPT, *HELD], ids=str)
def test_what_an_option_may_hold(options: dict[str, Any]) -> None:
    recipe = {"model": {"build": BUILD}, **stage({"function": "a:b", "options": options})}
    if options in KEPT:
        load_recipe(recipe)
        return
    with pytest.raises(KeelError, match="a recipe is kept in the run folder"):
        load_recipe(recipe)
