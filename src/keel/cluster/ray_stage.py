"""A stage's trainers, rollout workers and reward workers as processes of Ray (`cluster.ray`).

The loop is `rl.py`'s and runs in this process, with the records and checkpoints; what computes is
elsewhere. Trainers compute each update together, as `cluster.processes` on one machine do. Each
rollout worker samples some of the prompts with the whole model; completions depend on the weights,
the prompts and the seed, so that it does not matter which worker does it, or does it again.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from keel.cluster.parts import GroupLearner, Member, PlacedStage, StageFactory, StageParts
from keel.cluster.ranks import join
from keel.cluster.ray_workers import (
    RayGroup,
    RayPool,
    RayProcess,
    Resources,
    SentTensors,
    connected,
    ended,
    started,
)
from keel.config.model import Cluster
from keel.config.sources import RewardSource
from keel.learn.memory import TokenBudget
from keel.learn.ranks import Ranks, prompt_units
from keel.models.policy import Policy
from keel.platform.calls import POLL, restart_time_limit
from keel.rewards.outputs import Log
from keel.rewards.registry import TASK, NamedReward, load_reward
from keel.types import Capabilities, Engine, Group, OnGroup, Prompt, Sampling

LOCAL = ("judge", TASK)
"""Rewards that stay in the process that runs the loop, with their cache and accounts, and the
tasks."""
SHARES = 2
"""Units of work for each rollout worker in a call: a fast one takes over some of a slow one's."""


class RemoteEngine(Engine):
    """Samples on the rollout workers with the weights of the last sync; if it is `pinned`, with
    those of now."""

    def __init__(
        self,
        pool: RayPool,
        weights: SentTensors,
        capabilities: Capabilities,
        notes: Callable[[], None],
    ) -> None:
        self.pool, self.weights, self.notes = pool, weights, notes
        self.capabilities = capabilities
        self._syncs = 0

    def pinned(self) -> RemoteEngine:
        return copy.copy(self)

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        units = prompt_units(prompts, sampling.max_tokens, SHARES * self.pool.count)
        units = [unit for unit in units if unit]
        sent = [replace(prompt, columns={}) for prompt in prompts]  # rewards are called elsewhere
        call = (_sample, self._syncs, [self.weights])
        futures = [
            self.pool.submit(*call, [sent[at] for at in unit], n, sampling, seed) for unit in units
        ]
        found: dict[int, Group] = {}
        for unit, (groups, notes) in self.pool.wait(futures):
            for line in notes:
                self.pool.note(line)
            for place, group in zip(units[unit], groups, strict=True):
                # With the prompt of this process, whose columns rewards compare by identity.
                found[place] = Group(prompts[place], group.completions)
                if on_group is not None:
                    on_group(place, found[place])
        return [found[at] for at in range(len(prompts))]

    def sync(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = SentTensors.of(weights)
        self._syncs += 1
        self.notes()


@dataclass(frozen=True, eq=False)
class RemoteReward:
    """A reward function that runs in a reward worker, which several may share."""

    pool: RayPool
    place: int

    def named(self) -> NamedReward:
        """The reward as the worker has loaded it, to be called from here."""
        found: NamedReward = self.pool.submit(_RewardWorker.named, self.place).result()
        return replace(found, function=self, is_async=True)

    async def __call__(
        self,
        *,
        log_extra: Any = None,
        log_metric: Any = None,
        log_summary: Any = None,
        **arguments: Any,
    ) -> Any:
        to = {"log_extra": log_extra, "log_metric": log_metric, "log_summary": log_summary}
        wanted = [name for name, given in to.items() if given is not None]
        call = self.pool.submit(_RewardWorker.call, self.place, arguments, wanted)
        result = asyncio.wrap_future(call)
        begun = False
        try:
            while not result.done():  # it has its time from when the worker begins
                if not (begun and call.begun):
                    restart_time_limit()
                begun = call.begun
                await asyncio.wait((result,), timeout=POLL)
        finally:
            call.cancel()  # if it has not ended: the pool then replaces the worker
        value, log = await result
        for name, values in log.extras.items():
            log_extra(name, values)
        for name, numbers in log.numbers.items():
            for number in numbers:
                log_metric(name, number)
        if log.summary is not None:
            log_summary(log.found, log.summary)
        return value

    def close(self) -> None:
        self.pool.submit(_RewardWorker.close, self.place).result()


@contextmanager
def ray_stage(
    parts: StageParts, cluster: Cluster, address: str, offered: Capabilities
) -> Iterator[PlacedStage]:
    """The parts of a stage in processes of Ray; see `RayPlacement`."""
    policy, factory = parts.policy, parts.factory
    processes = cluster.processes + cluster.rollout_workers + cluster.reward_workers
    compute = Resources(cluster.cpus, cluster.gpus)
    start = partial(started, threads=max(int(cluster.cpus), 1))
    notes: list[str] = []  # of other threads

    def report() -> None:
        while notes:
            parts.note(notes.pop(0))

    with ExitStack() as stack:
        stack.callback(report)
        stack.enter_context(connected(address, processes * cluster.cpus))
        whole = [SentTensors.of(policy.state_dict())]
        trainers: list[RayProcess] = []
        stack.callback(ended, trainers)
        for number in range(cluster.processes):
            trainers.append(start(f"trainer {number}", resources=compute))
        group = RayGroup(trainers, cluster.deadline)
        pool = RayPool(
            [f"rollout worker {number}" for number in range(cluster.rollout_workers)],
            (_rollout_worker, (factory, whole, factory.log.resolve())),
            partial(start, resources=compute),
            cluster.deadline,
            notes.append,
        )
        stack.callback(pool.close)
        rewards: dict[int, RemoteReward] = {}
        held = Resources(cluster.cpus, cluster.reward_gpus)
        device = "cuda" if cluster.reward_gpus else "cpu"
        elsewhere = {p: one for p, one in factory.rewards.items() if one.function not in LOCAL}
        for number in range(cluster.reward_workers):
            own = {p: one for p, one in elsewhere.items() if p % cluster.reward_workers == number}
            if own:
                one = RayPool(
                    [f"reward worker {number}"],
                    (_RewardWorker, (factory, own, device)),
                    partial(start, resources=held),
                    cluster.deadline,
                    notes.append,
                )
                stack.callback(one.close)
                rewards |= {place: RemoteReward(one, place) for place in own}
        group.meet()
        with TemporaryDirectory(prefix="keel-ranks-") as folder:
            local = address == "local"
            meeting = f"file://{folder}/rendezvous" if local else f"tcp://{group.address()}"
            build = (factory, whole, meeting, cluster.deadline, local)
            ranks = [Ranks(number, cluster.processes) for number in range(cluster.processes)]
            group.build(_trainer, [(*build, own_rank) for own_rank in ranks])
        reference, values = group.call(_describe)
        learner = GroupLearner(group, policy, parts.budget, reference, values)
        learned = {n: w for n, w in policy.model.named_parameters() if w.requires_grad}
        engine = RemoteEngine(pool, SentTensors.of(learned), offered, report)
        yield PlacedStage(learner, engine, rewards)


# ---------------------------------------------------------------- in the processes


@dataclass(frozen=True, eq=False)
class _RolloutWorker:
    """An engine, the version of its weights, and its notes for the process that runs the loop."""

    engine: Engine
    version: list[int]
    notes: list[str]


class _RewardWorker:
    """Some of a stage's rewards."""

    def __init__(
        self,
        factory: StageFactory,
        sources: Mapping[int, RewardSource],
        device: str,
    ) -> None:
        around = replace(factory.reward_context, device=device)
        self._rewards = {place: load_reward(source, around) for place, source in sources.items()}
        self._time = factory.reward_time
        self._loop = asyncio.new_event_loop()  # what a function keeps between calls belongs to it

    def named(self, place: int) -> NamedReward:
        return replace(self._rewards[place], function=None)

    def call(self, place: int, arguments: dict[str, Any], wanted: list[str]) -> tuple[Any, Log]:
        log = Log()
        logs = {
            "log_extra": log.extra,
            "log_metric": log.metric,
            "log_summary": log.summarise,
        }
        reward = self._rewards[place]
        assert reward.function is not None
        with self._time():
            value = reward.function(**arguments, **{name: logs[name] for name in wanted})
            if reward.is_async:
                value = self._loop.run_until_complete(value)
        return value, log

    def close(self, place: int) -> None:
        close = getattr(self._rewards[place].function, "close", None)
        if close is not None:
            close()


def _policy(factory: StageFactory, whole: list[SentTensors]) -> Policy:
    policy = factory.load()
    policy.load_state_dict(whole[0].get())
    return policy


def _trainer(
    factory: StageFactory,
    whole: list[SentTensors],
    meeting: str,
    deadline: float,
    local: bool,
    ranks: Ranks,
) -> Member:
    policy = _policy(factory, whole)
    if ranks.count > 1:
        join(ranks, meeting, policy.device.type, deadline, loopback=local)
    return Member(factory.learner(policy, TokenBudget(factory.tokens), ranks))


def _rollout_worker(factory: StageFactory, whole: list[SentTensors], log: Path) -> _RolloutWorker:
    policy = _policy(factory, whole)
    notes: list[str] = []
    log = log.with_name(f"{log.stem}-{os.getpid()}.log")
    engine = factory.engine(policy, model=policy.model, log=log, note=notes.append)
    return _RolloutWorker(engine, [-1], notes)


def _sample(
    worker: _RolloutWorker,
    version: int,
    weights: list[SentTensors],
    prompts: list[Prompt],
    n: int,
    sampling: Sampling,
    seed: int,
) -> tuple[list[Group], list[str]]:
    """The groups, and what the engine has to report since the call before."""
    if worker.version[0] != version:
        worker.engine.sync(weights[0].get())
        worker.version[0] = version
    groups = worker.engine.sample(prompts, n, sampling, seed)
    notes = worker.notes.copy()
    worker.notes.clear()
    return groups, notes


def _describe(trainer: Member) -> tuple[bool, bool]:
    return trainer.learner.has_reference, trainer.learner.learns_values
