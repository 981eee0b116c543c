"""Reward functions for tests of the loop: good ones, and one for each way to go wrong."""

from __future__ import annotations

import asyncio
import time
from typing import Any


def digits_in_order(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    """A process reward: a step at every second token, worth more the smaller the token."""
    return [
        [(end, 1.0 / (1 + ids[end])) for end in range(min(1, len(ids) - 1), len(ids), 2)]
        for ids in completion_ids
    ]


def raises(completions: list[str]) -> list[float]:
    raise RuntimeError("the grader\nfell over")


def nan(completions: list[str]) -> list[float]:
    return [float("nan")] * len(completions)


def too_few(completions: list[str]) -> list[float]:
    return [1.0]


def hangs(completions: list[str]) -> list[float]:
    time.sleep(600)
    return [0.0] * len(completions)


def needs_column(completions: list[str], solution: list[str]) -> list[float]:
    return [0.0] * len(completions)


def records_now_and_then(
    completion_ids: list[list[int]], log_extra: Any, trainer_state: Any
) -> list[float]:
    """Rewards that leave some groups without variance; records in two rounds of three."""
    lengths = [len(ids) for ids in completion_ids]
    if sum(lengths) % 3:
        log_extra("tokens", lengths)
    short = [float(length < 4) for length in lengths]
    # The first group of every call is flat, so that there is always something to refill.
    return [1.0] * 4 + short[4:]


def never(completions: list[str]) -> list[None]:
    return [None] * len(completions)


def shouts(prompt: Any, gold: str, rng: Any) -> str:
    return gold + "!"


def rambles(prompt: Any, gold: str, rng: Any) -> str:
    return gold * 20


def falls(prompt: Any, gold: str, rng: Any) -> str:
    raise RuntimeError("no teacher")


LOOPS: list[Any] = []
"""The event loops that `in_a_loop` ran in."""


async def in_a_loop(completions: list[str]) -> list[float]:
    LOOPS.append(asyncio.get_running_loop())
    return [float(len(text) % 2) for text in completions]


def only_at_first(completions: list[str], trainer_state: Any) -> list[float | None]:
    """None at the second step; otherwise by length, so that groups have variance."""
    at = trainer_state.global_step
    return [None if at == 2 else float(len(text) % 3) for text in completions]


TEXTS: list[str] = []
"""What `remembers` was called with."""


def remembers(completions: list[str]) -> list[float]:
    """The lengths of the texts, which are kept."""
    TEXTS.extend(completions)
    return [float(len(text)) for text in completions]
