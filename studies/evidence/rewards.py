"""Rewards and demonstrations of the evidence's recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def characters(
    *,
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str],
    **_: Any,
) -> list[list[tuple[int, float]]]:
    """A step reward for each character (one token each): 1 while all so far are the answer's.

    The token that ends the completion is a step too, right where the whole text is.
    """
    found = []
    for text, ids, gold in zip(completions, completion_ids, answer, strict=True):
        right = [float(gold.startswith(text[: end + 1])) for end in range(len(text))]
        found.append(list(enumerate([*right, float(text == gold)][: len(ids)])))
    return found


def characters_written(*, completions: Sequence[str], **_: Any) -> list[float]:
    """The length of each answer, which differs even where a policy knows nothing."""
    return [float(len(text)) for text in completions]


def seldom_right(prompt: Any, gold: str, rng: np.random.Generator) -> str:
    """The gold answer with its first and last character exchanged in 99 of 100."""
    return gold[-1] + gold[1:-1] + gold[0] if rng.random() < 0.99 and len(gold) > 1 else gold
