"""Repeated stages are written out, and names of reward models mean their newest version."""

from __future__ import annotations

from typing import Any

import pytest

from keel.config.load import load_recipe
from keel.types import KeelError

TASKS = [{"name": "sort_digits"}]
MODEL = {"build": {"family": "llama", "alphabet": "0123456789>", "hidden_size": 32}}


def reward_model(name: str, base: str | None = None) -> dict[str, Any]:
    stage = {"stage": "reward_model", "name": name, "sampled": {"tasks": TASKS}}
    return stage if base is None else {**stage, "base": {"stage": base}}


def policy(name: str, judge: str) -> dict[str, Any]:
    rewards = {"functions": [{"function": "outcome", "options": {"stage": judge}}]}
    return {"stage": "rl", "name": name, "algorithm": "grpo", "tasks": TASKS, "rewards": rewards}


def recipe(stages: list[dict[str, Any]], names: list[str], times: int = 2) -> dict[str, Any]:
    return {"model": MODEL, "stages": stages, "repeat": {"stages": names, "times": times}}


def shape(data: dict[str, Any], *overrides: str) -> list[tuple[str, str | None]]:
    """Of each stage its name, and the stage of the reward model that it goes on from or uses."""
    found: list[tuple[str, str | None]] = []
    for stage in load_recipe(data, overrides).stages:
        if stage.base_model is not None:
            found.append((stage.name, stage.base_model.stage))
        else:
            assert stage.sampling is not None
            found.append((stage.name, stage.sampling.rewards.functions[0].options["stage"]))
    return found


def test_each_round_uses_the_newest_version_of_a_model() -> None:
    stages = [reward_model("judge"), policy("grpo", "judge"), reward_model("update", "judge")]
    assert shape(recipe(stages, ["grpo", "update"], 3)) == [
        ("judge", None),
        *(("grpo-1", "judge"), ("update-1", "judge")),
        *(("grpo-2", "update-1"), ("update-2", "update-1")),
        *(("grpo-3", "update-2"), ("update-3", "update-2")),
    ]


def test_model_of_itself_has_no_base_in_round_one() -> None:
    stages = [reward_model("judge", "judge"), policy("ppo", "judge"), policy("last", "judge")]
    assert shape(recipe(stages, ["judge", "ppo"])) == [
        *(("judge-1", None), ("ppo-1", "judge-1")),
        *(("judge-2", "judge-1"), ("ppo-2", "judge-2")),
        ("last", "judge-2"),
    ]


def test_first_round_has_no_rows_to_replay() -> None:
    judge = {**reward_model("judge"), "base": {"stage": "judge", "replay": 0.5}}
    loaded = load_recipe(recipe([judge, policy("ppo", "judge")], ["judge", "ppo"]))
    bases = [stage.base_model for stage in loaded.stages if stage.base_model is not None]
    assert [base.replay for base in bases] == [0, 0.5]


def test_overrides_are_of_all_rounds_and_their_number() -> None:
    stages = [reward_model("judge"), policy("grpo", "judge"), reward_model("update", "judge")]
    data = recipe(stages, ["grpo", "update"], 3)
    loaded = load_recipe(data, ["repeat.times=2", "grpo.steps=7", "update.steps=5"])
    assert [stage.steps for stage in loaded.stages[1:]] == [7, 5, 7, 5]


def test_first_model_may_have_a_name() -> None:
    named = {**reward_model("judge"), "base": {"stage": "judge", "name": "folder"}}
    loaded = load_recipe(recipe([named, policy("ppo", "judge")], ["judge", "ppo"]))
    bases = [stage.base_model for stage in loaded.stages if stage.base_model is not None]
    assert [(base.name, base.stage) for base in bases] == [("folder", None), (None, "judge-1")]
    once = {**recipe([reward_model("judge"), policy("ppo", "judge")], []), "repeat": "none"}
    assert [stage.name for stage in load_recipe(once).stages] == ["judge", "ppo"]


def test_two_models_from_one_base_are_refused() -> None:
    both = [reward_model("help", "judge"), reward_model("harm", "judge"), policy("ppo", "help")]
    with pytest.raises(KeelError, match=r"two stages have base\.stage = 'judge'"):
        load_recipe(recipe([reward_model("judge"), *both], ["help", "harm", "ppo"]))


@pytest.mark.parametrize(
    ("repeat", "message"),
    [
        ({"stages": ["judge", "nothing"], "times": 2}, "unknown stage 'nothing'"),
        ({"stages": ["ppo", "judge"], "times": 2}, "do not follow each other"),
        ({"stages": ["judge"], "times": 0}, "repeat.times = 0"),
        ({"stages": ["judge"], "times": 10**9}, "repeat.times = 1000000000"),
        ({"stages": [], "times": 2}, "repeat.stages"),
        ({"stage": ["judge"], "times": 2}, "repeat"),
        (3, "repeat"),
    ],
)
def test_what_cannot_be_repeated_is_refused(repeat: Any, message: str) -> None:
    stages = [reward_model("judge"), policy("ppo", "judge")]
    with pytest.raises(KeelError, match=message):
        load_recipe({"model": MODEL, "stages": stages, "repeat": repeat})
