"""The table of stage kinds."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from keel.config.schema import Stage
from keel.config.stage import StageConfig
from keel.training.run import train
from keel.training.stage_kinds import STAGE_KINDS
from tests.training.small import Notes, small

CONFIGS: tuple[type[StageConfig], ...] = get_args(get_args(Stage)[0])


def test_each_configuration_has_a_function_that_runs_it() -> None:
    assert {config.model_fields["stage"].default for config in CONFIGS} == set(STAGE_KINDS)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_stage_trains_the_policy_or_a_reward_model(config: type[StageConfig]) -> None:
    assert config.trains_policy == (config.reward_model is None)


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_run_prints_its_objective(preset: str, tmp_path: Path) -> None:
    start = Notes()
    recipe = small(f"algorithm.preset={preset}", "algorithm.surrogate.low=0.125", "steps=1")
    train(recipe, tmp_path / "run", callbacks=[start])
    (line,) = [note for note in start.notes if "J(θ)" in note]
    assert line.startswith("rl optimises J(θ) = Σ_n w_n · min(ρ_n A_n, clip(ρ_n, 0.875, 1.2) A_n)")
    assert ("; L_V(φ) = " in line) == (preset == "ppo")
