"""What a recipe's reinforcement-learning stages optimise, explained with the recipe's numbers."""

from __future__ import annotations

from keel.algorithms.explain import Explanation, explain_row
from keel.algorithms.presets import PRESETS
from keel.algorithms.setting import Setting
from keel.config.schema import Recipe, RLStage


def explain_recipe(recipe: Recipe) -> list[Explanation]:
    """One explanation for each reinforcement-learning stage, in order."""
    lora = recipe.model.lora is not None
    return [explain_stage(stage, lora) for stage in recipe.stages if isinstance(stage, RLStage)]


def explain_stage(stage: RLStage, lora: bool) -> Explanation:
    """The stage's objective, its choices compared with the preset that they came from."""
    rollout = stage.rollout
    setting = Setting(
        group_size=rollout.group_size,
        max_tokens=rollout.max_tokens,
        prompts_per_step=rollout.prompts_per_step,
        epochs=stage.epochs,
        minibatches=stage.minibatches,
        temperature=rollout.temperature,
        dynamic_sampling=rollout.dynamic_sampling,
        soft_overlong=rollout.soft_overlong,
        reward="rule",
        lora=lora,
        value=stage.value.kind,
    )
    return explain_row(stage.algorithm, preset=PRESETS[stage.algorithm.preset], setting=setting)
