"""Runs with stages that learn from preferences go on where they stopped, and end the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from keel.config.schema import Recipe
from keel.platform.signals import Interrupted
from keel.runs.checkpoint import damage as wrong_with
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.run import train
from keel.types import KeelError
from tests.training.judged import data, labelled, ones, recipe, traces
from tests.training.small import Stop
from tests.training.test_resume import damage, same

EVERY_SECOND: dict[str, Any] = {
    "steps": 4,
    "batch_size": 7,
    "optimizer": {"learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 1},
    "checkpoints": {"every": 2, "keep": 9},
    "evaluation": {"every": 3},
}
"""Seven rows of the 24 a step: the last one runs over the end of an epoch."""
LORA = {"base": {"lora": {"rank": 4}}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reward-model": ({"stage": "reward_model", "centering": 0.01}, {}),
    "reward-model-lora": ({"stage": "reward_model", **LORA}, {}),
    "reward-model-of-lora-policy": ({"stage": "reward_model"}, {"lora": {"rank": 4}}),
    "labels": ({"stage": "reward_model", "objective": "labels"}, {}),
    "process": ({"stage": "process_reward_model", "separator": " "}, {}),
    "process-lora": ({"stage": "process_reward_model", "separator": " ", **LORA}, {}),
    "dpo": ({"stage": "dpo"}, {}),
    "dpo-ipo-lora": ({"stage": "dpo", "loss": "ipo"}, {"lora": {"rank": 4}}),
}
TASK = {"name": "sort_digits", "options": {"min_digits": 3, "max_digits": 4}}
DENSE = {"functions": [{"function": "place_match"}]}
SAMPLED = {
    "tasks": [TASK],
    "rewards": DENSE,
    "train": 24,
    "validation": 8,
    "group_size": 4,
    "max_tokens": 5,
    "noise": 0.1,
}
IMITATE: dict[str, Any] = {
    "stage": "sft",
    "steps": 2,
    "batch_size": 8,
    "tasks": [TASK],
    "optimizer": {"learning_rate": 5e-3},
    "checkpoints": {"every": 1, "keep": 9},
}
REINFORCE: dict[str, Any] = {
    "stage": "rl",
    "steps": 3,
    "algorithm": "ppo",
    "tasks": [TASK],
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 5},
    "optimizer": {"learning_rate": 1e-3},
    "evaluation": {"every": 2, "prompts": 8, "component": "hidden_rule"},
    "checkpoints": {"every": 2, "keep": 9},
    "rewards": {
        "functions": [
            {"function": "outcome", "options": {"stage": "reward_model"}},
            {"function": "task", "name": "hidden_rule", "weight": 0.0},
        ]
    },
}


def alike(a: RunFolder, b: RunFolder) -> None:
    """As `same`, and what stages of this kind write: models, rows, figures, pictures."""
    same(a, b)
    for name in ("models", "rows", "pictures"):
        left, right = (_files(folder.path / name) for folder in (a, b))
        assert left == right, name
    printed = [json.loads(folder.run_json.read_text()) for folder in (a, b)]
    for key in ("measured", "evaluation", "tokens", "finished"):
        assert printed[0].get(key) == printed[1].get(key), key
    checkpoints = [[e.path.name for e in load(folder.path).checkpoints()] for folder in (a, b)]
    assert checkpoints[0] == checkpoints[1]
    assert not [p for p in b.path.rglob("*") if p.name.startswith(".") and p.name != ".lock"]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def one_stage(case: str, folder: Path) -> Recipe:
    keys, model = CASES[case]
    made = traces if keys["stage"] == "process_reward_model" else ones
    made = labelled if keys.get("objective") == "labels" else made
    source = data(folder, made(24, 1), made(12, 2))
    return recipe({**keys, **EVERY_SECOND, "data": source}, **model)


def three_stages(**judge: Any) -> Recipe:
    judge = {"stage": "reward_model", **EVERY_SECOND, "sampled": SAMPLED, **judge}
    return recipe(IMITATE, judge, REINFORCE)


@pytest.mark.parametrize("case", CASES)
def test_resume_from_the_previous_checkpoint_ends_the_same(case: str, tmp_path: Path) -> None:
    """The last checkpoint is torn, and the model that came of it is gone."""
    made = one_stage(case, tmp_path)
    whole = train(made, tmp_path / "whole")
    again = train(made, tmp_path / "again")
    alike(whole, again)
    damage(again, 0, 4)
    shutil.rmtree(again.path / "models", ignore_errors=True)
    train(None, again.path, resume=True)
    alike(whole, again)


@pytest.mark.parametrize("case", ["reward-model-lora", "process", "dpo-ipo-lora"])
@pytest.mark.parametrize("step", [1, 4])
def test_resume_of_an_interrupted_stage_ends_the_same(case: str, step: int, tmp_path: Path) -> None:
    """At a step without a checkpoint of its own, and at the last."""
    made = one_stage(case, tmp_path)
    whole = train(made, tmp_path / "whole")
    stage = whole.stages[0]
    again = RunFolder(tmp_path / "again", whole.stages)
    if step == 4:
        # Nothing is left to do, so the run ends as if no one had asked.
        train(made, again.path, callbacks=[Stop(step, stage=stage)])
    else:
        with pytest.raises(Interrupted):
            train(made, again.path, callbacks=[Stop(step, stage=stage)])
        assert [e.place.step for e in load(again.path).checkpoints()] == [step]
        assert not (again.path / "models").exists()
        train(None, again.path, resume=True)  # the checkpoint that the stop left goes with the next
    alike(whole, again)


# ---------------------------------------------------------------- three stages


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """SFT, a reward model from sampled pairs, then PPO against it: never stopped."""
    return train(three_stages(), tmp_path_factory.mktemp("three") / "whole")


def copied(whole: RunFolder, folder: Path) -> RunFolder:
    shutil.copytree(whole.path, folder)
    return RunFolder.open(folder)


def back_to(folder: RunFolder, stage: int, step: int) -> None:
    """Tear every checkpoint past this one."""
    for entry in load(folder.path).checkpoints():
        if (entry.place.stage, entry.place.step) > (stage, step):
            damage(folder, entry.place.stage, entry.place.step)
    assert wrong_with(folder.checkpoint(stage, step)) is None


def test_rl_uses_the_reward_model_of_an_earlier_stage(whole: RunFolder) -> None:
    last = load(whole.path).metrics("rl")[-1]
    assert last["reward"] == pytest.approx(last["rewards/outcome/mean"])
    assert "rewards/hidden_rule/mean" in last
    found = json.loads(whole.run_json.read_text())
    assert found["measured"].keys() == {"reward_model"}
    assert found["evaluation"]["rl"].keys() == {"before", "after"}


RESUMED: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "in rl": (2, 2, ()),
    "before the reward model is saved": (1, 4, ("models",)),
    "after the reward model is saved": (1, 4, ()),
    "in the reward model": (1, 2, ("models",)),
    "between train and validation rows": (0, 2, ("models", "pictures", "validation")),
    "in sft, with rows and models of later stages": (0, 1, ()),
}


@pytest.mark.parametrize(("stage", "step", "removed"), RESUMED.values(), ids=RESUMED)
def test_resume_of_three_stages_ends_the_same(
    whole: RunFolder, stage: int, step: int, removed: tuple[str, ...], tmp_path: Path
) -> None:
    """Rows that exist are not sampled again; a partly written model is ignored."""
    again = copied(whole, tmp_path / "again")
    back_to(again, stage, step)
    partial = again.path / "models" / ".writing-reward_model"
    for name in removed:
        if name == "validation":
            again.rows("reward_model", "validation").unlink()
        else:
            shutil.rmtree(again.path / name)
    if "models" in removed:
        partial.mkdir(parents=True)
        (partial / "config.json").write_text("{")
    kept = [again.rows("reward_model", split) for split in ("train", "validation")]
    times = {path: path.stat().st_mtime_ns for path in kept if path.exists()}
    train(None, again.path, resume=True)
    shutil.rmtree(partial, ignore_errors=True)
    alike(whole, again)
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize(("stage", "step"), [("sft", 2), ("reward_model", 3), ("rl", 1)])
def test_resume_of_three_stages_after_an_interrupt(
    whole: RunFolder, stage: str, step: int, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        train(three_stages(), tmp_path / "again", callbacks=[Stop(step, stage=stage)])
    again = train(None, tmp_path / "again", resume=True)
    alike(whole, again)


def other_model(run: RunFolder, other: RunFolder) -> None:
    """The reward model of another run in its place, whole, with its manifest."""
    shutil.rmtree(run.models_folder)
    shutil.copytree(other.models_folder, run.models_folder)


@pytest.mark.parametrize("kind", ["reward_model", "process_reward_model"])
def test_reward_model_of_another_run_is_refused(kind: str, tmp_path: Path) -> None:
    if kind == "reward_model":
        made = three_stages()
    else:
        rewards = {"functions": [{"function": "step_match"}]}
        judge = {"stage": kind, **EVERY_SECOND, "sampled": {**SAMPLED, "rewards": rewards}}
        learned = {"functions": [{"function": "process", "options": {"stage": kind}}]}
        reinforce = {**REINFORCE, "algorithm": "grpo_process", "rewards": learned}
        reinforce["evaluation"] = {"every": 0}
        made = recipe(IMITATE, judge, reinforce)
    run = RunFolder(tmp_path / "run", tuple(stage.name for stage in made.stages))
    with pytest.raises(Interrupted):
        train(made, run.path, callbacks=[Stop(2, stage="rl")])
    other = train(made.model_copy(update={"seed": 1}), tmp_path / "other")
    kept = tmp_path / "kept"
    shutil.copytree(run.models_folder, kept)
    other_model(run, other)
    with pytest.raises(KeelError, match=f"models/{kind} is not the reward model that this run"):
        train(None, run.path, resume=True)
    shutil.rmtree(run.model(kind))
    with pytest.raises(KeelError, match=f"models/{kind} is not the reward model that this run"):
        train(None, run.path, resume=True)
    shutil.copytree(kept, run.models_folder, dirs_exist_ok=True)
    train(None, run.path, resume=True)


def test_reward_model_replaced_before_the_next_stage_is_restored(tmp_path: Path) -> None:
    """The newest checkpoint is the last of its own stage: the model is that of the checkpoint."""
    made = three_stages()
    whole = train(made, tmp_path / "whole")
    again = train(made, tmp_path / "again")
    other = train(made.model_copy(update={"seed": 1}), tmp_path / "other")
    for entry in again.list_checkpoints():
        if entry.place.stage == 2:
            shutil.rmtree(entry.path)
    other_model(again, other)
    train(None, again.path, resume=True)
    alike(whole, again)
