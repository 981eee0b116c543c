"""A stage's learner whose models are in several processes, which compute each call together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from keel.algorithms.spec import Algorithm
from keel.learn.batch import Batch, TrainBatch, to_device
from keel.learn.finite import Cause
from keel.learn.learner import Learner, Losses
from keel.learn.token_budget import TokenBudget
from keel.models.policy import Policy
from keel.models.sharded import wholes
from keel.types import Engine


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

    def score(self, batch: Batch, *, old: bool, reference: bool, others: bool = True) -> Batch:
        found: Batch = self.call("score", batch, old=old, reference=reference, others=others)
        return found

    def update(
        self,
        algorithm: Algorithm,
        batch: TrainBatch[Batch],
        beta: float,
        rates: tuple[float | None, float],
    ) -> Losses:
        found: Losses = self.call("update", algorithm, batch, beta, rates)
        return found

    def cause_of(self, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float) -> Cause:
        found: Cause = self.call("cause_of", algorithm, batch, beta)
        return found

    def bad_weight(self) -> str | None:
        found: str | None = self.call("bad_weight")
        return found

    def refresh_reference(self) -> None:
        self.call("refresh_reference")

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
