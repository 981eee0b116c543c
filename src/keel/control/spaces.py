"""What an environment shows and takes, as flat arrays."""

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
        """The environment's own numbers of actions counted from 0; it checks Python's fastest."""
        numbers: list[int] = (action_E + self.start).tolist()
        return numbers


@dataclass(frozen=True, eq=False)
class Continuous:
    """Vectors within bounds."""

    low_D: Array
    high_D: Array
    shape: tuple[int, ...]

    def to_environment(self, action_ED: Array) -> Array:
        """Actions cut at the bounds, in the environment's shape."""
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
    except NotImplementedError:  # a kind of space that Gymnasium does not know
        wrapped = None
    if wrapped is None or not isinstance(wrapped.observation_space, gym.spaces.Box):
        raise KeelError(f"{_name(env)}: observations of {space} are no vectors of a fixed length")
    return wrapped


def actions(env: gym.Env) -> ActionSpace:
    """What actions the environment takes. Raises KeelError for kinds that no policy here draws."""
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low = np.asarray(space.low, dtype=np.float32).reshape(-1)
        high = np.asarray(space.high, dtype=np.float32).reshape(-1)
        return Continuous(low, high, tuple(space.shape))
    raise KeelError(
        f"{_name(env)}: actions of {space} are neither Discrete nor a Box of real numbers, "
        "the two kinds there are policies for"
    )


def observation_size(env: gym.Env) -> int:
    """How many numbers an observation has, after `flat`."""
    assert env.observation_space.shape is not None
    return int(np.prod(env.observation_space.shape))


def _name(env: gym.Env) -> str:
    return env.spec.id if env.spec is not None else type(env).__name__
