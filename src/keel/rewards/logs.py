"""What reward functions log: a value for each completion, and numbers of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from keel.runs.values import plain
from keel.types import KeelError

Summary = Callable[[list[Any]], Mapping[str, float]]
"""Numbers for a step, by name, from the findings of all its calls."""


class Log:
    """What one call on `size` completions logs (None: of any number); each has its own, so that an
    abandoned call logs into no other."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.extras: dict[str, list[Any]] = {}
        self.numbers: dict[str, list[float]] = {}
        self.found: list[Any] = []
        self.summary: Summary | None = None

    def extra(self, name: str, values: Sequence[Any]) -> None:
        """A value for each completion. Raises KeelError for others."""
        if self.size not in (None, len(values)):
            raise KeelError(
                f"log_extra({name!r}) got {len(values)} values for {self.size} completions: give "
                "one for each"
            )
        try:
            plain(list(values))
        except TypeError as error:
            raise KeelError(f"log_extra({name!r}): {error}") from None
        self.extras[name] = list(values)

    def metric(self, name: str, value: float) -> None:
        """A number for the step; the mean if it comes several times."""
        self.numbers.setdefault(name, []).append(float(value))

    def summarise(self, found: Sequence[Any], summary: Summary) -> None:
        """Numbers for the step, as `summary` of the findings of all its calls."""
        self.found += found
        self.summary = summary


CallLogs = Sequence[tuple[Log, Sequence[int]]]
"""The log of each call of a function, and the places of its completions in the step."""


def join_logs(
    logs: Mapping[str, CallLogs], size: int
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """The extras and metrics of a step of `size` completions, from the logs of its functions.

    A name that an earlier function logged becomes `FUNCTION/name`.
    """
    extras: dict[str, list[Any]] = {}
    metrics: dict[str, float] = {}
    for function, calls in logs.items():
        own: dict[str, list[Any]] = {}
        for log, places in calls:
            for name, values in dict(log.extras).items():
                column = own.setdefault(name, [None] * size)
                for place, value in zip(places, values, strict=True):
                    column[place] = value
        for name, column in own.items():
            extras[f"{function}/{name}" if name in extras else name] = column
        for name, number in _numbers(calls).items():
            metrics[f"{function}/{name}" if name in metrics else name] = number
    return extras, metrics


def _numbers(calls: CallLogs) -> dict[str, float]:
    """The step's number under each name; several calls are weighted by their completions."""
    parts: dict[str, list[tuple[Any, int]]] = {}
    for log, places in calls:
        for name, numbers in dict(log.numbers).items():
            parts.setdefault(name, []).append((np.mean(numbers), len(places)))
    out: dict[str, float] = {}
    for name, several in parts.items():
        means, weights = zip(*several, strict=True)
        out[name] = float(np.average(means, weights=weights) if len(means) > 1 else means[0])
    summary = next((log.summary for log, _ in calls if log.summary), None)
    if summary is not None:
        found = [one for log, _ in calls for one in log.found]
        out |= {name: float(value) for name, value in summary(found).items()}
    return out
