"""Robust summaries of a metric over the steps of a run: medians of windows, ranks, no means."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
WINDOW = 5
"""Fewest steps of a window: a median of five ignores two outliers."""
WINDOWS = 20
"""Most windows of a run, so that the cost of a trend does not grow with the run."""
LONGEST = 200
"""Most values that a rank test compares; of more it gets the medians of windows."""


def window_medians(values: Array, most: int = WINDOWS) -> Array:
    """Medians of equal windows of `WINDOW` values or more that tile the values.

    At most `most` windows; what does not fill a window is left out at the start, so that the last
    window ends with the last value. Empty for fewer than `WINDOW` values.
    """
    width = max(WINDOW, math.ceil(len(values) / most))
    count = len(values) // width
    if count == 0:
        return np.empty(0)
    return np.asarray(np.median(values[len(values) - count * width :].reshape(count, width), 1))


def rolling_medians(values: Array, width: int = WINDOW) -> Array:
    """The median of each value and the `width` − 1 before it; one for each place but the first."""
    if len(values) < width:
        return np.empty(0)
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1))


@dataclass(frozen=True, slots=True)
class Trend:
    """How a metric moved: medians of its first and last fifth, and the trend between them.

    `change` is Theil and Sen's slope over windows, times the length; `p` is the two-sided p-value
    of Mann and Kendall's test.
    """

    first: float
    last: float
    change: float
    p: float
    n: int

    @property
    def gain(self) -> float:
        """How much the last fifth lies above the first."""
        return self.last - self.first

    def figures(self, name: str) -> dict[str, float]:
        """The two medians, as evidence has them."""
        return {f"{name}_first": self.first, f"{name}_last": self.last}

    def rises(self, p: float = 0.01) -> bool:
        return self.change > 0 and self.p < p

    def falls(self, p: float = 0.01) -> bool:
        return self.change < 0 and self.p < p


def trend(values: Array) -> Trend:
    """The trend of values in order; NaN and p = 1 for fewer than five.

        change = (n − 1) · median over pairs i < j of (x_j − x_i) / (j − i),   x medians of windows
        p      = of Kendall's τ between place and value

    Sources: Theil 1950, Sen 1968 (JASA 63:1379); Mann 1945, Kendall 1975. Both hold for any
    distribution of the noise. Noise that is correlated from step to step makes p too small: a rule
    also needs a change that matters.
    """
    from scipy.stats import kendalltau, theilslopes

    x = values[np.isfinite(values)]
    if len(x) < WINDOW:
        return Trend(math.nan, math.nan, math.nan, 1.0, len(x))
    part = max(WINDOW, len(x) // 5) if len(x) >= 2 * WINDOW else max(1, len(x) // 3)
    first, last = float(np.median(x[:part])), float(np.median(x[-part:]))
    medians = window_medians(x) if len(x) >= 4 * WINDOW else x
    change = float(theilslopes(medians).slope) * (len(medians) - 1)
    ranked = x if len(x) <= LONGEST else window_medians(x, LONGEST)
    if np.ptp(ranked) == 0:
        return Trend(first, last, 0.0, 1.0, len(x))
    p = float(kendalltau(np.arange(len(ranked)), ranked).pvalue)
    return Trend(first, last, change, p, len(x))


def median(values: Array, default: float = math.nan) -> float:
    """The median; `default` of no values."""
    return float(np.median(values)) if len(values) else default


def holds_since(values: Array, least: float) -> int | None:
    """The index since which the median of each value and the four before is at least so high.

    None if it is not at the end. A stretch from the start on counts from the first value.
    """
    low = np.flatnonzero(rolling_medians(values) < least)
    if len(values) < WINDOW or (len(low) and low[-1] == len(values) - WINDOW):
        return None
    return int(low[-1]) + WINDOW if len(low) else 0


def noise(values: Array) -> float:
    """Standard deviation of the values about their course, from the differences of neighbours.

        σ = 1.4826 · median |x_{i+1} − x_i − median(x_{i+1} − x_i)| / √2

    0 for fewer than three values.
    """
    steps = np.diff(values[np.isfinite(values)])
    if len(steps) < 2:
        return 0.0
    return float(1.4826 * np.median(np.abs(steps - np.median(steps))) / math.sqrt(2))
