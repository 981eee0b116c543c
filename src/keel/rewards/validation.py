"""What a reward function returned, checked: one number, None or list of steps a completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from keel.types import Step


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
