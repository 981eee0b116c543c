"""A mistake in a later stage is reported before the stages before it are paid for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keel.training.run import train
from keel.types import KeelError
from tests.training.judged import data, ones, recipe, traces

TASK = {"name": "sort_digits"}
BEFORE: dict[str, Any] = {"stage": "sft", "steps": 2, "batch_size": 4, "tasks": [TASK]}
BRIEF: dict[str, Any] = {"steps": 2, "batch_size": 4}


def refused(tmp_path: Path, stage: dict[str, Any], message: str, **model: Any) -> None:
    """The run ends with the words, and no step of the first stage was taken."""
    with pytest.raises(KeelError, match=message):
        train(recipe(BEFORE, stage, **model), tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_missing_file_is_reported_first(tmp_path: Path) -> None:
    source = {"name": "jsonl", "path": str(tmp_path / "nope.jsonl")}
    refused(tmp_path, {"stage": "dpo", "data": source, **BRIEF}, r"nope\.jsonl")


def test_rows_of_another_objective_are_reported_first(tmp_path: Path) -> None:
    source = data(tmp_path, traces(9, 1), traces(9, 2))
    refused(tmp_path, {"stage": "reward_model", "data": source, **BRIEF}, r"train\.jsonl:1.*chosen")
    labels = {"stage": "reward_model", "objective": "labels", "data": source, **BRIEF}
    refused(tmp_path / "labels", labels, r"train\.jsonl:1.*completion")


def test_model_family_without_the_class_is_reported_first(tmp_path: Path) -> None:
    source = data(tmp_path, traces(9, 1), traces(9, 2))
    stage = {"stage": "process_reward_model", "data": source, **BRIEF}
    build = {"family": "cohere", "alphabet": "0123456789> ", "hidden_size": 32, "layers": 1}
    refused(tmp_path, stage, "no token classification class", build=build)


@pytest.mark.parametrize("at", ["rl", "sampled"])
def test_learned_reward_of_a_later_stage_is_refused(at: str, tmp_path: Path) -> None:
    rewards = {"functions": [{"function": "outcome", "options": {"stage": "later"}}]}
    made: dict[str, Any]
    if at == "rl":
        made = {"stage": "rl", "tasks": [TASK], "rewards": rewards, "algorithm": "grpo"}
    else:
        made = {"stage": "dpo", "sampled": {"tasks": [TASK], "rewards": rewards}, **BRIEF}
    later = {"stage": "reward_model", "name": "later", "sampled": {"tasks": [TASK]}, **BRIEF}
    with pytest.raises(KeelError, match=rf'{made["stage"]}: the reward "outcome" is of .*"later"'):
        recipe(made, later)


def test_process_model_as_outcome_reward_is_refused(tmp_path: Path) -> None:
    source = data(tmp_path, traces(9, 1), traces(9, 2))
    made = {"stage": "process_reward_model", "name": "made", "data": source, **BRIEF}
    functions = [{"function": "outcome", "options": {"stage": "made"}}]
    rl = {"stage": "rl", "tasks": [TASK], "rewards": {"functions": functions}, "algorithm": "grpo"}
    with pytest.raises(KeelError, match=r'"made", which is not a stage before .*there is none'):
        recipe(made, rl)


def test_different_splits_of_one_file_are_refused(tmp_path: Path) -> None:
    """What the second holds out, the first has learned from."""
    source = {"name": "jsonl", "path": data(tmp_path, ones(40, 1), ones(9, 2))["path"]}
    one = {"stage": "reward_model", "name": "one", "data": source, **BRIEF}
    two = {**one, "name": "two", "base": {"stage": "one"}}
    recipe(one, two)
    apart = {"validation_path": data(tmp_path, ones(40, 1), ones(9, 2))["validation_path"]}
    for other in ({"validation_fraction": 0.05}, apart):
        recipe(one, {**two, "data": {**source, **other}})
    for other in ({"validation_fraction": 0.3}, {"group": "prompt"}):
        with pytest.raises(KeelError, match=r"one and two split the same data otherwise"):
            recipe(one, {**two, "data": {**source, **other}})


def test_errors_of_a_base_name_its_keys(tmp_path: Path) -> None:
    source = data(tmp_path, ones(40, 1), ones(9, 2))
    stage = {"stage": "reward_model", "data": source, **BRIEF}
    for number, (base, message) in enumerate(
        [
            ({"name": str(tmp_path / "none")}, r"^reward_model\.base\.name = "),
            ({"lora": {"rank": 2, "targets": ["nowhere"]}}, r"reward_model\.base\.lora"),
        ]
    ):
        with pytest.raises(KeelError, match=message):
            train(recipe({**stage, "base": base}), tmp_path / f"run{number}")


def test_saved_reward_model_as_base_name_is_refused(tmp_path: Path) -> None:
    source = data(tmp_path, ones(40, 1), ones(9, 2))
    stage = {"stage": "reward_model", "data": source, **BRIEF}
    made = train(recipe(stage), tmp_path / "run").model("reward_model")
    with pytest.raises(KeelError, match=r"ForSequenceClassification.*learns on by base\.stage"):
        train(recipe({**stage, "base": {"name": str(made)}}), tmp_path / "again")
