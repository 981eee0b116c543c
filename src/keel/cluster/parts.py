"""How a stage's parts are made, in this process or in others, and the parts where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel

from keel.config.sources import RewardSource
from keel.learn.learner import Learner, Trainer
from keel.learn.ranks import Ranks
from keel.learn.token_budget import TokenBudget
from keel.models.policy import Policy, frozen_copy
from keel.rewards.registry import NamedReward, RewardContext
from keel.types import Capabilities, Engine


class BuildLearner(Protocol):
    """Makes the learner of a stage, new or from a checkpoint; of several ranks this one's part."""

    def __call__(self, policy: Policy, budget: TokenBudget, ranks: Ranks) -> Learner: ...


class BuildEngine(Protocol):
    """Makes the engine of a stage, with the weights of `model`."""

    def __call__(
        self,
        policy: Policy,
        *,
        model: PreTrainedModel,
        log: Path | None = None,
        note: Callable[[str], None] | None = None,
    ) -> Engine: ...


@dataclass(frozen=True, eq=False)
class StageFactory:
    """Makes the parts of a stage; it is sent whole to the processes that are to have some.

    `load`, `learner` and `engine` are functions of modules, or partial ones; what `load` gives gets
    the weights of the run's policy. `tokens` are those of the token budget. `rewards` by their
    place in the recipe are those that may run elsewhere, within `reward_time()`. An engine that
    starts a server writes to `log`.
    """

    load: Callable[[], Policy]
    learner: BuildLearner
    engine: BuildEngine
    tokens: int
    log: Path
    rewards: Mapping[int, RewardSource] = field(default_factory=dict)
    reward_context: RewardContext = field(default_factory=RewardContext)
    reward_time: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, eq=False)
class StageParts:
    """What a stage is made of, in the process that runs the loop.

    `engine_kind` is what one engine can do. With `ahead` rollouts are sampled while the policy is
    trained.
    """

    factory: StageFactory
    policy: Policy
    budget: TokenBudget
    engine_kind: Capabilities
    ahead: bool
    note: Callable[[str], None]

    def own_engine(self) -> Engine:
        """An engine in this process. It has weights of its own if it samples ahead; make it before
        the learner adds the reference's adapter to the policy."""
        model = frozen_copy(self.policy.model) if self.ahead else self.policy.model
        return self.factory.engine(self.policy, model=model, log=self.factory.log, note=self.note)


class PlacedReward(Protocol):
    """A reward function that is elsewhere."""

    def named(self) -> NamedReward:
        """It, with the arguments that it wants."""
        ...


@dataclass(frozen=True, eq=False)
class PlacedStage:
    """The parts of a stage where they are; `rewards` by their place in the recipe."""

    learner: Trainer
    engine: Engine
    rewards: Mapping[int, PlacedReward] = field(default_factory=dict)
