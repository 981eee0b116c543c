"""Running mean and variance of observations and returns, to normalise them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
LIMIT = 10.0
"""Normalised values are clipped at ± this."""
EPSILON = 1e-8


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and variance of all values so far; 0 and 1 before the first."""

    mean: Array
    variance: Array
    count: float = 0.0

    @staticmethod
    def of(size: int) -> Moments:
        return Moments(np.zeros(size), np.ones(size))

    def with_(self, seen: npt.NDArray[np.floating]) -> Moments:
        """The moments with these values added.

            m' = m + d n/(c+n),   v' = (c v + n w + d² c n/(c+n)) / (c+n),   d = mean(x) − m

        Source: Chan, Golub and LeVeque 1979.
        """
        x = np.asarray(seen, dtype=np.float64)
        if len(x) == 0:
            return self
        n, c = float(len(x)), self.count
        difference = x.mean(0) - self.mean
        total = c + n
        between = difference**2 * c * n / total
        return Moments(
            self.mean + difference * n / total,
            (c * self.variance + n * x.var(0) + between) / total,
            total,
        )

    def normal(self, x: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Subtract the mean, divide by the standard deviation, and clip."""
        if self.count == 0:
            return np.asarray(x, dtype=np.float32)
        y = (x - self.mean) / np.sqrt(self.variance + EPSILON)
        return np.clip(y, -LIMIT, LIMIT).astype(np.float32)

    def scaled(self, x: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Divide by the standard deviation, and clip."""
        if self.count == 0:
            return np.asarray(x, dtype=np.float32)
        y = x / np.sqrt(self.variance + EPSILON)
        return np.clip(y, -LIMIT, LIMIT).astype(np.float32)
