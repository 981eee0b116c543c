"""The nearest known name to a mistaken one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most probably meant, if it is like any: fewest typing errors."""
    names = list(known)
    folded = [other for other in names if other.casefold() == name.casefold()]
    close = folded or difflib.get_close_matches(name, names, n=5, cutoff=0.6)
    return min(close, key=lambda other: _typing_errors(name, other)) if close else None


def _typing_errors(a: str, b: str) -> int:
    """Letters added, dropped, replaced, or swapped with a neighbour (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        older, before, row = before, row, [i]
        for j, y in enumerate(b, start=1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                least = min(least, older[j - 2] + 1)
            row.append(least)
    return row[-1]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """One line: there is no such thing, and what was probably meant."""
    names = sorted(known)
    guess = nearest(name, names)
    hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(names)}"
    return f"unknown {what} {name!r}: {hint}"
