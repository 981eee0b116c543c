"""The rewards of a stage: made with what the run around them has, and put into a scorer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keel.config.judging import ProcessRewardModelStage, RewardModelStage
from keel.config.schema import Recipe
from keel.config.sources import Rewards
from keel.models.policy import Policy
from keel.rewards import load_reward
from keel.rewards.context import Surroundings
from keel.rewards.registry import NamedReward
from keel.rewards.scorer import Scorer
from keel.runs.layout import RunFolder
from keel.types import Task


def surroundings(recipe: Recipe | None, folder: RunFolder | None, policy: Policy) -> Surroundings:
    """What a run's rewards may know of it; without a folder they keep nothing."""
    judging = (RewardModelStage, ProcessRewardModelStage)
    stages = () if recipe is None else recipe.stages
    names = [stage.name for stage in stages if isinstance(stage, judging)]
    return Surroundings(
        tokenizer=policy.tokenizer,
        models={} if folder is None else {name: folder.model(name) for name in names},
        folder=None if folder is None else folder.rewards,
        device=str(policy.device),
        seed=0 if recipe is None else recipe.seed,
    )


def load_rewards(rewards: Rewards, around: Surroundings) -> list[NamedReward]:
    """The recipe's reward functions, in order."""
    return [load_reward(source, around) for source in rewards.functions]


def scorer(
    rewards: Rewards,
    functions: Sequence[NamedReward],
    tasks: Mapping[str, Task],
    *,
    max_tokens: int,
    soft_overlong: int = 0,
) -> Scorer:
    """A scorer that calls the functions as the recipe says."""
    return Scorer(
        functions,
        tasks,
        timeout=rewards.timeout,
        on_error=rewards.on_error,
        max_tokens=max_tokens,
        soft_overlong=soft_overlong,
    )
