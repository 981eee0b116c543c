"""Gold answers in rows of data: a text or number, or a list of which any entry is right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

EXACT = 2**53
"""Up to here every whole number is a float."""


def read_gold(value: Any) -> Any:
    """The answer without what tables add; None if it is empty.

    NaN and a blank text are empty, and 14.0 is 14: a column of numbers with gaps holds floats. A
    list loses its empty entries. Raises ValueError with what the value holds instead of an answer.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        return _scalar(value)
    entries = map(_scalar, value)
    return [one for one in entries if one is not None] or None


def gold_entries(gold: Any) -> list[Any]:
    """The answers of what `read_gold` returns, any of which is right."""
    return gold if isinstance(gold, list) else [] if gold is None else [gold]


def shown_gold(value: Any) -> str | None:
    """A column's answers as a text to read; None if there are none."""
    try:
        golds = gold_entries(read_gold(value))
        return " or ".join(map(str, golds)) if golds else None
    except ValueError:
        return str(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, Mapping):
        raise ValueError(f"a table of {', '.join(map(str, value))[:80]}")
    if isinstance(value, list | tuple | set | bytes):
        raise ValueError(f"a {type(value).__name__} in it")
    if isinstance(value, float | Decimal):
        if math.isnan(value):
            return None
        return int(value) if -EXACT < value < EXACT and value % 1 == 0 else value
    return None if isinstance(value, str) and not value.strip() else value
