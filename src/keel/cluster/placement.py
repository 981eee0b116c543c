"""Where a stage computes: in this process, in ranks on this machine, or where Ray puts it.

Of the ranks on this machine (`cluster.processes`), rank 0 runs the loop. The models that learn are
sharded over all ranks, and each rank trains on some of the sequences. An engine that samples with
the trainer's model is in each rank, and samples some prompts, for which a rank has the policy whole
as well; another engine samples for rank 0. Rank 0's whole policy is the run's, which checkpoints
hold, so that a run resumes on any number of processes.
"""

from __future__ import annotations

import copy
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from keel.cluster import ranks as rank_processes
from keel.cluster.parts import GroupLearner, Member, PlacedStage, StageFactory, StageParts
from keel.cluster.ranks import RankGroup
from keel.config.model import Cluster
from keel.learn.memory import TokenBudget, keeping_threads
from keel.learn.ranks import ONE, Ranks, prompt_units
from keel.models.policy import Policy
from keel.models.sharded import wholes
from keel.rewards.registry import RewardContext
from keel.types import Capabilities, Engine, Group, OnGroup, Prompt, Sampling


class Placement(Protocol):
    """Where a stage computes."""

    def offers(self, engine: Capabilities) -> Capabilities:
        """What all processes can do together, each with an engine of these capabilities."""
        ...

    def place(self, parts: StageParts) -> AbstractContextManager[PlacedStage]:
        """Make the parts of a stage, for as long as the block runs. Raises KeelError if a process
        fails to start, ProcessLost if one that cannot be replaced ends."""
        ...


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """In this process."""

    def offers(self, engine: Capabilities) -> Capabilities:
        return engine

    @contextmanager
    def place(self, parts: StageParts) -> Iterator[PlacedStage]:
        engine = parts.own_engine()
        yield PlacedStage(parts.factory.learner(parts.policy, parts.budget, ONE), engine)


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """In ranks on this machine, torchrun's or our own, which sample and train in turn. An engine
    that is not `in_process` samples for rank 0 alone."""

    cluster: Cluster
    threads: int | None = None

    def offers(self, engine: Capabilities) -> Capabilities:
        return replace(engine, pins=False, concurrent=False) if engine.in_process else engine

    @contextmanager
    def place(self, parts: StageParts) -> Iterator[PlacedStage]:
        each = self.threads or max(torch.get_num_threads() // self.cluster.processes, 1)
        policy, samples = parts.policy, parts.engine_kind.in_process
        own = replace(parts.factory, rewards={}, reward_context=RewardContext())
        with keeping_threads(each):
            alone = None if samples else parts.own_engine()
            with rank_processes.start(
                self.cluster.processes,
                partial(_member, own, samples, policy),
                partial(_member, own, samples, None),
                each,
                policy.device.type,
                self.cluster.deadline,
            ) as group:
                learner = group.member.learner
                kinds = (learner.has_reference, learner.learns_values)
                shared = SharedEngine(group, self.offers(parts.engine_kind))
                engine = shared if alone is None else alone
                yield PlacedStage(SharedLearner(group, policy, parts.budget, *kinds), engine)


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """Where Ray puts it: trainers, workers that sample, and workers for rewards."""

    cluster: Cluster
    address: str

    def offers(self, engine: Capabilities) -> Capabilities:
        return replace(engine, streams=True, pins=True, concurrent=True)

    @contextmanager
    def place(self, parts: StageParts) -> Iterator[PlacedStage]:
        before_import(self.address)
        # Ray is optional, and takes a second to import.
        from keel.cluster.ray_stage import ray_stage

        context = parts.policy.context
        offered = self.offers(replace(parts.engine_kind, context=context))
        with ray_stage(parts, self.cluster, self.address, offered) as placed:
            yield placed


def placement_of(cluster: Cluster, threads: int | None = None) -> Placement:
    """Where a recipe's stages of kind rl compute; `threads` is the recipe's number for each."""
    if cluster.ray is not None:
        return RayPlacement(cluster, cluster.ray)
    return LocalPlacement() if cluster.processes == 1 else RankPlacement(cluster, threads)


def before_import(address: str) -> None:
    """Call it before Ray is imported, with the address of `cluster.ray`.

    A Ray on this machine listens on all its interfaces, so it gets a token of its own, without
    which no call is answered, unless the program that calls Keel has imported Ray already.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # they do the work, and yield to nothing
    if address == "local" and "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


# ---------------------------------------------------------------- ranks on this machine


@dataclass(frozen=True, eq=False)
class SharedLearner(GroupLearner):
    """A learner whose work all ranks do; its policy is rank 0's, copied to ranks that sample."""

    def weights(self) -> dict[str, Tensor]:
        """The whole policy's weights, which are now those of the learner on every rank."""
        found: dict[str, Tensor] = self.group.call(_take_over)
        return found


class SharedEngine(Engine):
    """Samples some of the prompts on each rank; see `keel.types.Engine`.

    Groups that this rank samples are handed over as they are done, the others at the end.
    """

    def __init__(self, group: RankGroup[Member], capabilities: Capabilities) -> None:
        self.group, self.capabilities = group, capabilities

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        bare = [replace(prompt, columns={}) for prompt in prompts]  # rewards are called on rank 0
        handed: set[int] = set()

        def hand(place: int, group: Group) -> None:
            handed.add(place)
            if on_group is not None:
                on_group(place, Group(prompts[place], group.completions))

        found: list[Group] = self.group.call(_sample, bare, n, sampling, seed, on_group=hand)
        for place, group in enumerate(found):
            if place not in handed:
                hand(place, group)
        return [Group(p, g.completions) for p, g in zip(prompts, found, strict=True)]

    def sync(self, weights: Mapping[str, Any]) -> None:
        """Nothing: `SharedLearner.weights` has brought them to every rank."""


# ---------------------------------------------------------------- on every rank


def _member(factory: StageFactory, samples: bool, policy: Policy | None, ranks: Ranks) -> Member:
    """`policy` is the run's, on rank 0."""
    policy = policy or factory.load()
    for tensor in policy.state_dict().values():
        dist.broadcast(tensor.detach(), 0)  # the weights that the stage before has left
    whole = policy if samples or ranks.number == 0 else None
    own = policy if whole is None else copy.deepcopy(policy)
    learner = factory.learner(own, TokenBudget(factory.tokens), ranks)
    engine = factory.engine(policy, model=policy.model) if samples else None
    return Member(learner, whole, engine)


@torch.no_grad()
def _take_over(member: Member) -> dict[str, Tensor]:
    own = {} if member.policy is None else dict(member.policy.model.named_parameters())
    for name, weight in wholes(member.learner.weights()):
        if own:
            own[name].copy_(weight)
    return {name: weight for name, weight in own.items() if weight.requires_grad}


def _sample(
    member: Member,
    prompts: list[Prompt],
    n: int,
    sampling: Sampling,
    seed: int,
    *,
    on_group: OnGroup | None = None,
) -> list[Group]:
    ranks = member.learner.ranks
    places = prompt_units(prompts, sampling.max_tokens, ranks.count)[ranks.number]

    def hand(at: int, group: Group) -> None:
        if on_group is not None:
            on_group(places[at], group)

    assert member.engine is not None
    own = [prompts[at] for at in places]
    groups = member.engine.sample(own, n, sampling, seed, on_group=hand)
    found = dict(
        pair for part in ranks.gather(list(zip(places, groups, strict=True))) for pair in part
    )
    return [found[at] for at in range(len(prompts))]
