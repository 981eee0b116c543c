"""Runs with stages that learn from preferences go on where they stopped, and end the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from keel.config.schema import Recipe
from keel.platform.signals import Interrupted
from keel.runs.checkpoint import damage as wrong_with
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.run import train
from keel.types import KeelError
from tests.soak.cases import CASES, IMITATE, JUDGE, REINFORCE, SAMPLED, spaced
from tests.soak.killing import differences
from tests.training.judged import recipe
from tests.training.small import Stop
from tests.training.test_resume import damage


def made_of(case: str, folder: Path) -> Recipe:
    """The case with a checkpoint every second step, all kept."""
    return spaced(CASES[case], every=2, keep=9).make(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """SFT, a reward model from sampled pairs, then PPO against it: never stopped."""
    folder = tmp_path_factory.mktemp("three")
    return train(made_of("three-stages", folder), folder / "whole")


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
    "before the reward model is saved": (1, 3, ("models",)),
    "after the reward model is saved": (1, 3, ()),
    "in the reward model": (1, 2, ("models",)),
    "between train and validation rows": (0, 3, ("models", "pictures", "validation")),
    "in sft, with rows and models of later stages": (0, 2, ()),
}


@pytest.mark.quick("before the reward model is saved")
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
    assert differences(whole.path, again.path) == []
    assert {path: path.stat().st_mtime_ns for path in times} == times


def other_model(run: RunFolder, other: RunFolder) -> None:
    """The reward model of another run in its place, whole, with its manifest."""
    shutil.rmtree(run.models_folder)
    shutil.copytree(other.models_folder, run.models_folder)


@pytest.mark.quick("reward_model")
@pytest.mark.parametrize("kind", ["reward_model", "process_reward_model"])
def test_reward_model_of_another_run_is_refused(kind: str, tmp_path: Path) -> None:
    if kind == "reward_model":
        made = made_of("three-stages", tmp_path)
    else:
        rewards = {"functions": [{"function": "step_match"}]}
        judge = {**JUDGE, "stage": kind, "sampled": {**SAMPLED, "rewards": rewards}}
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


@pytest.mark.slow
def test_reward_model_replaced_before_the_next_stage_is_restored(
    whole: RunFolder, tmp_path: Path
) -> None:
    """The newest checkpoint is the last of its own stage: the model is that of the checkpoint."""
    made = made_of("three-stages", tmp_path)
    again = copied(whole, tmp_path / "again")
    other = train(made.model_copy(update={"seed": 1}), tmp_path / "other")
    for entry in again.list_checkpoints():
        if entry.place.stage == 2:
            shutil.rmtree(entry.path)
    other_model(again, other)
    train(None, again.path, resume=True)
    assert differences(whole.path, again.path) == []
