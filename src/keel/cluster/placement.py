"""Where a stage computes: in this process, in ranks on this machine, or where Ray puts it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from keel.cluster.parts import PlacedStage, StageParts
from keel.cluster.rank_stage import rank_stage
from keel.config.model import Cluster
from keel.learn.ranks import ONE
from keel.types import Capabilities


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
        before = torch.get_num_threads()
        each = self.threads or max(before // self.cluster.processes, 1)
        torch.set_num_threads(each)
        try:
            offered = self.offers(parts.engine_kind)
            with rank_stage(parts, self.cluster, each, offered) as placed:
                yield placed
        finally:
            torch.set_num_threads(before)


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
