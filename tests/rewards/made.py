"""Rewards made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keel.config.sources import RewardSource
from keel.rewards import Scored
from keel.rewards.registry import NamedReward, named_reward


def named(function: Callable[..., Any] | None, name: str | None = None, **keys: Any) -> NamedReward:
    """A function as the reward of a source with these keys; without one, a name with its keys."""
    name = name or getattr(function, "__name__", type(function).__name__)
    assert name is not None
    source = RewardSource(function=name, name=name, **keys)
    return NamedReward(name, source) if function is None else named_reward(function, source)


def flat(scored: Scored) -> list[float | None]:
    """The rewards of a step, one after the other."""
    return [result.reward for results in scored.results for result in results]
