"""Several copies of one environment, with a seed for every episode.

Automatic resets are off (AutoresetMode.DISABLED): `step` returns the state that the action led to,
and no transition crosses a reset. The state of an environment cannot be saved in general; the seed
and the actions of its episode can, and are replayed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from jaxtyping import Float
from torch import Tensor

from keel.config.control import Environment
from keel.config.entry import load_module
from keel.config.fields import derive
from keel.control import spaces
from keel.sandbox.lifeline import Lifeline
from keel.types import KeelError, one_line

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]
GROWTH = 512
"""Initial capacity for the actions of an episode; it doubles when needed."""
PATIENCE = 5.0
"""Seconds that copies which are at work have to end."""


def make(choice: Environment, render: str | None = None) -> gym.Env:
    """One environment, its observations flat. Raises KeelError where Gymnasium cannot make it."""
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
    return spaces.flat(env)


@dataclass(frozen=True, eq=False)
class EnvironmentShape:
    """The actions, observations and time limit of an environment."""

    actions: spaces.ActionSpace
    observation_size: int
    max_episode_steps: int | None


def describe(choice: Environment) -> EnvironmentShape:
    """The shape of an environment. Raises KeelError where there is no policy for it."""
    sample = make(choice)
    try:
        limit = None if sample.spec is None else sample.spec.max_episode_steps
        return EnvironmentShape(spaces.actions(sample), spaces.observation_size(sample), limit)
    finally:
        sample.close()


@dataclass(frozen=True, eq=False)
class Moves:
    """The result of a step of all copies (E); observations are of the states reached."""

    observation_EO: Floats
    reward_E: npt.NDArray[np.float64]
    terminated_E: Flags
    truncated_E: Flags


class Environments:
    """`count` copies of an environment. Episodes are numbered as they begin.

    Each `group` consecutive episodes share a seed, and so their start state.
    """

    def __init__(self, choice: Environment, count: int, seed: int, group: int = 1) -> None:
        self.id, self.count, self.seed, self.group = choice.id, count, seed, group
        shape = describe(choice)  # raises errors in this process
        self.actions, self.observation_size = shape.actions, shape.observation_size
        self.max_episode_steps = shape.max_episode_steps
        self.vector: Any = None
        self._lifelines: list[Lifeline] = []
        never = AutoresetMode.DISABLED
        if choice.vectorization == "async":
            self._lifelines = [Lifeline() for _ in range(count)]
            forked = [partial(_in_process, choice, one, os.getpid()) for one in self._lifelines]
            with self._told("its own process"):  # a fork knows what a script has registered
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
        width = () if isinstance(self.actions, spaces.Discrete) else self.actions.low_D.shape
        dtype = np.int64 if isinstance(self.actions, spaces.Discrete) else np.float32
        self._taken_LE = np.zeros((GROWTH, count, *width), dtype=dtype)
        self._slots = np.arange(count)
        self._idle = self._reset_once = False

    def begin(self, slots: Sequence[int] | Numbers) -> None:
        """Start the next episodes in these copies, in this order."""
        for slot in slots:
            self.episode_E[slot] = self.begun
            self.begun += 1
        self._reset(np.isin(self._slots, slots))

    def rest(self, slots: Sequence[int] | Numbers) -> None:
        """Leave these copies without an episode: their steps are ignored."""
        self.episode_E[slots] = -1
        self._reset(np.isin(self._slots, slots))

    def step(self, action_E: npt.NDArray[Any]) -> Moves:
        """Step every copy. The caller begins or rests the copies whose episode ended."""
        length = int(self.length_E.max())
        if length == len(self._taken_LE):
            self._taken_LE = np.concatenate([self._taken_LE, np.zeros_like(self._taken_LE)])
        self._taken_LE[self.length_E, self._slots] = action_E
        with self._told("step"):
            observation, reward_E, terminated_E, truncated_E, _ = self.vector.step(
                self.actions.to_environment(action_E)
            )
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

    def tally(self, slot: int) -> tuple[float, int]:
        """Return and length of the current episode of a copy."""
        return float(self._return_E[slot]), int(self.length_E[slot])

    def close(self) -> None:
        with self._told("close"):
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
            "actions": [
                self._taken_LE[:length, slot].tolist() for slot, length in enumerate(self.length_E)
            ],
            "observation": self.observation_EO.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Replay the episodes; whether that led to the same states."""
        self.begun = state["begun"]
        self.episode_E[:] = state["episode"]
        if self.begun == 0:
            return True  # no episode had begun
        taken = [np.array(actions, dtype=self._taken_LE.dtype) for actions in state["actions"]]
        longest = max(len(actions) for actions in taken)
        self._reset(np.full(self.count, True))
        # Copies step together: shorter episodes begin later, so that all end at the same time.
        for at in range(longest):
            missing = np.array([longest - len(actions) for actions in taken])
            if at > 0 and (missing == at).any():
                self._reset(missing == at)
            action_E = self._taken_LE[0].copy()
            for slot, actions in enumerate(taken):
                if at >= missing[slot]:
                    action_E[slot] = actions[at - missing[slot]]
            moves = self.step(action_E)
            ended = (moves.terminated_E | moves.truncated_E) & (at < missing)
            if ended.any():
                self._reset(ended)
        fresh = np.array([len(actions) == 0 for actions in taken])
        if fresh.any():
            self._reset(fresh)
        wanted = np.array(state["observation"], dtype=np.float32)
        return bool(np.array_equal(self.observation_EO, wanted, equal_nan=True))

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
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
        with self._told("reset"):
            observation, _ = self.vector.reset(seed=seeds, options=options)
        self.observation_EO[:] = observation
        self._return_E[mask_E] = 0.0
        self.length_E[mask_E] = 0


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


Outcome = tuple[float, int, float, bool]
"""Probability, next state, reward, and whether the episode terminates there."""
Table = Mapping[int, Mapping[int, Sequence[Outcome]]]
"""The outcomes of an action (inner key) in a state (outer key), each numbered from 0."""


def from_table(
    table: Table, states: int, actions: int
) -> tuple[Float[Tensor, "X A"], Float[Tensor, "X A X"]]:
    """Expected rewards and transitions, in float64, of Gymnasium's `env.unwrapped.P`.

    A terminating outcome pays its reward and leads nowhere: its probability is left out of the
    transitions, so that a row of them sums to the probability that the episode goes on.
    """
    reward_XA = torch.zeros(states, actions, dtype=torch.float64)
    transition_XAY = torch.zeros(states, actions, states, dtype=torch.float64)
    for state in range(states):
        for action in range(actions):
            for probability, after, reward, terminated in table[state][action]:
                reward_XA[state, action] += probability * reward
                if not terminated:
                    transition_XAY[state, action, after] += probability
    return reward_XA, transition_XAY
