"""What a run checks in its recipe before the first step: later stages, leaks between splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from keel.cluster.placement import placement_of
from keel.config.fields import unknown
from keel.config.sampling import Evaluation, SamplingSource
from keel.config.schema import Recipe, Stage
from keel.config.sources import RewardSource, TaskSource
from keel.data.mixture import build_task, stored
from keel.data.preferences import READERS
from keel.data.splits import KINDS, places
from keel.engines.endpoint.programs import load_program
from keel.engines.registry import capabilities_of, check_engine, check_requests
from keel.learn.advantages import check_steps
from keel.models.policy import Policy
from keel.models.reference import check_teacher
from keel.models.reward import check_classifier
from keel.rewards.registry import MADE, NamedReward, load_reward, read_options
from keel.rewards.scorer import Scorer
from keel.types import KeelError, Split

T = TypeVar("T")


def validate_later_stages(recipe: Recipe, policy: Policy, current: int) -> None:
    """Check the data, models and rewards of the stages after number `current`; of that stage too
    its engine, and whether its advantage and its rewards of steps fit.

    Raises KeelError as the stage itself would.
    """
    here = recipe.cluster.ray in (None, "local")
    for stage in recipe.stages[current:]:
        if stage.sampling is not None:
            rollout = stage.sampling.rollout
            _named_stage(stage.name, check_rewards_of_steps, stage.sampling)
            _named_stage(stage.name, partial(check_engine, here=here), rollout)
            offered = placement_of(recipe.cluster).offers(capabilities_of(rollout.engine))
            _named_stage(stage.name, partial(check_requests, engine=offered), stage.sampling)
            if rollout.program is not None:
                _named_stage(stage.name, load_program, rollout.program)
    for stage in recipe.stages[current + 1 :]:
        if stage.sampling is not None:
            _named_stage(stage.name, check_evaluated, stage.sampling)
            _named_stage(stage.name, partial(_check_teacher, recipe, policy), stage.sampling)
        data, records = stage.preference_data, stage.records
        # The records of a Python function may be expensive to make.
        if data is not None and records is not None and data.name in KINDS:
            READERS[records](data, recipe.seed)
        base, kind = stage.base_model, stage.reward_model
        if base is not None and kind is not None and base.name is None and base.stage is None:
            check_classifier(policy.model.config, kind)


def longest_sequence(sampling: SamplingSource, policy: Policy) -> int | None:
    """The most tokens that a prompt and its completion may have; None if there is no limit."""
    prompt, answer = sampling.prompts.max_tokens, sampling.rollout.max_tokens
    return policy.context if prompt is None else prompt + answer


def _check_teacher(recipe: Recipe, policy: Policy, sampling: SamplingSource) -> None:
    if sampling.teacher is not None:
        longest = longest_sequence(sampling, policy)
        check_teacher(sampling.teacher, policy, recipe.model, longest)


def check_rewards(sampling: SamplingSource) -> list[str]:
    """The names of a stage's rewards, without loading a model or calling a server.

    Raises KeelError as the stage would: for an unknown option, a duplicate name, or weights that
    are all 0 if the stage learns from rewards.
    """
    named = [replace(_named(source), function=None) for source in sampling.rewards.functions]
    with closing(Scorer(named, needed=sampling.needs_reward)) as scorer:
        return [one.name for one in scorer.functions]


def check_evaluated(sampling: SamplingSource) -> None:
    """The rewards of a stage, and which of them decides its evaluation. Raises KeelError."""
    names = check_rewards(sampling)
    if sampling.evaluation is not None and sampling.evaluation.prompts:
        check_component(sampling.evaluation, names)


def check_rewards_of_steps(sampling: SamplingSource) -> None:
    """Raise KeelError if the rewards are known to be of steps and the advantage cannot use them,
    or the reverse. User functions show it when they are called."""
    if sampling.algorithm is None:
        return
    learned = [source for source in sampling.rewards.functions if source.weight]
    there = [_of_steps(source) for source in learned]
    if True in there:
        check_steps(sampling.algorithm, True)
    elif None not in there:
        check_steps(sampling.algorithm, False)


def _of_steps(source: RewardSource) -> bool | None:
    """Whether a reward is of steps; None for a user's function."""
    if ":" in source.function:
        return None
    aggregate = source.options.get("aggregate", "steps")
    return source.function == "step_match" or (source.function, aggregate) == ("process", "steps")


def check_component(choice: Evaluation, names: list[str]) -> None:
    """Raise KeelError if the reward that decides an evaluation is none of the stage's."""
    if choice.component is not None and choice.component not in names:
        guess = unknown("reward", choice.component, names)
        raise KeelError(f"evaluation.component: {guess}")


def _named_stage(stage: str, look: Callable[[T], object], at: T) -> None:
    try:
        look(at)
    except KeelError as error:
        raise KeelError(f"stage {stage!r}: {error}") from error


def _named(source: RewardSource) -> NamedReward:
    """A reward by name and weight; of one that needs a model or a server only the options are
    checked."""
    if source.function not in MADE:
        return load_reward(source)
    read_options(source)
    return NamedReward(source.name or source.function, source)


# ---------------------------------------------------------------- leaks between splits


@dataclass(frozen=True)
class _File:
    """The places of the prompts of one file's split; a prompt has a place in each of its forms."""

    name: str
    prompts: frozenset[frozenset[float]]

    @property
    def places(self) -> frozenset[float]:
        return frozenset(place for prompt in self.prompts for place in prompt)


@dataclass(frozen=True, slots=True)
class Leak:
    """Validation prompts of a stage (`shared` of `held`, of the file `source`) that the stage
    `trained` learns from, from the file `learned`; `judged`: as preference data."""

    stage: str
    trained: str
    shared: int
    held: int
    source: str
    learned: str
    judged: bool

    def __str__(self) -> str:
        return (
            f"WARNING: {self.shared} of the {self.held} validation prompts of stage {self.stage!r} "
            f"({self.source}) are train prompts of stage {self.trained!r} ({self.learned}): its "
            "figures are too high. Give both the same validation_path, or leave these rows out"
        )


def leaks(recipe: Recipe) -> Iterator[Leak]:
    """Each stage and file whose validation prompts an earlier stage or it trains on.

    Of files and `datasets` names; rows that a Python function returns are not read for this. What
    cannot be read is passed over: its own stage stops at it.
    """
    if _alike(recipe):
        return
    splits = [(stage, list(_files(recipe, stage))) for stage in recipe.stages]
    for at, (stage, files) in enumerate(splits):
        evaluation = None if stage.sampling is None else stage.sampling.evaluation
        if evaluation is None or not evaluation.prompts:
            continue
        for held in (file for split, file in files if split == "validation"):
            for before, others in splits[: at + 1]:
                for learned in (file for split, file in others if split == "train"):
                    places = learned.places
                    shared = sum(not prompt.isdisjoint(places) for prompt in held.prompts)
                    if shared:
                        judged = before.preference_data is not None
                        count, files_ = len(held.prompts), (held.name, learned.name)
                        yield Leak(stage.name, before.name, shared, count, *files_, judged)


def _alike(recipe: Recipe) -> bool:
    """Whether all prompts are of one file, split in one way, so that the splits are disjoint."""
    judged = any(stage.preference_data is not None for stage in recipe.stages)
    split = {
        (source.name, source.path, source.validation_path, source.validation_fraction,
         source.prompt, tuple(sorted((k, repr(v)) for k, v in source.options.items())))
        for stage in recipe.stages for source in _sources(stage)
    }  # fmt: skip
    return not judged and len(split) < 2


def _sources(stage: Stage) -> tuple[TaskSource, ...]:
    """The stage's tasks of stored rows."""
    return tuple(source for source in stage.trained_tasks if source.name in KINDS)


def _files(recipe: Recipe, stage: Stage) -> Iterator[tuple[Split, _File]]:
    """The splits of the stage's files."""
    for source in _sources(stage):
        with suppress(KeelError):
            data = stored(build_task(source, recipe.seed))
            assert data is not None
            for split, rows in data.splits.items():
                prompts = frozenset(frozenset(places(entry.body)) for entry in rows)
                yield split, _File(data.sources[split], prompts)
    pairs, records = stage.preference_data, stage.records
    if pairs is not None and records is not None and pairs.name in KINDS:
        with suppress(KeelError):
            examples = READERS[records](pairs, recipe.seed).train
            prompts = frozenset(frozenset(places(one.prompt)) for one in examples)
            yield "train", _File(str(pairs.path), prompts)
