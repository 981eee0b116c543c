"""What both families share: a learner with its state, the experience of an iteration, evaluation.

An iteration collects steps of every environment, or whole episodes.
Time steps (T), environments (E). An environment without further episodes rests until the others
finish.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn

from keel.analysis.statistics import bootstrap_interval
from keel.config.control import Environment, PolicyGradientStage, QLearningStage, ReturnEvaluation
from keel.config.fields import derive
from keel.control.environments import Environments, Episode
from keel.control.networks import Actor, TrainedNetwork
from keel.learn.batch import Actions, Estimates, per_action
from keel.learn.optimizer import WeightOptimizer, learning_rate
from keel.runs import checkpoint
from keel.types import KeelError

Stage = TypeVar("Stage", bound=QLearningStage | PolicyGradientStage)
STATE, TENSORS = "state.json", "tensors.safetensors"


class ControlLearner(ABC, Generic[Stage]):
    """What both families have: environments, trained networks with their optimizer, and a state.

    Every iteration is a function of the state and its number.
    """

    trained: TrainedNetwork
    optimizer: WeightOptimizer

    def __init__(self, stage: Stage, seed: int, group: int = 1) -> None:
        choice = stage.environment
        self.stage, self.seed = stage, seed
        self.environments = Environments(choice, choice.count, derive(seed, "train"), group)
        self.steps = 0
        """Environment steps taken."""
        self.rate_scale = 1.0
        """What callbacks have multiplied the learning rate by."""

    def train(self, modules: Mapping[str, nn.Module]) -> None:
        """Let the optimizer train these networks."""
        self.trained = TrainedNetwork(modules)
        self.optimizer = WeightOptimizer([("weights", self.trained.vector)], self.stage.optimizer)

    @abstractmethod
    def iterate(self, number: int) -> dict[str, float]:
        """Collect and update; the metrics of the iteration."""

    @abstractmethod
    def greedy(self) -> ChooseActions:
        """The best actions by the current networks."""

    @property
    def rate(self) -> float:
        """The learning rate now."""
        return self.rate_scale * learning_rate(self.stage.optimizer, self.steps, self.stage.steps)

    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors, by name."""
        return self.trained.state() | prefixed("optimizer", self.optimizer.state())

    def facts(self) -> dict[str, Any]:
        """The rest of the state."""
        return {"steps": self.steps, "rate_scale": self.rate_scale}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """The state that `tensors` and `facts` gave."""
        self.trained.restore(tensors)
        self.optimizer.restore(within("optimizer", tensors))
        self.steps, self.rate_scale = facts["steps"], facts["rate_scale"]


@dataclass(frozen=True)
class ControlProgress:
    """The position of a run, and the states of its learner and environments."""

    stage: int = 0
    step: int = 0
    """Iterations: records of metrics.jsonl."""
    steps: int = 0
    """Environment steps."""
    best: float | None = None
    best_step: int | None = None
    learner: Mapping[str, Any] = field(default_factory=dict)
    environments: Mapping[str, Any] = field(default_factory=dict)


def save(folder: Path, progress: ControlProgress, learner: ControlLearner[Any]) -> None:
    """Fill a checkpoint folder."""
    checkpoint.save_tensors(folder / TENSORS, learner.tensors())
    checkpoint.save_json(folder / STATE, asdict(progress))


def read(folder: Path) -> ControlProgress:
    """The progress that a checkpoint holds."""
    return checkpoint.load_record(folder / STATE, ControlProgress)


def learned(folder: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """A checkpoint's tensors, and the facts of its learner."""
    return checkpoint.load_tensors(folder / TENSORS), read(folder).learner


def restore(folder: Path, progress: ControlProgress, learner: ControlLearner[Any]) -> bool:
    """Restore a learner and its environments; whether the latter reached the same states."""
    try:
        learner.restore(*learned(folder))
    except (RuntimeError, KeyError, ValueError) as error:
        raise KeelError(
            f"checkpoint {folder} does not fit the recipe's networks "
            f"({str(error).strip().splitlines()[-1].strip()}): put the keys in recipe.toml back, "
            "or start a new run"
        ) from error
    return learner.environments.restore(dict(progress.environments))


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as `name/key`."""
    return {f"{name}/{key}": tensor for key, tensor in tensors.items()}


def within(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `name/key`, by key."""
    head = f"{name}/"
    return {k.removeprefix(head): v for k, v in tensors.items() if k.startswith(head)}


# ---------------------------------------------------------------- experience


@dataclass(frozen=True, eq=False)
class Experience(Actions):
    """Sequences of actions, with the observation before each."""

    observation_NO: Float[Tensor, "N O"]
    action_N: Tensor
    """Numbers (N) or vectors (N, D)."""

    def minibatch(self, indices: Sequence[int], *, steps: bool) -> Experience:
        """These sequences; with `steps`, these actions, each as one sequence."""
        if not steps:
            return self.select(indices)
        index_K = torch.tensor(list(indices))
        groups = tuple(index_K.tolist())
        return replace(self, lengths=(1,) * len(groups), groups=groups, **per_action(self, index_K))

    def split(
        self, estimates: Estimates, count: int, rng: np.random.Generator, *, steps: bool
    ) -> Iterator[tuple[Experience, Estimates]]:
        """`count` mini-batches in random order, of whole sequences or of single steps."""
        if count == 1:
            yield self, estimates
            return
        order = rng.permutation(sum(self.lengths) if steps else self.sequences)
        for chosen in filter(len, np.array_split(order, count)):
            index_K = torch.from_numpy(chosen) if steps else self.action_index(chosen.tolist())
            yield self.minibatch(chosen.tolist(), steps=steps), estimates.select(index_K)


ChooseActions = Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]]
"""Observations (E, O) -> actions."""
LONGEST = 100_000
"""Longest episode, if whole ones are collected."""
BLOCK = 128
"""Time steps of a block of noise."""


def episode_metrics(finished: Sequence[Episode]) -> dict[str, float]:
    """The number of episodes that ended, and their means if there are any."""
    out = {"episode/finished": float(len(finished))}
    if finished:
        out["episode/return"] = float(np.mean([one.total for one in finished]))
        out["episode/length"] = float(np.mean([one.length for one in finished]))
    return out


@dataclass(frozen=True, eq=False)
class Collected:
    """Actions (N) sorted by episode and time.

    `lengths` is the number of actions of each episode (S) in this iteration, `episode_S` its
    number. `last_state_SO` is the observation after the last action, and `terminated_S` whether
    the environment ended the episode there; elsewhere returns bootstrap from its value.
    """

    observation_NO: npt.NDArray[np.float32]
    action_N: npt.NDArray[Any]
    reward_N: npt.NDArray[np.float64]
    lengths: tuple[int, ...]
    episode_S: npt.NDArray[np.int64]
    last_state_SO: npt.NDArray[np.float32]
    terminated_S: npt.NDArray[np.bool_]
    finished: list[Episode]


def sampling(
    actor: Actor, normal: Callable[[Any], Any], rng: np.random.Generator, count: int
) -> ChooseActions:
    """Samples actions of the policy, with noise generated in blocks."""
    act, noise = actor.acting(), actor.noise(rng, (BLOCK, count))
    used = 0

    def choose(observation_EO: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        nonlocal noise, used
        if used == BLOCK:
            noise, used = actor.noise(rng, (BLOCK, count)), 0
        used += 1
        return act(normal(observation_EO), noise[used - 1])

    return choose


def greedy(actor: Actor, normal: Callable[[Any], Any]) -> ChooseActions:
    """Takes the most likely actions."""
    act = actor.acting()
    return lambda observation_EO: act(normal(observation_EO), None)


def collect_steps(environments: Environments, choose: ChooseActions, times: int) -> Collected:
    """`times` steps of every environment; episodes continue in the next iteration."""
    if environments.begun == 0:
        environments.begin(range(environments.count))
    tape = _Tape(environments)
    for _ in range(times):
        ended_E = tape.step(choose)
        if ended_E.any():
            environments.begin(ended_E.nonzero()[0])
    return tape.collected()


def collect_episodes(environments: Environments, choose: ChooseActions, episodes: int) -> Collected:
    """`episodes` whole episodes, started in order as environments become free."""
    tape = _Tape(environments)

    def step() -> npt.NDArray[np.bool_]:
        if environments.length_E.max() > LONGEST:
            raise KeelError(
                f"an episode has more than {LONGEST} steps, and the advantage needs whole ones: "
                "limit them with environment.options={max_episode_steps=1000}"
            )
        return tape.step(choose)

    run_episodes(environments, step, episodes)
    return tape.collected()


def run_episodes(
    environments: Environments, step: Callable[[], npt.NDArray[np.bool_]], episodes: int
) -> None:
    """Step until `episodes` have ended, which `step` tells of each environment."""
    last = environments.begun + episodes
    environments.replace(np.arange(environments.count), last)
    while (environments.episode_E >= 0).any():
        ended = step().nonzero()[0]
        if len(ended):
            environments.replace(ended, last)


class _Tape:
    """The steps of all environments, in order of time."""

    def __init__(self, environments: Environments) -> None:
        self.environments = environments
        self.steps: list[tuple[npt.NDArray[Any], ...]] = []
        self.after: dict[int, npt.NDArray[np.float32]] = {}
        self.terminated: set[int] = set()
        self.finished: list[Episode] = []

    def step(self, choose: ChooseActions) -> npt.NDArray[np.bool_]:
        """Step every environment; True if its episode ended."""
        environments = self.environments
        observation_EO, episode_E = (
            environments.observation_EO.copy(),
            environments.episode_E.copy(),
        )
        action_E = choose(environments.observation_EO)
        moves = environments.step(action_E)
        self.steps.append((observation_EO, action_E, moves.reward_E.copy(), episode_E))
        ended_E = moves.ended_E & (episode_E >= 0)
        for slot in ended_E.nonzero()[0].tolist():
            episode = environments.episode(slot)
            self.finished.append(episode)
            self.after[episode.number] = moves.observation_EO[slot].copy()
            if moves.terminated_E[slot]:
                self.terminated.add(episode.number)
        return np.asarray(ended_E)

    def collected(self) -> Collected:
        """All steps, flat."""
        observation_MO, action_M, reward_M, episode_M = (
            np.concatenate(parts) for parts in zip(*self.steps, strict=True)
        )
        order = np.argsort(episode_M, kind="stable")
        order = order[int((episode_M < 0).sum()) :]
        episode_S, lengths_S = np.unique(episode_M[order], return_counts=True)
        environments = self.environments
        under_way = zip(environments.episode_E.tolist(), environments.observation_EO, strict=True)
        after = {**dict(under_way), **self.after}
        last_state_SO = np.array([after[n] for n in episode_S.tolist()], dtype=np.float32)
        return Collected(
            observation_NO=observation_MO[order],
            action_N=action_M[order],
            reward_N=reward_M[order],
            lengths=tuple(int(n) for n in lengths_S),
            episode_S=episode_S,
            last_state_SO=last_state_SO.reshape(len(episode_S), environments.observation_size),
            terminated_S=np.array([int(n) in self.terminated for n in episode_S], dtype=np.bool_),
            finished=self.finished,
        )


def tensor(array: npt.NDArray[Any]) -> Tensor:
    """The array as a tensor, float64 as float32."""
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)


# ---------------------------------------------------------------- evaluation

SIDE_BY_SIDE = 16
"""Most environments that an evaluation steps together."""


def returns_of(
    choose: ChooseActions, environment: Environment, choice: ReturnEvaluation, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return and length of each episode, in the order of their seeds."""
    episodes = choice.episodes
    count = min(episodes, SIDE_BY_SIDE)
    environments = Environments(environment, count, derive(seed, "evaluation"))
    totals, lengths = np.zeros(episodes), np.zeros(episodes, dtype=np.int64)

    def step() -> npt.NDArray[np.bool_]:
        moves = environments.step(choose(environments.observation_EO))
        ended_E = moves.ended_E | (environments.length_E >= choice.longest)
        ended_E &= environments.episode_E >= 0
        for slot in ended_E.nonzero()[0].tolist():
            episode = environments.episode(slot)
            totals[episode.number], lengths[episode.number] = episode.total, episode.length
        return ended_E

    try:
        run_episodes(environments, step, episodes)
    finally:
        environments.close()
    return totals, lengths


def evaluate(
    choose: ChooseActions, environment: Environment, choice: ReturnEvaluation, seed: int
) -> dict[str, Any]:
    """Mean return with its 95 % bootstrap interval, and the return of each episode."""
    totals, lengths = returns_of(choose, environment, choice, seed)
    interval = bootstrap_interval(totals)
    return {
        **interval.as_dict(),
        "kind": "return",
        "returns": totals.tolist(),
        "mean_length": float(lengths.mean()),
    }
