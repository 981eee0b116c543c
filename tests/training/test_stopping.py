"""Rules that end a stage before its last step (`stop_when`)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from keel.config.load import load_recipe
from keel.config.stage import StopRule
from keel.platform.signals import Interrupted
from keel.runs.layout import RunFolder
from keel.training.run import train
from keel.training.stopping import StopRules
from tests.soak.killing import differences
from tests.training import judged
from tests.training.small import FAST, Stop, info, metrics, notes

TWO_STAGES = (
    "sft.steps=9", "sft.stop_when=[{metric='loss', mode='max', patience=2}]",
    "rl.steps=9", "rl.stop_when=[{metric='kl', above=9}, {metric='reward', above=-9, patience=2}]",
    "rl.evaluation.every=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    recipe = load_recipe("quickstart", [*FAST, *TWO_STAGES])
    return train(recipe, tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize(
    ("rule", "values", "end"),
    [
        (StopRule(metric="kl", above=0.5, patience=2), [0.6, 0.4, 0.6, 0.7], 4),
        (StopRule(metric="kl", above=0.5), [0.5, 0.5], None),
        (StopRule(metric="reward", below=0, patience=2), [-1, None, -1, -1], 4),
        (StopRule(metric="eval/pass@1", patience=2), [0.1, 0.3, 0.3, 0.2], 4),
        (StopRule(metric="eval/pass@1", patience=2), [0.1, 0.3, 0.2, 0.4, 0.3], None),
        (StopRule(metric="eval/loss", patience=2), [3, 2, 2.5, math.nan], 4),
        (StopRule(metric="eval/loss", mode="max", patience=2), [3, 2, 2.5], 3),
        (StopRule(metric="value/loss", patience=1), [None, 2, 1, 0.5], None),
        (StopRule(metric="closs", patience=1), [2, 1], 2),
    ],
)
def test_rule_ends_after_its_records(
    rule: StopRule, values: list[float | None], end: int | None
) -> None:
    for cut in range(len(values)):  # resumed there
        records = [{rule.metric: value} for value in values]
        rules = StopRules([rule], records[:cut])
        ended = [at + 1 for at in range(cut, len(values)) if rules({"x": 1.0} | records[at])]
        assert ended == ([] if end is None else [end])


@pytest.mark.parametrize(("stage", "step"), [("sft", 2), ("sft", 3), ("rl", 1)])
def test_killed_run_is_ended_by_its_rules(
    whole: RunFolder, stage: str, step: int, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        train(load_recipe(whole.recipe), tmp_path / "run", callbacks=[Stop(step, stage=stage)])
    again = train(None, tmp_path / "run", resume=True)
    assert differences(whole.path, again.path) == []


def test_rules_end_stages_one_by_one(whole: RunFolder) -> None:
    taken = [(one["stage"], one["step"]) for one in metrics(whole)]
    assert taken == [("sft", 1), ("sft", 2), ("sft", 3), ("rl", 1), ("rl", 2)]
    stopped = {"sft": "loss no better for 2 records", "rl": "reward above -9 for 2 records"}
    known = info(whole)
    assert {name: one["rule"] for name, one in known["stopped"].items()} == stopped
    assert known["evaluation"]["rl"].keys() == {"before", "after"}
    assert metrics(whole)[-1]["eval/pass@1"] == known["evaluation"]["rl"]["after"]["mean"]
    assert any("rl ends after step 2: reward above -9" in note for note in notes(whole))


def test_stopped_stage_leaves_its_reward_model(tmp_path: Path) -> None:
    rule = {"metric": "loss", "below": 99}
    stage = {"stage": "reward_model", "steps": 4, "batch_size": 4, "stop_when": [rule]}
    stage["data"] = judged.data(tmp_path, judged.ones(24, 1), judged.ones(8, 2))
    made = train(judged.recipe(stage), tmp_path / "run")
    assert info(made)["measured"]["reward_model"]["after"]
    assert (made.model("reward_model") / "config.json").is_file()
    assert [one.place.step for one in made.list_checkpoints()] == [1]
