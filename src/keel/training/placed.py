"""A stage's parts for the processes that they are made in (`keel.cluster.placement`)."""

from __future__ import annotations

from functools import partial

from keel.cluster.parts import StageFactory, StageParts
from keel.cluster.placement import Placement, placement_of
from keel.config.entry import PYTHON
from keel.config.fields import derive
from keel.config.load import to_toml
from keel.config.rl import RolloutStage
from keel.config.schema import Recipe
from keel.engines.registry import capabilities_of
from keel.models.policy import load_policy
from keel.training.setup import (
    RunContext,
    build_learner,
    reward_context,
    rollout_engine,
    token_budget,
)
from keel.training.state import Progress
from keel.training.template_time import templates_at
from keel.types import KeelError


def placement(recipe: Recipe) -> Placement:
    """Where a recipe's stages of kind rl compute."""
    if recipe.cluster.ray is not None and f'"{PYTHON}:' in to_toml(recipe):
        raise KeelError(
            "cluster.ray: other processes cannot call functions that were passed to keel.train: "
            "name them by module:function"
        )
    return placement_of(recipe.cluster, recipe.threads)


def stage_parts(run: RunContext, stage: RolloutStage, progress: Progress) -> StageParts:
    """What the stage is made of, new or from the run's checkpoint."""
    recipe, seed = run.recipe, derive(run.recipe.seed, stage.name)
    around = reward_context(recipe, run.folder, run.policy)
    budget = token_budget(stage, progress, run.writer)
    factory = StageFactory(
        load=partial(load_policy, recipe.model, recipe.seed),
        learner=partial(
            build_learner,
            stage=stage,
            model=recipe.model,
            seed=seed,
            resume_from=run.resume_from,
            offload=recipe.cluster.offload == "cpu",
        ),
        engine=partial(rollout_engine, rollout=stage.rollout),
        tokens=budget.tokens,
        log=run.folder.logs / f"{stage.name}-vllm.log",
        rewards=dict(enumerate(stage.rewards.functions)),
        reward_context=around,
        reward_time=partial(templates_at, around.template_time),
    )
    return StageParts(
        factory,
        policy=run.policy,
        budget=budget,
        engine_kind=capabilities_of(stage.rollout.engine),
        ahead=stage.rollout.async_level > 0,
        note=run.writer.note,
    )
