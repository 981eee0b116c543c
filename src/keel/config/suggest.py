"""The nearest known name to a mistaken one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, if any is like it."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """One line: there is no such thing, and what was probably meant."""
    names = sorted(known)
    guess = nearest(name, names)
    mend = f"did you mean {guess!r}?" if guess else f"known: {', '.join(names)}"
    return f"unknown {what} {name!r}: {mend}"
