"""Running mean and variance of observations and returns, to normalise them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.wrappers.utils import RunningMeanStd

LIMIT = 10.0
"""Normalised values are clipped at ± this."""
EPSILON = 1e-8


class Moments:
    """Mean and variance of all values so far, by Gymnasium's running statistics.

    Its wrappers count every step of every environment, those that wait for the others to finish
    their episodes included, and change within an iteration: here an iteration is added as a whole.
    """

    def __init__(self, size: int) -> None:
        self.running: Any = RunningMeanStd(epsilon=0.0, shape=(size,))  # type: ignore[no-untyped-call]

    def add(self, seen: npt.NDArray[np.floating]) -> None:
        """Count these values too."""
        self.running.update(np.asarray(seen, dtype=np.float64))

    def normal(self, x: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Subtract the mean, divide by the standard deviation, and clip."""
        return self.scaled(x - self.running.mean)

    def scaled(self, x: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Divide by the standard deviation, and clip; as they are before any value is known."""
        if self.running.count == 0:
            return np.asarray(x, dtype=np.float32)
        y = x / np.sqrt(self.running.var + EPSILON)
        cut: npt.NDArray[np.float32] = np.clip(y, -LIMIT, LIMIT).astype(np.float32)
        return cut
