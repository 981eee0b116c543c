"""A stage's trainers, rollout workers and reward workers as processes of Ray (`cluster.ray`).

The loop is `rl.py`'s and runs in this process, with the records and checkpoints; what computes is
elsewhere. Trainers compute each update together, as `cluster.processes` on one machine do. Each
rollout worker samples some of the prompts with the whole model; completions depend on the weights,
the prompts and the seed, so that it does not matter which worker does it, or does it again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keel.algorithms.spec import Algorithm
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
from keel.cluster.worker import join
from keel.config.entry import PYTHON
from keel.config.load import to_toml
from keel.config.schema import Recipe, RLStage
from keel.config.sources import RewardSource
from keel.engines.registry import build_engine
from keel.learn.batch import Batch, TrainBatch
from keel.learn.finite import Cause
from keel.learn.learner import Learner, Losses, Saved
from keel.learn.ranks import Ranks, spans
from keel.learn.token_budget import TokenBudget
from keel.models.policy import Policy, load_policy
from keel.models.sharded import wholes
from keel.rewards.batch import Log, Metrics
from keel.rewards.registry import TASK, NamedReward, RewardContext, load_reward
from keel.training.setup import build_learner
from keel.training.shared import GatheredTensors
from keel.types import (
    Engine,
    Group,
    KeelError,
    OnGroup,
    Prompt,
    Sampling,
    VersionedEngine,
)

HERE = ("judge", TASK)
"""Rewards that stay in the process that runs the loop, with their cache and accounts, and the
tasks."""
SHARES = 2
"""Units of work for each rollout worker in a call: a fast one takes over some of a slow one's."""


@dataclass(frozen=True, eq=False)
class RemoteLearner:
    """A learner whose models are in the trainers; see `keel.learn.learner.Trainer`.

    `policy` is this process's, with the weights of the last `weights()`, for evaluations,
    checkpoints and exports.
    """

    group: RayGroup
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
        found: Batch = self.group.call(_score, batch, old, reference, others)
        return found

    def update(
        self,
        algorithm: Algorithm,
        batch: TrainBatch[Batch],
        beta: float,
        rates: tuple[float | None, float],
    ) -> Losses:
        found: Losses = self.group.call(_update, algorithm, batch, beta, rates)
        return found

    def cause_of(self, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float) -> Cause:
        found: Cause = self.group.call(_cause_of, algorithm, batch, beta)
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

    def saved(self) -> Saved:
        optimizers, modules, reference = self.group.call(_saved)
        return Saved(
            self.policy,
            {name: GatheredTensors(tensors) for name, tensors in optimizers.items()},
            {name: GatheredTensors(tensors) for name, tensors in modules.items()},
            None if reference is None else GatheredTensors(reference),
        )


@dataclass(frozen=True, eq=False)
class PinnedEngine:
    """Samples on the rollout workers with the weights of one version."""

    pool: RayPool
    version: int
    weights: SentTensors

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int
    ) -> list[Group]:
        return self.stream(prompts, n, sampling, seed, lambda place, group: None)

    def stream(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int, on_group: OnGroup
    ) -> list[Group]:
        """All occurrences of a prompt in one unit, since random numbers depend on their order."""
        costs: Counter[str] = Counter()
        for prompt in prompts:
            costs[prompt.id] += len(prompt.tokens) + sampling.max_tokens
        ids = list(costs)
        count = min(SHARES * self.pool.count, len(ids))
        units = []
        for share in spans(list(costs.values()), count) if ids else []:
            own = {ids[at] for at in share}
            places = [at for at, prompt in enumerate(prompts) if prompt.id in own]
            units += [places] if places else []
        futures = [
            self.pool.submit(
                _sample, self.version, [self.weights], [prompts[at] for at in u], n, sampling, seed
            )
            for u in units
        ]
        found: dict[int, Group] = {}
        for unit, groups in self.pool.wait(futures):
            for place, group in zip(units[unit], groups, strict=True):
                # With the prompt of this process, whose columns rewards compare by identity.
                found[place] = Group(prompts[place], group.completions)
                on_group(place, found[place])
        return [found[at] for at in range(len(prompts))]

    def sync(self, weights: Mapping[str, Any]) -> None:
        raise KeelError("an engine with pinned weights takes none over")


@dataclass(eq=False)
class RemoteEngine:
    """Samples on the rollout workers with the weights of the last sync."""

    pool: RayPool
    weights: SentTensors
    weight_version: int
    notes: Callable[[], None]

    def pinned(self) -> PinnedEngine:
        """With the weights of now, also after a later sync."""
        return PinnedEngine(self.pool, self.weight_version, self.weights)

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int
    ) -> list[Group]:
        return self.pinned().sample(prompts, n, sampling, seed)

    def stream(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int, on_group: OnGroup
    ) -> list[Group]:
        return self.pinned().stream(prompts, n, sampling, seed, on_group)

    def sync(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = SentTensors.of(weights)
        self.weight_version += 1
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
        self, *, log_extra: Any = None, log_metric: Metrics | None = None, **arguments: Any
    ) -> Any:
        wanted = [n for n, to in (("log_extra", log_extra), ("log_metric", log_metric)) if to]
        call = self.pool.submit(_RewardWorker.call, self.place, arguments, wanted)
        value, extras, metric = await asyncio.wrap_future(call)
        if log_extra is not None:
            for name, values in extras.items():
                log_extra(name, values)
        if log_metric is not None:
            for name, numbers in metric.numbers.items():
                log_metric.numbers.setdefault(name, []).extend(numbers)
            log_metric.found += metric.found
            log_metric.summary = metric.summary or log_metric.summary
        return value

    def close(self) -> None:
        self.pool.submit(_RewardWorker.close, self.place).result()


@dataclass(frozen=True, eq=False)
class RemoteStage:
    """The processes of a stage; `rewards` are those that run in reward workers, by their place in
    the recipe."""

    learner: RemoteLearner
    engine: RemoteEngine
    rewards: Mapping[int, RemoteReward]


@contextmanager
def remote_stage(
    recipe: Recipe,
    stage: RLStage,
    policy: Policy,
    seed: int,
    budget: TokenBudget,
    resume_from: Path | None,
    step: int,
    around: RewardContext,
    note: Callable[[str], None],
) -> Iterator[RemoteStage]:
    """The processes of a stage that has taken `step` steps, while the block runs.

    Raises KeelError where one fails to start, ProcessLost where a trainer ends.
    """
    cluster = recipe.cluster
    assert cluster.ray is not None
    _check_entries(recipe)
    processes = cluster.processes + cluster.rollout_workers + cluster.reward_workers
    threads = max(int(cluster.cpus), 1)
    compute = Resources(cluster.cpus, cluster.gpus)
    start = partial(started, threads=threads)
    notes: list[str] = []  # of other threads

    def tell() -> None:
        while notes:
            note(notes.pop(0))

    with ExitStack() as stack:
        stack.enter_context(connected(cluster.ray, processes * cluster.cpus))
        whole = SentTensors.of(policy.state_dict())
        trainers: list[RayProcess] = []
        stack.callback(ended, trainers)
        for number in range(cluster.processes):
            trainers.append(start(f"trainer {number}", resources=compute))
        group = RayGroup(trainers, cluster.deadline)
        pool = RayPool(
            [f"rollout worker {number}" for number in range(cluster.rollout_workers)],
            (_rollout_worker, (recipe, stage, [whole])),
            partial(start, resources=compute),
            cluster.deadline,
            notes.append,
        )
        stack.callback(pool.close)
        rewards: dict[int, RemoteReward] = {}
        held = Resources(cluster.cpus, cluster.reward_gpus)
        around = replace(around, device="cuda" if cluster.reward_gpus else "cpu")
        for number in range(cluster.reward_workers):
            own = {
                place: source
                for place, source in enumerate(stage.rewards.functions)
                if source.function not in HERE and place % cluster.reward_workers == number
            }
            if own:
                one = RayPool(
                    [f"reward worker {number}"],
                    (_RewardWorker, (own, around)),
                    partial(start, resources=held),
                    cluster.deadline,
                    notes.append,
                )
                stack.callback(one.close)
                rewards |= {place: RemoteReward(one, place) for place in own}
        meeting = f"tcp://{group.meet()}"
        parts = (recipe, stage, seed, budget.tokens, resume_from, [whole])
        ranks = [Ranks(number, cluster.processes) for number in range(cluster.processes)]
        group.build(_trainer, [(*parts, own, meeting) for own in ranks])
        reference, values = group.call(_describe)
        learner = RemoteLearner(group, policy, budget, reference, values)
        learned = {n: w for n, w in policy.model.named_parameters() if w.requires_grad}
        yield RemoteStage(learner, RemoteEngine(pool, SentTensors.of(learned), step, tell), rewards)
        tell()


def _check_entries(recipe: Recipe) -> None:
    if f'"{PYTHON}:' in to_toml(recipe):
        raise KeelError(
            "cluster.ray: other processes cannot call functions that were passed to keel.train: "
            "name them by module:function"
        )


# ---------------------------------------------------------------- in the processes


@dataclass(frozen=True, eq=False)
class _RolloutWorker:
    """An engine, and the version of its weights."""

    engine: Engine
    version: list[int]


class _RewardWorker:
    """Some of a stage's rewards."""

    def __init__(self, sources: Mapping[int, RewardSource], around: RewardContext) -> None:
        self._rewards = {place: load_reward(source, around) for place, source in sources.items()}
        self._loop = asyncio.new_event_loop()  # what a function keeps between calls belongs to it

    def named(self, place: int) -> NamedReward:
        return replace(self._rewards[place], function=None)

    def call(
        self, place: int, arguments: dict[str, Any], wanted: list[str]
    ) -> tuple[Any, dict[str, list[Any]], Metrics]:
        log = Log()
        logs = {"log_extra": log.extra, "log_metric": log.metric}
        reward = self._rewards[place]
        assert reward.function is not None
        value = reward.function(**arguments, **{name: logs[name] for name in wanted})
        if reward.is_async:
            value = self._loop.run_until_complete(value)
        return value, log.extras, log.metric

    def close(self, place: int) -> None:
        close = getattr(self._rewards[place].function, "close", None)
        if close is not None:
            close()


def _load(recipe: Recipe, whole: list[SentTensors]) -> Policy:
    policy = load_policy(recipe.model, recipe.seed)
    policy.load_state_dict(whole[0].get())
    return policy


def _trainer(
    recipe: Recipe,
    stage: RLStage,
    seed: int,
    tokens: int,
    resume_from: Path | None,
    whole: list[SentTensors],
    ranks: Ranks,
    meeting: str,
) -> Learner:
    if ranks.count > 1:
        join(ranks, meeting)
    budget = TokenBudget(tokens)
    return build_learner(
        stage, recipe.model, _load(recipe, whole), seed, budget, resume_from, ranks
    )


def _rollout_worker(recipe: Recipe, stage: RLStage, whole: list[SentTensors]) -> _RolloutWorker:
    policy = _load(recipe, whole)
    engine = build_engine(
        stage.rollout.engine,
        model=policy.model,
        tokenizer=policy.tokenizer,
        max_rows=stage.rollout.max_rows,
        autocast=policy.autocast,
        dtype=stage.rollout.dtype,
        server=stage.rollout.vllm,
        timeout=stage.rollout.timeout,
    )
    return _RolloutWorker(engine, [-1])


def _sample(
    worker: _RolloutWorker,
    version: int,
    weights: list[SentTensors],
    prompts: list[Prompt],
    n: int,
    sampling: Sampling,
    seed: int,
) -> list[Group]:
    if worker.version[0] != version:
        worker.engine.sync(weights[0].get())
        worker.version[0] = version
        if isinstance(worker.engine, VersionedEngine):
            worker.engine.weight_version = version
    groups = worker.engine.sample(prompts, n, sampling, seed)
    return [
        Group(group.prompt, tuple(replace(c, weight_version=version) for c in group.completions))
        for group in groups
    ]


def _describe(learner: Learner) -> tuple[bool, bool]:
    return learner.has_reference, learner.learns_values


def _began(learner: Learner) -> bool:
    return learner.began


def _score(learner: Learner, batch: Batch, old: bool, reference: bool, others: bool) -> Batch:
    here = moved(batch, learner.device)
    made: Batch = moved(learner.score(here, old=old, reference=reference, others=others), "cpu")
    return made


def _update(
    learner: Learner,
    algorithm: Algorithm,
    batch: TrainBatch[Batch],
    beta: float,
    rates: tuple[float | None, float],
) -> Losses:
    here = moved(batch, learner.device)
    made: Losses = moved(learner.update(algorithm, here, beta, rates), "cpu")
    return made


def _cause_of(
    learner: Learner, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float
) -> Cause:
    return learner.cause_of(algorithm, moved(batch, learner.device), beta)


def _bad_weight(learner: Learner) -> str | None:
    return learner.bad_weight()


def _refresh_reference(learner: Learner) -> None:
    learner.refresh_reference()


def _weights(learner: Learner) -> dict[str, Tensor]:
    return _whole(learner, learner.weights())


def _saved(learner: Learner) -> tuple[Any, Any, Any]:
    return (
        {name: _whole(learner, one.state()) for name, one in learner.optimizers.items()},
        {name: _whole(learner, one.state_dict()) for name, one in learner.modules.items()},
        None if learner.reference is None else _whole(learner, learner.reference.state()),
    )


def _whole(learner: Learner, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gathered from all trainers; only the first keeps them."""
    first = learner.ranks.number == 0
    return {name: tensor.cpu() for name, tensor in wholes(tensors) if first}


def moved(value: Any, device: torch.device | str) -> Any:
    """Tensors in dataclasses and mappings, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            f.name: moved(getattr(value, f.name), device)
            for f in dataclasses.fields(value)
            if f.init
        }
        same = all(one is getattr(value, name) for name, one in changed.items())
        return value if same else replace(value, **changed)
    if isinstance(value, dict):
        return {name: moved(one, device) for name, one in value.items()}
    return value
