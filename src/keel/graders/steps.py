"""An answer in steps: where each begins and ends in its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from keel.types import KeelError

Aggregate = Literal["min", "last", "product", "mean"]


def split_steps(text: str, separator: str) -> list[tuple[int, int]]:
    """Spans (start, end) of the steps, which cover the text without gaps.

    A step holds the separator that closes it; a blank one belongs to the step before it (the first
    to the one after it). No span for an empty text. Raises KeelError for an empty separator.
    """
    if not separator:
        raise KeelError('separator = "" divides nothing: give what stands between two steps')
    spans: list[tuple[int, int]] = []
    start = at = 0
    while at < len(text):
        found = text.find(separator, at)
        end = len(text) if found < 0 else found + len(separator)
        if text[at:end].removesuffix(separator).strip():
            spans.append((start, end))
            start = end
        elif spans:
            spans[-1] = (spans[-1][0], end)
            start = end
        at = end
    if start < len(text):
        spans.append((start, len(text)))
    return spans


def aggregate(right: Sequence[float], how: Aggregate) -> float:
    """The judgement of a whole answer from the probabilities of its steps being right.

    min: as good as the worst step. last: what is thought at the end. product: that all are right,
    taken as independent. mean. An answer without a step gets 0.
    """
    if not right:
        return 0.0
    if how == "min":
        return min(right)
    if how == "last":
        return right[-1]
    if how == "product":
        return math.prod(right)
    if how == "mean":
        return sum(right) / len(right)
    raise KeelError(f'aggregate = "{how}": give min, last, product or mean')
