"""What later stages will need, looked at before the first of them is paid for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keel.config.judging import DPOStage, JudgingStage, ProcessRewardModelStage, RewardModelStage
from keel.config.preference_data import PreferenceData
from keel.config.schema import Recipe
from keel.models.policy import Policy
from keel.models.reward import Kind, check_classifier
from keel.tasks import preferences


def look_ahead(recipe: Recipe, policy: Policy, begun: int) -> None:
    """Read the data of stages behind stage number `begun`, and see that their models can be made.

    Raises KeelError as the stage itself would.
    """
    for stage in recipe.stages[begun + 1 :]:
        if not isinstance(stage, JudgingStage):
            continue
        # A function's rows may be dear to make, and are its own affair.
        if stage.data is not None and stage.data.name in preferences.KINDS:
            reader_of(stage)(stage.data, recipe.seed)
        if not isinstance(stage, RewardModelStage | ProcessRewardModelStage):
            continue
        if stage.base.name is None and stage.base.stage is None:
            kind: Kind = "outcome" if isinstance(stage, RewardModelStage) else "process"
            check_classifier(policy.model.config, kind)


def reader_of(stage: JudgingStage) -> Callable[[PreferenceData, int], Any]:
    """What reads the rows that a stage learns from."""
    if isinstance(stage, ProcessRewardModelStage):
        return preferences.read_steps
    if isinstance(stage, DPOStage) or (
        isinstance(stage, RewardModelStage) and stage.learns == "pairs"
    ):
        return preferences.read_pairs
    return preferences.read_labelled
