"""What a reward function returned, checked, and what it logged.

It returns one number, None or list of steps a completion; it logs a value for each completion, and
numbers of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from keel.runs.values import plain
from keel.types import KeelError, Step


@dataclass(frozen=True, slots=True)
class Wrong:
    """What a reward returns in the place of a number if one completion cannot be judged.

    Such as for a row of data that it cannot read: the others of the step keep their rewards.
    """

    why: str


class BadReturn(Exception):
    """What is wrong with all that a function returned."""


@dataclass(frozen=True, slots=True)
class RewardOutput:
    """What a reward says of one completion; `wrong` says why it cannot be used.

    `steps` is None if it gave a number; with an empty list there are no steps to reward, and
    `value`, their sum, is 0.
    """

    value: float | None = None
    steps: tuple[Step, ...] | None = None
    wrong: str | None = None


def read_rewards(returned: Any, places: Sequence[Sequence[int]]) -> list[RewardOutput]:
    """What each completion gets; `places` are those of its written tokens, which steps count.

    Raises BadReturn if the values cannot be matched to samples.
    """
    if hasattr(returned, "tolist"):  # numpy arrays and torch tensors
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        kind = type(returned).__name__
        raise BadReturn(f"returned a {kind}, not a list: return one reward a completion")
    if len(returned) != len(places):
        raise BadReturn(
            f"returned {len(returned)} rewards for {len(places)} completions: return one for "
            "each, None if it does not apply"
        )
    return [_read(value, own) for value, own in zip(returned, places, strict=True)]


def _read(value: Any, places: Sequence[int]) -> RewardOutput:
    if value is None:
        return RewardOutput()
    if isinstance(value, Wrong):
        return RewardOutput(wrong=value.why)
    if isinstance(value, list | tuple):
        return _read_steps(value, places)
    number = _number(value)
    if number is None:
        return RewardOutput(
            wrong=f"{value!r:.60} is a {type(value).__name__}, not a number or None"
        )
    if not math.isfinite(number):
        return RewardOutput(
            wrong=f"{number} is not finite: return None if the reward does not apply"
        )
    return RewardOutput(number)


def _read_steps(value: Sequence[Any], places: Sequence[int]) -> RewardOutput:
    ends: list[int] = []
    rewards: list[float] = []
    for pair in value:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return RewardOutput(
                wrong=f"{pair!r:.60} is not a step: give (index of its last token, reward)"
            )
        end, reward = pair[0], _number(pair[1])
        if not isinstance(end, Integral) or not 0 <= int(end) < len(places):
            return RewardOutput(wrong=f"step end {end!r:.60} is not a token of the {len(places)}")
        if reward is None or not math.isfinite(reward):
            return RewardOutput(wrong=f"step reward {pair[1]!r:.60} is not a finite number")
        ends.append(int(end))
        rewards.append(reward)
    if sorted(set(ends)) != ends:
        return RewardOutput(wrong=f"step ends {ends!r:.60} do not rise")
    steps = tuple(Step(places[end], reward) for end, reward in zip(ends, rewards, strict=True))
    return RewardOutput(sum(rewards), steps)


def _number(value: Any) -> float | None:
    if hasattr(value, "item"):  # numpy and torch scalars
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return None
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


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
