"""Reward functions that tests load by name: good ones, and each kind of bad one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

RELEASE = threading.Event()
"""Set at the end of a test to let hanging functions go."""


def by_length(completions: list[str], **kwargs: Any) -> list[float]:
    """As TRL's examples have it."""
    return [float(len(text)) for text in completions]


def scaled(*, completions: list[str], factor: float = 1.0) -> list[float]:
    """With an option."""
    return [factor * len(text) for text in completions]


def needs_gold(*, completions: list[str], solution: list[str]) -> list[float]:
    """With a required column."""
    return [float(text == gold) for text, gold in zip(completions, solution, strict=True)]


def sometimes(completions: list[str], **kwargs: Any) -> list[float | None]:
    """Says nothing of completions that start with x."""
    return [None if text.startswith("x") else 1.0 for text in completions]


async def slow_async(completions: list[str], **kwargs: Any) -> list[float]:
    """Waits, as a request to a server would."""
    await asyncio.sleep(0.3)
    return [2.0] * len(completions)


async def stubborn_async(completions: list[str], **kwargs: Any) -> list[float]:
    """Hangs and will not be cancelled."""
    while not RELEASE.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    return []


async def blocking_async(completions: list[str], **kwargs: Any) -> list[float]:
    """Blocks the event loop itself."""
    RELEASE.wait(30)
    return []


def hangs(completions: list[str], **kwargs: Any) -> list[float]:
    """Hangs until the test is over."""
    RELEASE.wait(30)
    return []


def raises(completions: list[str], **kwargs: Any) -> list[float]:
    """Raises."""
    raise ValueError("no\nway")


def exits(completions: list[str], **kwargs: Any) -> list[float]:
    """Tries to end the process."""
    raise SystemExit(3)


def too_few(completions: list[str], **kwargs: Any) -> list[float]:
    """One reward short."""
    return [1.0] * (len(completions) - 1)


def one_number(completions: list[str], **kwargs: Any) -> Any:
    """No list."""
    return 1.0


def nan_at_two(completions: list[str], **kwargs: Any) -> list[float]:
    """Not a number, once."""
    return [float("nan") if i == 2 else 1.0 for i in range(len(completions))]


def wordy(completions: list[str], **kwargs: Any) -> list[Any]:
    """A word in place of a number, once."""
    return ["good" if i == 0 else 1.0 for i in range(len(completions))]


def positional(completions: list[str], /) -> list[float]:
    """Cannot be called with keywords."""
    return [1.0] * len(completions)


not_a_function = 5
