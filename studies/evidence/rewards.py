"""Rewards and demonstrations of the evidence's recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keel.types import Prompt


def digits(
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


def dotted(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The right answer and up to eight dots that mean nothing."""
    return gold + "." * int(rng.integers(0, 9))


def before_dots(*, completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the text before the first dot is the answer, however many dots follow."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.partition(".")[0] == gold) for text, gold in pairs]
