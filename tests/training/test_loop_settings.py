"""What a preset's mini-batches and the value model's warm-up do in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from keel.config.load import load_recipe
from keel.training.stages.rl import RLStage
from tests.training.small import metrics, notes, run

DENSE = "rewards.functions=[{function='place_match'}]"


def rl(*overrides: str, recipe: str = "tiny") -> RLStage:
    stage = load_recipe(recipe, overrides).stages[-1]
    assert isinstance(stage, RLStage)
    return stage


def test_gspo_has_two_minibatches_by_default(tmp_path: Path) -> None:
    moved = run(tmp_path / "a", "algorithm=gspo", DENSE, "steps=1")
    still = run(tmp_path / "b", "algorithm=gspo", DENSE, "steps=1", "minibatches=1")
    assert metrics(moved)[0]["ratio/mean"] != 1.0
    assert metrics(still)[0]["ratio/mean"] == 1.0
    assert "importance ratio stays 1" not in "".join(notes(moved))
    assert "importance ratio stays 1" in "".join(notes(still))


def test_adaptive_bonus_that_stays_is_the_fixed_one(tmp_path: Path) -> None:
    several = (DENSE, "steps=3", "minibatches=2")
    fixed = metrics(run(tmp_path / "a", *several, "algorithm.entropy=0.02"))
    stays = "algorithm.entropy={coefficient=0.02, target=9.0, delta=0.0}"
    rows = metrics(run(tmp_path / "b", *several, stays))
    assert [row.pop("entropy/coefficient") for row in rows] == [0.02] * 3
    assert rows == fixed


def test_curriculum_of_an_infinite_window_is_none(tmp_path: Path) -> None:
    common = (DENSE, "steps=3")
    plain = metrics(run(tmp_path / "a", *common))
    rows = metrics(run(tmp_path / "b", *common, "rollout.curriculum={low=0.0, high=1.0}"))
    for row in rows:
        assert row.pop("prompts/passed_over") == 0
        assert row.pop("prompts/in_window") == 1
    assert rows == plain


def test_preset_minibatches_are_at_most_the_completions() -> None:
    assert rl("algorithm=dapo").minibatches == 16
    small = ("rollout.prompts_per_step=2", "rollout.group_size=2")
    assert rl("algorithm=dapo", *small).minibatches == 4
    assert rl("algorithm=dapo", "minibatches=2").minibatches == 2
    assert rl("algorithm=gspo", recipe="quickstart-gspo").minibatches == 2
    assert rl(recipe="gsm8k-gspo").minibatches == 4
    assert rl("algorithm=grpo", recipe="gsm8k-gspo").minibatches == 1


@pytest.mark.parametrize("kind", ["critic", "head"])
def test_value_warmup_trains_only_the_value_model(tmp_path: Path, kind: str) -> None:
    folder = run(
        tmp_path,
        "algorithm=ppo_kl_penalty",
        f"value.kind={kind}",
        DENSE,
        "steps=3",
        "value.warmup_steps=2",
        "value.optimizer.learning_rate=1e-3",
        "checkpoints.every=1",
    )
    first, second, third = (folder.checkpoint(0, step) for step in (1, 2, 3))

    def moved(a: Path, b: Path) -> set[bool]:
        """Whether tensors of the value model (True), and whether others (False), differ."""
        return {
            file.stem in ("critic", "value_head")
            for file in a.glob("*.safetensors")
            if "optimizer" not in file.stem
            for name, old in load_file(file).items()
            if not torch.equal(old, load_file(b / file.name)[name])
        }

    assert moved(first, second) == {True}
    assert moved(second, third) == {True, False}
    rows = metrics(folder)
    assert [row["learning_rate"] for row in rows] == [0.0, 0.0, 3e-4]
    assert [row["value/learning_rate"] for row in rows] == [1e-3] * 3
    assert [row["beta"] for row in rows] == [1.0] * 3


def test_default_learning_rate_of_the_value_model() -> None:
    for kind in ("critic", "head"):
        for policy, own in ((1e-6, 1e-5), (3e-4, 3e-4)):
            stage = rl(
                *("algorithm=ppo", f"value.kind={kind}", "value.optimizer={warmup_steps=3}"),
                f"optimizer.learning_rate={policy}",
            )
            assert stage.value.optimizer is not None
            assert stage.value.optimizer.learning_rate == own
        assert stage.value.optimizer.warmup_steps == 3
