"""Observations and actions of an environment as flat arrays."""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from keel.types import KeelError

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Discrete:
    """One of `n` actions, counted from `start`."""

    n: int
    start: int

    def to_environment(self, action_E: npt.NDArray[np.int64]) -> list[int]:
        """The environment's numbers for actions counted from 0."""
        numbers: list[int] = (action_E + self.start).tolist()
        return numbers


@dataclass(frozen=True, eq=False)
class Continuous:
    """Vectors within bounds."""

    low_D: Array
    high_D: Array
    shape: tuple[int, ...]

    def to_environment(self, action_ED: Array) -> Array:
        """Actions clipped at the bounds, in the shape of the environment."""
        cut_ED = np.clip(action_ED, self.low_D, self.high_D)
        return cut_ED.reshape(len(action_ED), *self.shape)


ActionSpace = Discrete | Continuous


def flat(env: gym.Env) -> gym.Env:
    """The environment with its observations as vectors: dictionaries joined, numbers one-hot."""
    space = env.observation_space
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        return env
    try:
        wrapped = gym.wrappers.FlattenObservation(env)
    except NotImplementedError:  # an unknown kind of space
        wrapped = None
    if wrapped is None or not isinstance(wrapped.observation_space, gym.spaces.Box):
        raise KeelError(f"{_name(env)}: observations of {space} cannot be flattened to a vector")
    return wrapped


def actions(env: gym.Env) -> ActionSpace:
    """The action space of an environment. Raises KeelError for a kind without a policy."""
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low = np.asarray(space.low, dtype=np.float32).reshape(-1)
        high = np.asarray(space.high, dtype=np.float32).reshape(-1)
        return Continuous(low, high, tuple(space.shape))
    raise KeelError(
        f"{_name(env)}: actions of {space} are not supported: use an environment with Discrete "
        "actions or a Box of real numbers"
    )


def observation_size(env: gym.Env) -> int:
    """Length of an observation, after `flat`."""
    assert env.observation_space.shape is not None
    return int(np.prod(env.observation_space.shape))


def _name(env: gym.Env) -> str:
    return env.spec.id if env.spec is not None else type(env).__name__
