"""Environments whose observations and actions are flat arrays."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FlattenObservation, TransformAction

from keel.types import KeelError


def flat(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """The environment with vectors for observations, and numbers from 0 or vectors for actions.

    Dictionaries of observations are joined, numbers one-hot. Vectors of actions are clipped at the
    bounds. Raises KeelError for a kind of space that cannot be flattened or has no policy.
    """
    return _with_flat_actions(_with_flat_observations(env))


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
