"""How a stage's parts are made, the placed parts, and a learner whose models are in several
processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.algorithms.spec import Algorithm
from keel.config.sources import RewardSource
from keel.learn.batch import Batch, TrainBatch, to_device
from keel.learn.learner import Learner, Losses, Trainer
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import Cause
from keel.learn.ranks import Ranks
from keel.models.policy import Policy, frozen_copy
from keel.models.sharded import wholes
from keel.rewards.registry import NamedReward, RewardContext
from keel.types import Capabilities, Engine

BuildLearner = Callable[[Policy, TokenBudget, Ranks], Learner]
"""Makes the learner of a stage, new or from a checkpoint; of several ranks this one's part."""


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


@dataclass(frozen=True, eq=False)
class Member:
    """What a process of a group has: the learner, of sharded models; an engine if it is to sample,
    and the policy whole if it samples or runs the loop."""

    learner: Learner
    policy: Policy | None = None
    engine: Engine | None = None


class ProcessGroup(Protocol):
    """Processes that compute together."""

    def call(self, function: Any, *arguments: Any) -> Any:
        """`function(member, *arguments)` in all of them; the first one's result."""
        ...


@dataclass(frozen=True, eq=False)
class GroupLearner:
    """See `keel.learn.learner.Trainer`.

    `policy` is this process's, whole, with the weights of the last `weights()`, for evaluations,
    checkpoints and exports.
    """

    group: ProcessGroup
    policy: Policy
    budget: TokenBudget
    has_reference: bool
    learns_values: bool

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """A method or property of every process's learner, at once; the first one's result."""
        sent = [_on(one, "cpu") for one in arguments]
        return _on(self.group.call(_call, name, sent, keywords), self.device)

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def began(self) -> bool:
        return bool(self.call("began"))

    def score(self, batch: Batch, **asked: bool) -> Batch:
        found: Batch = self.call("score", batch, **asked)
        return found

    def update(
        self,
        algorithm: Algorithm,
        batch: TrainBatch[Batch],
        beta: float,
        rates: tuple[float | None, float],
        *,
        moved: bool = True,
    ) -> Losses:
        found: Losses = self.call("update", algorithm, batch, beta, rates, moved=moved)
        return found

    def cause_of(self, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float) -> Cause:
        found: Cause = self.call("cause_of", algorithm, batch, beta)
        return found

    def bad_weight(self) -> str | None:
        found: str | None = self.call("bad_weight")
        return found

    def refresh_reference(self, rate: float = 1.0) -> None:
        self.call("refresh_reference", rate)

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """The weights that learn, which are now those of this process's policy too."""
        own = dict(self.policy.model.named_parameters())
        for name, weight in self.group.call(_weights).items():
            own[name].copy_(weight)
        return {name: weight for name, weight in own.items() if weight.requires_grad}

    def save(self, folder: Path) -> None:
        """Each process writes its part, so `folder` is to be one that all of them see."""
        self.call("save", folder.resolve())


def _call(member: Member, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    learner = member.learner
    found = getattr(learner, name)
    if callable(found):
        found = found(*[_on(one, learner.device) for one in arguments], **keywords)
    return _on(found, "cpu")


def _weights(member: Member) -> dict[str, Tensor]:
    """Gathered from all; only the first keeps them."""
    learner = member.learner
    first = learner.ranks.number == 0
    return {name: weight.cpu() for name, weight in wholes(learner.weights()) if first}


def _on(value: Any, device: torch.device | str) -> Any:
    """A batch or losses on another device; anything else as it is."""
    if isinstance(value, Batch | TrainBatch):
        return to_device(value, device)
    if isinstance(value, Losses):
        return replace(value, tokens={n: tensor.to(device) for n, tensor in value.tokens.items()})
    return value
