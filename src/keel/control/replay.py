"""The replay buffer: ring buffers over time steps (T) and environments (E)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Transitions:
    """Sampled transitions (B): state, action, up to K rewards, and the state after the last one.

    `steps_B` is how many rewards count: less than K if an episode was cut off or the buffer
    ends. What comes after counts unless one of them terminated the episode.
    """

    observation_BO: Float[Tensor, "B O"]
    action_B: Int[Tensor, " B"]
    reward_BK: Float[Tensor, "B K"]
    terminated_BK: Bool[Tensor, "B K"]
    steps_B: Int[Tensor, " B"]
    next_observation_BO: Float[Tensor, "B O"]


class Replay:
    """Holds the newest `capacity` transitions of `count` environments that step together."""

    def __init__(self, capacity: int, count: int, size: int) -> None:
        rows = max(capacity // count, 1)
        self.observation_TEO = np.zeros((rows, count, size), dtype=np.float32)
        self.next_observation_TEO = np.zeros((rows, count, size), dtype=np.float32)
        self.action_TE = np.zeros((rows, count), dtype=np.int64)
        self.reward_TE = np.zeros((rows, count), dtype=np.float32)
        self.terminated_TE = np.zeros((rows, count), dtype=np.bool_)
        self.ended_TE = np.zeros((rows, count), dtype=np.bool_)
        self.written = 0

    def __len__(self) -> int:
        """The number of stored transitions."""
        return min(self.written, len(self.action_TE)) * self.action_TE.shape[1]

    def add(
        self,
        observation_EO: npt.NDArray[np.float32],
        action_E: npt.NDArray[np.int64],
        reward_E: npt.NDArray[Any],
        terminated_E: npt.NDArray[np.bool_],
        truncated_E: npt.NDArray[np.bool_],
        next_observation_EO: npt.NDArray[np.float32],
    ) -> None:
        """Store one step of every environment, in place of the oldest."""
        at = self.written % len(self.action_TE)
        self.observation_TEO[at] = observation_EO
        self.next_observation_TEO[at] = next_observation_EO
        self.action_TE[at] = action_E
        self.reward_TE[at] = reward_E
        self.terminated_TE[at] = terminated_E
        np.logical_or(terminated_E, truncated_E, out=self.ended_TE[at])
        self.written += 1

    def sample(self, batch: int, horizon: int, rng: np.random.Generator) -> Transitions:
        """`batch` transitions, uniformly and with replacement, with up to `horizon` rewards."""
        rows, count = self.action_TE.shape
        there = min(self.written, rows)
        flat = rng.integers(0, there * count, size=batch)
        age_B, env_B = np.divmod(flat, count)
        oldest = self.written - there
        at_B = (oldest + age_B) % rows
        if horizon == 1:
            last_B, steps_B = at_B, np.ones(batch, dtype=np.int64)
            window_BK = at_B[:, None]
        else:
            ahead_K = np.arange(horizon)
            window_BK = (oldest + age_B[:, None] + ahead_K) % rows
            ends_BK = self.ended_TE[window_BK, env_B[:, None]]
            ends_BK |= age_B[:, None] + ahead_K >= there - 1  # the newest step ends the buffer
            steps_B = ends_BK.argmax(1) + 1
            steps_B[~ends_BK.any(1)] = horizon
            last_B = window_BK[np.arange(batch), steps_B - 1]
        return Transitions(
            observation_BO=torch.from_numpy(self.observation_TEO[at_B, env_B]),
            action_B=torch.from_numpy(self.action_TE[at_B, env_B]),
            reward_BK=torch.from_numpy(self.reward_TE[window_BK, env_B[:, None]]),
            terminated_BK=torch.from_numpy(self.terminated_TE[window_BK, env_B[:, None]]),
            steps_B=torch.from_numpy(steps_B),
            next_observation_BO=torch.from_numpy(self.next_observation_TEO[last_B, env_B]),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The filled part of the arrays, by name."""
        there = min(self.written, len(self.action_TE))
        return {name: torch.from_numpy(array[:there]) for name, array in self._arrays().items()}

    def restore(self, tensors: dict[str, Tensor], written: int) -> None:
        """Load what `tensors` returned."""
        self.written = written
        for name, array in self._arrays().items():
            array[: len(tensors[name])] = tensors[name].numpy()

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: a for name, a in vars(self).items() if isinstance(a, np.ndarray)}
