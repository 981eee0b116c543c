"""The experience of an iteration: steps of every environment, or whole episodes.

Time steps (T), environments (E). An environment without further episodes rests until the others
finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from keel.control.actor import Actor
from keel.control.environments import Environments
from keel.learn.batch import Actions, Estimates, per_action
from keel.types import KeelError


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
        lengths = (1,) * len(index_K)
        return replace(self, lengths=lengths, groups_S=index_K, **per_action(self, index_K))

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
"""Longest episode, where whole ones are collected."""
BLOCK = 128
"""Time steps of a block of buffers and noise."""


@dataclass(frozen=True, eq=False)
class Finished:
    """Episodes that ended: return, length, and number."""

    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]


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
    finished: Finished


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
    tape = _Tape(environments, times)
    for _ in range(times):
        ended_E = tape.step(choose)
        if ended_E.any():
            environments.begin(ended_E.nonzero()[0])
    return tape.collected()


def collect_episodes(environments: Environments, choose: ChooseActions, episodes: int) -> Collected:
    """`episodes` whole episodes, started in order as environments become free."""
    last = environments.begun + episodes
    first = np.arange(environments.count)
    environments.begin(first[:episodes])
    if episodes < environments.count:
        environments.rest(first[episodes:])
    tape = _Tape(environments, BLOCK)
    while (environments.episode_E >= 0).any():
        if environments.length_E.max() > LONGEST:
            raise KeelError(
                f"an episode has more than {LONGEST} steps, and the advantage needs whole ones: "
                "limit them with environment.options={max_episode_steps=1000}"
            )
        ended = tape.step(choose).nonzero()[0]
        if len(ended):
            more = ended[: last - environments.begun]
            if len(more):
                environments.begin(more)
            if len(more) < len(ended):
                environments.rest(ended[len(more) :])
    return tape.collected()


class _Tape:
    """Buffers (T, E) that grow by doubling."""

    def __init__(self, environments: Environments, times: int) -> None:
        self.environments = environments
        count, size = environments.count, environments.observation_size
        self.observation_TEO = np.zeros((times, count, size), dtype=np.float32)
        self.action_TE: npt.NDArray[Any] | None = None
        self.reward_TE = np.zeros((times, count))
        self.episode_TE = np.full((times, count), -1, dtype=np.int64)
        self.after: dict[int, npt.NDArray[np.float32]] = {}
        self.terminated: set[int] = set()
        self.finished: list[tuple[float, int, int]] = []
        self.time = 0

    def step(self, choose: ChooseActions) -> npt.NDArray[np.bool_]:
        """Step every environment; True where an episode ended."""
        environments, t = self.environments, self.time
        if t == len(self.reward_TE):
            self._grow()
        action_E = choose(environments.observation_EO)
        if self.action_TE is None:
            shape = (len(self.reward_TE), *action_E.shape)
            self.action_TE = np.zeros(shape, dtype=action_E.dtype)
        self.observation_TEO[t] = environments.observation_EO
        self.action_TE[t] = action_E
        self.episode_TE[t] = environments.episode_E
        moves = environments.step(action_E)
        self.reward_TE[t] = moves.reward_E
        self.time += 1
        ended_E = moves.terminated_E | moves.truncated_E
        if ended_E.any():
            ended_E = ended_E & (environments.episode_E >= 0)
            for slot in ended_E.nonzero()[0].tolist():
                number = int(environments.episode_E[slot])
                total, length = environments.tally(slot)
                self.finished.append((total, length, number))
                self.after[number] = moves.observation_EO[slot].copy()
                if moves.terminated_E[slot]:
                    self.terminated.add(number)
        return ended_E

    def collected(self) -> Collected:
        """All steps, flat."""
        assert self.action_TE is not None
        t, e = self.time, self.environments.count
        episode_M = self.episode_TE[:t].reshape(-1)
        order = np.argsort(episode_M, kind="stable")
        order = order[int((episode_M < 0).sum()) :]
        episode_S, lengths_S = np.unique(episode_M[order], return_counts=True)
        size = self.environments.observation_size
        now = {int(n): row for n, row in zip(*self._under_way(), strict=True)}
        after = [self.after.get(int(n), now.get(int(n))) for n in episode_S]
        return Collected(
            observation_NO=self.observation_TEO[:t].reshape(t * e, size)[order],
            action_N=self.action_TE[:t].reshape(t * e, *self.action_TE.shape[2:])[order],
            reward_N=self.reward_TE[:t].reshape(-1)[order],
            lengths=tuple(int(n) for n in lengths_S),
            episode_S=episode_S,
            last_state_SO=np.array(after, dtype=np.float32).reshape(len(episode_S), size),
            terminated_S=np.array([int(n) in self.terminated for n in episode_S], dtype=np.bool_),
            finished=self._finished(),
        )

    def _under_way(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        return self.environments.episode_E, self.environments.observation_EO

    def _finished(self) -> Finished:
        rows = self.finished or []
        return Finished(
            returns=np.array([row[0] for row in rows]),
            lengths=np.array([row[1] for row in rows], dtype=np.int64),
            numbers=np.array([row[2] for row in rows], dtype=np.int64),
        )

    def _grow(self) -> None:
        for name in ("observation_TEO", "action_TE", "reward_TE", "episode_TE"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))


def tensor(array: npt.NDArray[Any]) -> Tensor:
    """The array as a tensor, float64 as float32."""
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)
