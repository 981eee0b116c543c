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


class Holder(Protocol):
    """What each process of a group has."""

    @property
    def learner(self) -> Learner: ...


class ProcessGroup(Protocol):
    """Processes that compute together."""

    def call(self, function: Any, *arguments: Any) -> Any:
        """`function(holder, *arguments)` in all of them; the first one's result."""
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

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def began(self) -> bool:
        return bool(self.group.call(_began))

    def score(self, batch: Batch, *, old: bool, reference: bool, others: bool = True) -> Batch:
        found: Batch = self.group.call(_score, to_device(batch, "cpu"), old, reference, others)
        return to_device(found, self.device)

    def update(
        self,
        algorithm: Algorithm,
        batch: TrainBatch[Batch],
        beta: float,
        rates: tuple[float | None, float],
    ) -> Losses:
        here = to_device(batch, "cpu")
        found: Losses = self.group.call(_update, algorithm, here, beta, rates)
        return _losses_on(found, self.device)

    def cause_of(self, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float) -> Cause:
        found: Cause = self.group.call(_cause_of, algorithm, to_device(batch, "cpu"), beta)
        return found

    def bad_weight(self) -> str | None:
        found: str | None = self.group.call(_bad_weight)
        return found

    def refresh_reference(self) -> None:
        self.group.call(_refresh_reference)

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """The weights that learn, which are now those of this process's policy too."""
        own = dict(self.policy.model.named_parameters())
        for name, weight in self.group.call(_weights).items():
            own[name].copy_(weight)
        return {name: weight for name, weight in own.items() if weight.requires_grad}

    def save(self, folder: Path) -> None:
        """Each process writes its part, so `folder` is to be one that all of them see."""
        self.group.call(_save, folder.resolve())


# ---------------------------------------------------------------- in every process


def _began(holder: Holder) -> bool:
    return holder.learner.began


def _score(holder: Holder, batch: Batch, old: bool, reference: bool, others: bool) -> Batch:
    learner = holder.learner
    here = to_device(batch, learner.device)
    return to_device(learner.score(here, old=old, reference=reference, others=others), "cpu")


def _update(
    holder: Holder,
    algorithm: Algorithm,
    batch: TrainBatch[Batch],
    beta: float,
    rates: tuple[float | None, float],
) -> Losses:
    learner = holder.learner
    found = learner.update(algorithm, to_device(batch, learner.device), beta, rates)
    return _losses_on(found, "cpu")


def _cause_of(holder: Holder, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float) -> Cause:
    learner = holder.learner
    return learner.cause_of(algorithm, to_device(batch, learner.device), beta)


def _bad_weight(holder: Holder) -> str | None:
    return holder.learner.bad_weight()


def _refresh_reference(holder: Holder) -> None:
    holder.learner.refresh_reference()


def _weights(holder: Holder) -> dict[str, Tensor]:
    """Gathered from all; only the first keeps them."""
    learner = holder.learner
    first = learner.ranks.number == 0
    return {name: weight.cpu() for name, weight in wholes(learner.weights()) if first}


def _save(holder: Holder, folder: Path) -> None:
    holder.learner.save(folder)


def _losses_on(losses: Losses, device: torch.device | str) -> Losses:
    return replace(losses, tokens={n: value.to(device) for n, value in losses.tokens.items()})
