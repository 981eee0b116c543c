"""A stage's parts for the processes that they are made in (`keel.cluster.placement`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from keel.cluster.parts import StageParts
from keel.cluster.placement import Placement, placement_of
from keel.config.entry import PYTHON
from keel.config.fields import derive
from keel.config.load import to_toml
from keel.config.model import Model
from keel.config.rl import RolloutStage
from keel.config.schema import Recipe
from keel.engines.registry import capabilities_of
from keel.learn.learner import Learner
from keel.learn.ranks import Ranks
from keel.learn.token_budget import TokenBudget
from keel.models.policy import Policy, load_policy
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
    offload = recipe.cluster.offload == "cpu"
    learner = partial(_learner, stage, recipe.model, seed, run.resume_from, offload)
    return StageParts(
        name=stage.name,
        policy=run.policy,
        budget=token_budget(stage, progress, run.writer),
        load=partial(load_policy, recipe.model, recipe.seed),
        learner=learner,
        engine=partial(rollout_engine, rollout=stage.rollout),
        engine_kind=capabilities_of(stage.rollout.engine),
        ahead=stage.rollout.async_level > 0,
        logs=run.folder.logs,
        note=run.writer.note,
        rewards=dict(enumerate(stage.rewards.functions)),
        reward_context=around,
        reward_time=partial(templates_at, around.template_time),
    )


def _learner(
    stage: RolloutStage,
    model: Model,
    seed: int,
    resume_from: Path | None,
    offload: bool,
    policy: Policy,
    budget: TokenBudget,
    ranks: Ranks,
) -> Learner:
    return build_learner(stage, model, policy, seed, budget, resume_from, ranks, offload)
