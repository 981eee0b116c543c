"""Reward models that are trained further: their base, replay, versions, what is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from keel.cli.train import show
from keel.config.judging import JudgingStage
from keel.config.load import load_recipe
from keel.data.preferences import read_pairs
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.judging import is_newest, rows_of, versions, with_replay
from keel.training.run import train
from tests.training.judged import MODEL, TASK, data, ones, recipe, sampled
from tests.training.small import info

SAMPLED = sampled(40, 10, group_size=4)
BRIEF: dict[str, Any] = {"steps": 2, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}}


def chain(tmp_path: Path, replay: float) -> Any:
    """A recipe of two stages on files of 20 and 10 pairs, the second with replay."""
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    old = {"stage": "reward_model", "name": "old", **BRIEF}
    new = {**old, "name": "new", "base": {"stage": "old", "replay": replay}}
    return recipe(
        {**old, "data": data(folders[0], ones(20, 1), ones(6, 2))},
        {**new, "data": data(folders[1], ones(10, 3), ones(6, 4))},
    )


def replayed(tmp_path: Path, replay: float, held: Any = None) -> list[str]:
    """The prompts of the second stage's train rows."""
    made = chain(tmp_path, replay)
    folder = RunFolder(tmp_path, ("old", "new"))
    stage = made.stages[1]
    splits = read_pairs(stage.data, made.seed)
    if held is not None:
        splits = type(splits)(splits.train, held)
    return [row.prompt for row in with_replay(folder, made, stage, splits).train]


@pytest.mark.parametrize(("replay", "count"), [(0.0, 0), (0.1, 2), (0.5, 10), (1.0, 20)])
def test_a_share_of_the_earlier_rows_is_learned_from_again(
    tmp_path: Path, replay: float, count: int
) -> None:
    found = replayed(tmp_path, replay)
    assert found[:10] == [row["prompt"] for row in ones(10, 3)]
    again = found[10:]
    assert len(set(again)) == len(again) == count
    assert set(again) <= {row["prompt"] for row in ones(20, 1)}
    assert found == replayed(tmp_path, replay)


def test_rows_with_a_held_out_prompt_are_not_replayed(tmp_path: Path) -> None:
    old = rows_of(RunFolder(tmp_path, ("old", "new")), chain(tmp_path, 1.0).stages[0])
    held = read_pairs(old).train[:15]
    assert set(replayed(tmp_path, 1.0, held)[10:]) == {row["prompt"] for row in ones(20, 1)[15:]}


def iterated() -> Any:
    """A reward model, then two rounds of policy steps and of training it further."""
    judge = {"stage": "reward_model", "name": "judge", "sampled": SAMPLED, **BRIEF}
    policy = {
        "stage": "rl",
        "name": "grpo",
        "algorithm": "grpo",
        "tasks": [TASK],
        "rewards": {"functions": [{"function": "outcome", "options": {"stage": "judge"}}]},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 5},
        "evaluation": {"every": 0, "prompts": 4},
        "checkpoints": {"every": 2},
        "steps": 2,
        "epochs": 2,
    }
    update = {**judge, "name": "update", "base": {"stage": "judge", "replay": 0.1}}
    return load_recipe(
        {
            "name": "iterated",
            "threads": 1,
            "model": MODEL,
            "stages": [judge, policy, update],
            "repeat": {"stages": ["grpo", "update"], "times": 2},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(iterated(), tmp_path_factory.mktemp("rounds") / "run")


def test_rewards_carry_the_version_and_every_version_is_measured(folder: RunFolder) -> None:
    made = iterated()
    rows = [load(folder.path).rollouts(1, stage) for stage in ("grpo-1", "grpo-2")]
    assert [{row["extra/version"] for row in step} for step in rows] == [{"judge"}, {"update-1"}]
    found = info(folder)["forgetting"]["update-2"]
    assert found["versions"] == ["judge", "update-1", "update-2"]
    assert [len(row) for row in found["accuracy"]] == [3, 3, 3]
    measured = info(folder)["measured"]
    for at, name in enumerate(found["versions"]):  # the same rows, measured by the stage itself
        own = measured[name]["after"]["accuracy"]
        assert found["accuracy"][at][at] == pytest.approx(own)
    # A stage's model before it is the version before.
    before = measured["update-2"]["before"]["accuracy"]
    assert found["accuracy"][1][2] == pytest.approx(before)
    assert (folder.pictures / "update-2-forgetting.png").is_file()
    assert not (folder.pictures / "update-1-forgetting.png").exists()
    stages = [stage for stage in made.stages if isinstance(stage, JudgingStage)]
    assert [stage.name for stage in versions(made, stages[2])] == found["versions"]
    assert [is_newest(made, stage) for stage in stages] == [False, False, True]


def test_each_stage_has_its_own_evaluation(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    found, rounds = info(folder), ("grpo-1", "grpo-2")
    for name in rounds:
        assert found["evaluation"].pop(name).keys() == {"before", "after"}
    assert found["evaluation"] == {}
    assert found["examples"].keys() == set(rounds)
    # The policy that a round ends with begins the next one: the same answers to the same prompts.
    ended, began = (
        [(one["prompt"], one["completion"]) for one in found["examples"][name][when]]
        for name, when in (("grpo-1", "after"), ("grpo-2", "before"))
    )
    assert ended == began
    show(Console(), folder)
    message = capsys.readouterr().out
    heads = [message.index(f"\n{when} {name}:") for name in rounds for when in ("before", "after")]
    assert heads == sorted(heads)


def test_each_round_begins_with_the_reference_set_to_the_policy(folder: RunFolder) -> None:
    for stage in ("grpo-1", "grpo-2"):
        first = load(folder.path).rollouts(1, stage)
        assert all(row["reference_log_probs"] == row["old_log_probs"] for row in first)
    last = load(folder.path).rollouts(2, "grpo-2")
    assert any(row["reference_log_probs"] != row["old_log_probs"] for row in last)
