"""The table of stage kinds."""

from __future__ import annotations

from typing import get_args

import pytest

from keel.config.schema import Stage
from keel.config.stage import StageConfig
from keel.training.stage_kinds import STAGE_KINDS

CONFIGS: tuple[type[StageConfig], ...] = get_args(get_args(Stage)[0])


def test_each_configuration_has_a_function_that_runs_it() -> None:
    assert {config.model_fields["stage"].default for config in CONFIGS} == set(STAGE_KINDS)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_stage_trains_the_policy_or_a_reward_model(config: type[StageConfig]) -> None:
    assert config.trains_policy == (config.reward_model is None)
