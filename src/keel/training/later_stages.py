"""What later stages will need, looked at before the first of them is paid for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

from pydantic import ValidationError

from keel.config.entry import load_entry
from keel.config.errors import explain_validation
from keel.config.sampling import Evaluation, SamplingSource
from keel.config.schema import Recipe
from keel.config.sources import Rewards, RewardSource
from keel.config.suggest import unknown
from keel.data.preferences import dataset as preferences
from keel.data.preferences.dataset import READERS
from keel.engines.registry import check_engine
from keel.learn.advantages import check_steps
from keel.models.policy import Policy
from keel.models.reward import check_classifier
from keel.rewards.judge.options import JudgeOptions
from keel.rewards.learned import HOW
from keel.rewards.registry import MADE, NamedReward, load_reward
from keel.rewards.scorer import Scorer
from keel.types import KeelError

T = TypeVar("T")


def look_ahead(recipe: Recipe, policy: Policy, begun: int) -> None:
    """Read the data of the stages after stage number `begun`, and see that their models can be made
    and that their rewards are named and set as they may be; of that stage too, that its advantage
    and the rewards of steps go together, and that its engine can be found.

    Raises KeelError as the stage itself would.
    """
    for stage in recipe.stages[begun:]:
        if stage.sampling is not None:
            _told(stage.name, check_rewards_of_steps, stage.sampling)
            _told(stage.name, check_engine, stage.sampling.rollout.engine)
    for stage in recipe.stages[begun + 1 :]:
        if stage.sampling is not None:
            _told(stage.name, check_evaluated, stage.sampling)
        data, records = stage.preference_data, stage.records
        # A function's records may be expensive to make, and are its own affair.
        if data is not None and records is not None and data.name in preferences.KINDS:
            READERS[records](data, recipe.seed)
        base, kind = stage.base_model, stage.reward_model
        if base is not None and kind is not None and base.name is None and base.stage is None:
            check_classifier(policy.model.config, kind)


def check_rewards(rewards: Rewards) -> list[str]:
    """The names of a stage's rewards, as far as these can be looked at before they are made.

    Nothing is loaded of a model, and no judge is asked. Raises KeelError as the stage would: for an
    option that there is not, two of one name, or weights that are all 0.
    """
    named = [_named(source) for source in rewards.functions]
    with closing(Scorer([replace(one, function=None) for one in named])) as scorer:
        return [one.name for one in scorer.functions]


def check_evaluated(sampling: SamplingSource) -> None:
    """The rewards of a stage, and which of them decides its evaluation. Raises KeelError."""
    names = check_rewards(sampling.rewards)
    if sampling.evaluation is not None and sampling.evaluation.prompts:
        check_component(sampling.evaluation, names)


def check_rewards_of_steps(sampling: SamplingSource) -> None:
    """Raise KeelError where the rewards are known to be of steps and the advantage cannot use them,
    or the reverse. What a function of the user's returns shows when it is called."""
    if sampling.algorithm is None:
        return
    learned = [source for source in sampling.rewards.functions if source.weight]
    there = [_of_steps(source) for source in learned]
    if True in there:
        check_steps(sampling.algorithm, True)
    elif None not in there:
        check_steps(sampling.algorithm, False)


def _of_steps(source: RewardSource) -> bool | None:
    """Whether a reward is of steps; None where that is the user's own affair."""
    if ":" in source.function:
        return None
    aggregate = source.options.get("aggregate", HOW[0])
    return source.function == "step_match" or (source.function == "process" and aggregate == HOW[0])


def check_component(choice: Evaluation, names: list[str]) -> None:
    """Raise KeelError where the reward that decides an evaluation is none of the stage's."""
    if choice.component is not None and choice.component not in names:
        guess = unknown("reward", choice.component, names)
        raise KeelError(f"evaluation.component: {guess}")


def _told(stage: str, look: Callable[[T], object], at: T) -> None:
    try:
        look(at)
    except KeelError as error:
        raise KeelError(f"stage {stage!r}: {error}") from error


def _named(source: RewardSource) -> NamedReward:
    """A reward by name and weight; one that uses a model or a server, by its options."""
    if source.function not in MADE:
        return load_reward(source)
    name = source.name or source.function
    parameters = inspect.signature(load_entry(MADE[source.function], "reward")).parameters
    options = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in source.options:
        if option not in options:
            raise KeelError(f"reward {name!r}: {unknown('option', option, options)}")
    if source.function == "judge":
        try:
            JudgeOptions.model_validate(source.options)
        except ValidationError as error:
            reason = explain_validation(error, source.options, JudgeOptions)
            raise KeelError(f"reward {name!r}: {reason}") from None
    how = source.options.get("aggregate", HOW[0])
    if source.function == "process" and how not in HOW:
        raise KeelError(f"reward {name!r}: aggregate = {how!r}: give {', '.join(HOW)}")
    return NamedReward(name, None, source.weight)
