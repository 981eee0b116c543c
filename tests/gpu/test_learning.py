"""One GPU: updates of PPO, GRPO and GSPO, sampling, whole runs and `keel check`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from keel.config.model import Autocast
from keel.engines.native import NativeEngine
from keel.learn.ranks import ONE
from keel.models.loading import choose_device
from keel.platform.signals import Interrupted
from keel.preflight.check import check
from keel.training.run import train
from keel.types import Sampling
from tests.cluster.updates import built, step
from tests.engines.tiny import TOKENIZER, assert_same, ragged_prompts, tiny
from tests.gpu import needs_gpus
from tests.training.small import FAST, Stop, info, metrics, small

pytestmark = needs_gpus(1)
DEVICE = "cuda"
UPDATES = 2
"""Batches, of two updates each."""


def updates(name: str, lora: bool, device: str, autocast: Autocast) -> list[dict[str, float]]:
    learner = built(name, lora, ONE, device, autocast)  # type: ignore[arg-type]
    assert learner.policy.device.type == device
    return [found for number in range(UPDATES) for found in step(learner, name, number)]


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo"])
def test_updates_in_float32_equal_those_on_the_cpu(name: str, lora: bool) -> None:
    """Every metric, losses and norms of gradients among them: float32 sums in another order."""
    exact = updates(name, lora, "cpu", False)
    for ours, theirs in zip(updates(name, lora, DEVICE, False), exact, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo"])
def test_updates_under_autocast_follow_those_on_the_cpu(name: str) -> None:
    """The bounds of bfloat16 on a CPU (`tests/models/test_policy.py`), ten times as wide for
    kernels that also keep the attention in bfloat16."""
    exact = updates(name, False, "cpu", False)
    for ours, theirs in zip(updates(name, False, DEVICE, True), exact, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-2)


def test_greedy_completions_equal_those_on_the_cpu() -> None:
    model = tiny("llama", dtype=torch.float32)
    asked, greedy = ragged_prompts(6), Sampling(max_tokens=12, temperature=0.0)
    wanted = NativeEngine(model, TOKENIZER).sample(asked, 1, greedy, 0)
    moved = tiny("llama", dtype=torch.float32).to(torch.device(DEVICE))
    found = NativeEngine(moved, TOKENIZER, autocast=False).sample(asked, 1, greedy, 0)
    assert_same(found, wanted, atol=1e-4)


@pytest.mark.parametrize(
    "keys", [(), ("model.lora.rank=4",), ("algorithm=ppo", "minibatches=2")], ids=str
)
def test_a_run_takes_the_gpu_and_resumes(keys: tuple[str, ...], tmp_path: Path) -> None:
    """`auto` takes it. Sums of a GPU are in no fixed order, so that only closeness is asked for."""
    recipe = small(*keys)
    assert choose_device(recipe.model.device).type == DEVICE
    whole = train(recipe, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "resumed", callbacks=[Stop(2)])
    resumed = train(None, tmp_path / "resumed", resume=True)
    assert info(resumed)["finished"] is True
    rows, again = metrics(whole), metrics(resumed)
    assert [row["step"] for row in again] == [row["step"] for row in rows] == [1, 2, 3, 4]
    assert again[0]["loss"] == pytest.approx(rows[0]["loss"], abs=1e-2)
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in again)


def test_the_engine_agrees_with_the_trainer_under_autocast(tmp_path: Path) -> None:
    row = metrics(train(small("minibatches=2", "steps=1"), tmp_path / "run"))[0]
    assert 0 < row["sampling/sampling_logp_difference/mean"] < 0.05


def test_check_measures_the_memory_of_the_gpu() -> None:
    (stage,) = check("tiny", [*FAST, "steps=2"]).stages
    memory = stage.measured["memory"]
    assert memory["device"].startswith(DEVICE)
    assert 0 < memory["peak"] < memory["room"]
    assert {"rollout", "update"} <= memory["phases"].keys()
    assert "bfloat16 autocast" in stage.figures
