"""How fast something goes, from a few timings: what every call costs, and what each thing adds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

QUICK = 2.0
"""Seconds under which a call is timed again: its first time held the start-up of kernels."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a pass over n rows: `fixed`, and `each` of them more."""

    fixed: float
    each: float

    def seconds(self, rows: int, at_once: int | None = None) -> float:
        """Of all rows, at most `at_once` in a pass."""
        passes = math.ceil(rows / (at_once or max(rows, 1)))
        return self.fixed * passes + self.each * rows


def seconds_of(work: Callable[[], object], first: float | None = None) -> float:
    """Seconds of some work: the better of two times, where it is quick.

    `first` is what it took when it was done before.
    """
    best = math.inf if first is None else first
    for _ in range(2):
        if best > QUICK and best < math.inf:
            break
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def pace_of(work: Callable[[int], object], rows: int, first: float | None = None) -> Pace:
    """The pace of work on so many rows, timed with all of them and with a half."""
    whole = seconds_of(lambda: work(rows), first)
    half = rows // 2
    if whole > QUICK or not half:
        return Pace(0.0, whole / max(rows, 1))
    part = seconds_of(lambda: work(half))
    each = min(max((whole - part) / (rows - half), 0.0), whole / rows)
    return Pace(whole - each * rows, each)
