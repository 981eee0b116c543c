"""Several copies of one environment, with a seed for every episode.

Automatic resets are off (AutoresetMode.DISABLED): `step` returns the state that the action led to,
and no transition crosses a reset. The state of an environment cannot be saved in general; the seed
and the actions of its episode can, and are replayed.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FlattenObservation, TransformAction

from keel.config.control import Environment
from keel.config.entry import load_module
from keel.config.fields import derive
from keel.platform.process import Lifeline
from keel.types import KeelError, one_line

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]
PATIENCE = 5.0
"""Seconds that copies which are at work have to end."""


def make(choice: Environment, render: str | None = None) -> gym.Env:
    """One environment, with vectors for observations, and numbers from 0 or vectors for actions.

    Dictionaries of observations are joined, numbers one-hot. Vectors of actions are clipped at the
    bounds. Raises KeelError if Gymnasium cannot make it, or for a kind of space that cannot be
    flattened or has no policy.
    """
    # An environment that cannot be rendered may not accept render_mode.
    mode = {} if render is None else {"render_mode": render}
    module, _, name = choice.id.rpartition(":")
    if module:
        load_module(module, choice.id, "environment")
    try:
        env = gym.make(name, **{**choice.options, **mode})
    except Exception as error:  # whatever its constructor raises
        message = " ".join(str(error).split()) or type(error).__name__
        raise KeelError(f"environment {choice.id!r}: {message}") from error
    return _with_flat_actions(_with_flat_observations(env))


@dataclass(frozen=True, eq=False)
class Moves:
    """The result of a step of all copies (E); observations are of the states reached."""

    observation_EO: Floats
    reward_E: npt.NDArray[np.float64]
    terminated_E: Flags
    truncated_E: Flags

    @property
    def ended_E(self) -> Flags:
        """Whether an episode ended, by itself or by a limit."""
        return self.terminated_E | self.truncated_E


class Episode(NamedTuple):
    """The return of an episode, its length in steps, and its number."""

    total: float
    length: int
    number: int


class Environments:
    """`count` copies of an environment. Episodes are numbered as they begin.

    Each `group` consecutive episodes share a seed, and so their start state.
    """

    def __init__(self, choice: Environment, count: int, seed: int, group: int = 1) -> None:
        self.id, self.count, self.seed, self.group = choice.id, count, seed, group
        sample = make(choice)  # raises errors in this process
        self.actions: Any = sample.action_space
        self.observation_size = math.prod(sample.observation_space.shape or ())
        self.max_episode_steps = None if sample.spec is None else sample.spec.max_episode_steps
        sample.close()
        self.vector: Any = None
        self._lifelines: list[Lifeline] = []
        never = AutoresetMode.DISABLED
        if choice.vectorization == "async":
            self._lifelines = [Lifeline() for _ in range(count)]
            forked = [partial(_in_process, choice, one, os.getpid()) for one in self._lifelines]
            with self._reported("its own process"):  # a fork knows what a script has registered
                self.vector = AsyncVectorEnv(
                    forked, copy=False, context="fork", autoreset_mode=never
                )
            for lifeline in self._lifelines:
                lifeline.give()
        else:
            makers = [partial(make, choice) for _ in range(count)]
            self.vector = SyncVectorEnv(makers, copy=False, autoreset_mode=never)
        self.observation_EO = np.zeros((count, self.observation_size), dtype=np.float32)
        self.episode_E: Numbers = np.full(count, -1, dtype=np.int64)
        self.begun = 0
        self._return_E = np.zeros(count)
        self.length_E = np.zeros(count, dtype=np.int64)
        self._taken_E: list[list[Any]] = [[] for _ in range(count)]
        """The actions of each copy's episode."""
        self._slots = np.arange(count)
        self._idle = self._reset_once = False

    def begin(self, slots: Sequence[int] | Numbers) -> None:
        """Start the next episodes in these copies, in this order."""
        for slot in slots:
            self.episode_E[slot] = self.begun
            self.begun += 1
        self._reset(np.isin(self._slots, slots))

    def replace(self, slots: Numbers, last: int) -> None:
        """Start the next episodes in these copies, up to episode `last`; the others rest."""
        more = slots[: max(0, last - self.begun)]
        if len(more):
            self.begin(more)
        if len(more) < len(slots):
            self.rest(slots[len(more) :])

    def rest(self, slots: Sequence[int] | Numbers) -> None:
        """Leave these copies without an episode: their steps are ignored."""
        self.episode_E[slots] = -1
        self._reset(np.isin(self._slots, slots))

    def step(self, action_E: npt.NDArray[Any]) -> Moves:
        """Step every copy. The caller begins or rests the copies whose episode ended."""
        for taken, action in zip(self._taken_E, action_E, strict=True):
            taken.append(action)
        with self._reported("step"):
            observation, reward_E, terminated_E, truncated_E, _ = self.vector.step(action_E)
        self.observation_EO[:] = observation
        if not (np.isfinite(reward_E).all() and np.isfinite(self.observation_EO).all()):
            raise KeelError(
                f"environment {self.id!r} returned a reward or an observation that is not finite, "
                f"{int(self.length_E.max()) + 1} steps into an episode: fix it"
            )
        self.length_E += 1
        self._return_E += reward_E
        if self._idle and (resting := (self.episode_E < 0) & (terminated_E | truncated_E)).any():
            self._reset(resting)
        return Moves(self.observation_EO, reward_E, terminated_E, truncated_E)

    def episode(self, slot: int) -> Episode:
        """The current episode of a copy."""
        total, length, number = self._return_E[slot], self.length_E[slot], self.episode_E[slot]
        return Episode(float(total), int(length), int(number))

    def close(self) -> None:
        with self._reported("close"):
            self.vector.close(**({"timeout": PATIENCE} if self._lifelines else {}))
        self._end()

    def _end(self) -> None:
        """Kill the processes of the copies, and what they started."""
        for lifeline in self._lifelines:
            lifeline.cut()
        if self._lifelines and self.vector is not None:
            for process in self.vector.processes:
                process.join()
            self.vector.closed = True
        self._lifelines = []

    def state(self) -> dict[str, Any]:
        """The current episodes and their actions, from which `restore` gets to the same states."""
        return {
            "begun": self.begun,
            "episode": self.episode_E.tolist(),
            "actions": [[action.tolist() for action in taken] for taken in self._taken_E],
            "observation": self.observation_EO.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Replay the episodes; whether that led to the same states."""
        self.begun = state["begun"]
        self.episode_E[:] = state["episode"]
        if self.begun == 0:
            return True  # no episode had begun
        dtype = np.int64 if isinstance(self.actions, gym.spaces.Discrete) else np.float32
        taken = [np.array(actions, dtype=dtype) for actions in state["actions"]]
        longest = max(map(len, taken))
        missing_E = np.array([longest - len(actions) for actions in taken])
        self._reset(np.full(self.count, True))
        # Copies step together: shorter episodes begin later, so that all end at the same time.
        any_action = next(actions[0] for actions in taken if len(actions)) if longest else None
        for at in range(longest):
            if at > 0 and (missing_E == at).any():
                self._reset(missing_E == at)
            action_E = np.array(
                [
                    actions[at - missing] if at >= missing else any_action
                    for actions, missing in zip(taken, missing_E, strict=True)
                ]
            )
            moves = self.step(action_E)
            ended_E = moves.ended_E & (at < missing_E)
            if ended_E.any():
                self._reset(ended_E)
        if longest and (missing_E == longest).any():
            self._reset(missing_E == longest)
        wanted = np.array(state["observation"], dtype=np.float32)
        return bool(np.array_equal(self.observation_EO, wanted, equal_nan=True))

    @contextmanager
    def _reported(self, doing: str) -> Iterator[None]:
        """Errors of the environment name it, in one line, and end the copies' processes."""
        level = gym.logger.min_level
        if self._lifelines:
            gym.logger.min_level = gym.logger.ERROR + 1  # they are raised as well
        try:
            yield
        except Exception as error:
            self._end()
            why = one_line(error, named=True)
            if isinstance(error, EOFError | BrokenPipeError | ConnectionResetError):
                why = "its process ended"
            raise KeelError(f"environment {self.id!r} fails in {doing}: {why}") from error
        finally:
            gym.logger.min_level = level

    def _reset(self, mask_E: Flags) -> None:
        self._idle = bool((self.episode_E < 0).any())
        if not self._reset_once:
            # Every copy must be reset once before any can step.
            mask_E, self._reset_once = np.full(self.count, True), True
        seeds = [
            derive_episode(self.seed, int(n) // self.group) if chosen else None
            for n, chosen in zip(self.episode_E, mask_E, strict=True)
        ]
        options = None if mask_E.all() else {"reset_mask": mask_E}
        with self._reported("reset"):
            observation, _ = self.vector.reset(seed=seeds, options=options)
        self.observation_EO[:] = observation
        self._return_E[mask_E] = 0.0
        self.length_E[mask_E] = 0
        for slot in mask_E.nonzero()[0]:
            self._taken_E[slot] = []


def _in_process(choice: Environment, lifeline: Lifeline, parent: int) -> gym.Env:
    """An environment in a process that ends with its parent; Gymnasium makes one in that too."""
    if os.getpid() != parent:
        os.setsid()
        lifeline.tie(os.getpid())
        if lifeline.is_cut():
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
    return make(choice)


def derive_episode(seed: int, number: int) -> int:
    """The seed of an episode, within 31 bits: some environments take no more."""
    return derive(seed, "episode", number) >> 32


def _with_flat_observations(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    space = env.observation_space
    if isinstance(space, Box) and len(space.shape) == 1:
        return env
    with suppress(NotImplementedError):  # an unknown kind of space
        env = FlattenObservation(env)
    if not isinstance(env.observation_space, Box):
        raise KeelError(f"{_name(env)}: observations of {space} cannot be flattened to a vector")
    return env


def _with_flat_actions(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    space = env.action_space
    if isinstance(space, Discrete):
        start = int(space.start)
        return TransformAction(env, lambda n: int(n) + start, Discrete(space.n))
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        low, high = space.low.reshape(-1), space.high.reshape(-1)
        return TransformAction(  # as ClipAction, whose call costs more than a step of Pendulum's
            env,
            lambda vector: np.minimum(np.maximum(vector, low), high).reshape(space.shape),
            Box(-np.inf, np.inf, low.shape, space.dtype.type),
        )
    raise KeelError(
        f"{_name(env)}: actions of {space} are not supported: use an environment with Discrete "
        "actions or a Box of real numbers"
    )


def _name(env: gym.Env[Any, Any]) -> str:
    return env.spec.id if env.spec is not None else type(env).__name__
