"""What a recipe's reinforcement-learning stages optimise, explained with the recipe's numbers."""

from __future__ import annotations

from keel.algorithms.explain import Explanation, explain_algorithm
from keel.algorithms.terms import Setting
from keel.config.schema import Recipe, RLStage
from keel.config.sources import LEARNED


def explain_recipe(recipe: Recipe) -> list[Explanation]:
    """One explanation for each reinforcement-learning stage, in order."""
    lora = recipe.model.lora is not None
    return [explain_stage(stage, lora) for stage in recipe.stages if stage.stage == "rl"]


def explain_stage(stage: RLStage, lora: bool) -> Explanation:
    """The stage's objective, its choices compared with the preset that they came from."""
    rollout = stage.rollout
    setting = Setting(
        group_size=rollout.group_size,
        prompts_per_step=rollout.prompts_per_step,
        max_tokens=rollout.max_tokens,
        epochs=stage.epochs,
        minibatches=stage.minibatches,
        reward="model" if any(f.function in LEARNED for f in stage.rewards.functions) else "rule",
        value=stage.value.kind,
        lora=lora,
        temperature=rollout.temperature,
        dynamic_sampling=rollout.dynamic_sampling,
        overlong_buffer=rollout.overlong_buffer,
        mask_truncated=rollout.mask_truncated,
        old_log_probs=rollout.old_log_probs,
        reference_reset_every=stage.reference.reset_every,
        reference_measured=stage.reference.measured,
    )
    return explain_algorithm(stage.algorithm, preset=stage.algorithm.preset, context=setting)
