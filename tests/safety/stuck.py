"""An environment whose second action never ends; it starts a process of its own, as some do."""

from __future__ import annotations

import subprocess
from typing import Any

import gymnasium as gym
import numpy as np

NAME = "tests.safety.stuck:Stuck-v0"


class Stuck(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            subprocess.Popen(["sleep", "600"])
            while True:
                pass
        return np.ones(1, np.float32), 1.0, False, False, {}


if "Stuck-v0" not in gym.registry:
    gym.register("Stuck-v0", Stuck)
