"""What a stage is made of, and its parts where they are."""

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
class StageParts:
    """What a stage is made of, wherever that is.

    `load`, `learner` and `engine` are functions of modules, or partial ones, which other processes
    call too; what `load` gives gets the weights of `policy`, which is this process's. With `ahead`
    rollouts are sampled while the policy is trained. `engine_kind` is what one engine can do.
    `rewards` by their place in the recipe are those that may run elsewhere, within
    `reward_time()`. Engines that start a server write to `logs`/`name`-vllm.log.
    """

    name: str
    policy: Policy
    budget: TokenBudget
    load: Callable[[], Policy]
    learner: BuildLearner
    engine: BuildEngine
    engine_kind: Capabilities
    ahead: bool
    logs: Path
    note: Callable[[str], None]
    rewards: Mapping[int, RewardSource] = field(default_factory=dict)
    reward_context: RewardContext = field(default_factory=RewardContext)
    reward_time: Callable[[], AbstractContextManager[None]] = nullcontext

    def own_engine(self) -> Engine:
        """An engine in this process. It has weights of its own if it samples ahead; make it before
        the learner adds the reference's adapter to the policy."""
        model = frozen_copy(self.policy.model) if self.ahead else self.policy.model
        log = self.logs / f"{self.name}-vllm.log"
        return self.engine(self.policy, model=model, log=log, note=self.note)


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
