"""`keel rollouts`, `keel models` and `keel check --device`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keel.cli.main import main
from keel.config.load import load_recipe
from keel.models.build import build_model
from keel.models.families import FAMILIES
from keel.preflight.device_estimate import DEVICES, GIB, estimate
from keel.types import KeelError
from tests.models.test_reward import NO_SEQUENCE, NO_TOKEN
from tests.training.small import run

Capture = pytest.CaptureFixture[str]


# ---------------------------------------------------------------- rollouts


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("rollouts") / "run", "steps=2").path


def test_rollouts_prints_the_first_sequences_of_a_step(trained: Path, capsys: Capture) -> None:
    assert main(["rollouts", str(trained), "--step", "2", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 16
    assert {one["step"] for one in records} == {2}
    assert main(["rollouts", str(trained), "--step", "2", "-n", "3"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    mean = sum(one["reward"] for one in records) / 16
    assert head == f"16 completions of 4 prompts, mean reward {mean:.3g}"
    shown = [line for line in lines if "advantage" in line]
    assert len(shown) == 3
    for line, one in zip(shown, records, strict=False):
        value = f"{one['advantages'][0]:+.3g}"
        assert line.startswith(f"{one['prompt_id']}: reward {one['reward']:.3g}")
        assert f", advantage {value}, {len(one['tokens'])} tokens, ended by " in line
    assert f"  completion  {json.dumps(records[0]['completion'])}" in lines
    assert lines[-1].startswith("13 more")


def test_rollouts_of_a_step_that_is_not_there(trained: Path, capsys: Capture) -> None:
    assert main(["rollouts", str(trained), "--step", "37"]) == 2
    assert "no rollouts of step 37" in (message := capsys.readouterr().err)
    assert "steps 1 to 2" in message


# ---------------------------------------------------------------- models


def test_models_lists_every_family_and_its_reward_models(capsys: Capture) -> None:
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == FAMILIES.keys()
    assert {name for name, has in found.items() if not has["outcome"]} == set(NO_SEQUENCE)
    assert {name for name, has in found.items() if not has["process"]} == set(NO_TOKEN)
    assert main(["models"]) == 0
    rows = capsys.readouterr().out.splitlines()[1 : len(FAMILIES) + 1]
    assert [row.split()[0] for row in rows] == sorted(FAMILIES)
    assert [row.split()[-1] == "no" for row in rows] == [
        name in NO_TOKEN for name in sorted(FAMILIES)
    ]


# ---------------------------------------------------------------- check --device


def parts(*overrides: str) -> dict[str, int]:
    found = estimate(load_recipe("tiny", overrides), "l4-24gb")
    return {part.name: part.bytes for part in found.stages[-1].parts}


def test_an_estimate_follows_from_the_config() -> None:
    recipe = load_recipe("tiny", ["algorithm=grpo"])
    assert recipe.model.build is not None
    weights = sum(p.numel() for p in build_model(recipe.model.build, 0, torch.float32).parameters())
    found = parts("algorithm=grpo")
    assert found["policy weights"] == found["policy gradients"] == 4 * weights
    assert found["policy optimizer moments"] == 8 * weights
    assert found["reference weights"] == 4 * weights
    assert found["bfloat16 copy of the weights (autocast)"] == 2 * weights
    build, rollout = recipe.model.build, recipe.stages[-1].rollout  # type: ignore[union-attr]
    rows = min(rollout.max_rows, rollout.prompts_per_step * rollout.group_size)
    tokens = rows * rollout.max_tokens + rows // rollout.group_size * 512
    assert found["key-value cache"] == 2 * 2 * build.layers * build.hidden_size * tokens
    lora = parts("algorithm=grpo", "model.lora.rank=2")
    assert lora["policy gradients"] < found["policy gradients"] / 2
    assert "reference weights" not in lora
    assert parts("algorithm=ppo")["critic, its gradients and moments"] == 16 * weights
    full, less = (
        parts(f"model.activation_checkpointing={on}")["activations of a micro-batch"]
        for on in ("false", "true")
    )
    assert less < full


def test_an_adapter_has_the_weights_that_are_estimated() -> None:
    from keel.models.policy import load_policy

    recipe = load_recipe("tiny", ["model.lora.rank=2", "model.device=cpu"])
    trained = sum(p.numel() for p in load_policy(recipe.model, 0).trainable().values())
    assert parts("model.lora.rank=2")["policy gradients"] == 4 * trained


def test_sampling_and_learning_alternate() -> None:
    (stage,) = estimate(load_recipe("tiny"), "l4-24gb").stages
    by = {
        when: sum(p.bytes for p in stage.parts if p.when == when)
        for when in ("always", "sampling", "learning")
    }
    assert stage.peak == by["always"] + max(by["sampling"], by["learning"])


def test_check_for_a_device_says_whether_it_fits(capsys: Capture) -> None:
    assert main(["check", "tiny", "--device", "h100-80gb"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("estimate for h100-80gb (79.10 GiB), computed from the config")
    assert "of 79.10 GiB: fits" in text
    wide = ["model.build.hidden_size=16384", "model.build.layers=24"]
    assert main(["check", "tiny", *wide, "--device", "l4-24gb", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["stages"][-1]["peak"] > found["memory"] == int(DEVICES["l4-24gb"] * GIB)


def test_a_device_that_is_not_known_is_named(capsys: Capture) -> None:
    assert main(["check", "tiny", "--device", "h100-80"]) == 2
    assert "did you mean 'h100-80gb'" in capsys.readouterr().err
    assert main(["check", "tiny", "--device", "l4-24gb", "--price", "2"]) == 2
    assert "--price: there is no estimate of time" in capsys.readouterr().err
    with pytest.raises(KeelError, match="device"):
        estimate(load_recipe("tiny"), "tpu")
