"""An environment that draws nothing: two actions, one of which pays."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

Observation = np.ndarray[Any, np.dtype[np.float32]]


class Blind(gym.Env[Observation, int]):
    """Four steps; action 1 pays."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 4
        return self._look(), {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return self._look(), float(action == 1), self.left == 0, False, {}

    def _look(self) -> Observation:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


gym.register("Blind-v0", Blind)


class Raises(Blind):
    """Fails at its third step."""

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self.left == 2:
            raise ValueError("broken")
        return super().step(action)


class NaN(Blind):
    """Pays a NaN."""

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest


gym.register("Raises-v0", Raises)
gym.register("NaN-v0", NaN)
