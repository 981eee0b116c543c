"""Rewards for how a text is written, whatever it says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keel.graders.formats import repeated_share
from keel.rewards.rules import texts
from keel.types import KeelError


def repetition(*, completions: Sequence[Any], n: int = 3, max_penalty: float = 1.0) -> list[float]:
    """−`max_penalty` times the share of the words' `n`-grams that occur earlier in the text.

    0 for a text of fewer than `n` words. Raises KeelError for `n` under 1 or a penalty under 0.
    """
    if n < 1:
        raise KeelError(f"n = {n}: give at least 1")
    if not 0 <= max_penalty < math.inf:
        raise KeelError(f"max_penalty = {max_penalty:g}: give at least 0; it is taken off")
    return [0.0 - max_penalty * repeated_share(text, n) for text in texts(completions)]
