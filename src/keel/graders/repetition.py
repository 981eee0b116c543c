"""Repetition: how much of a text repeats earlier words."""

from __future__ import annotations

import re

# Scripts that put no blanks between words: each character of theirs is a unit of its own.
_UNBROKEN = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNIT = re.compile(f"[{_UNBROKEN}\U00020000-\U0003ffff]|[^\\s{_UNBROKEN}\U00020000-\U0003ffff]+")


def units(text: str) -> list[str]:
    """The words of a text, case folded: what blanks part; in scripts without them, characters."""
    return _UNIT.findall(text.casefold())


def repeated_share(text: str, n: int) -> float:
    """1 − (distinct n-grams) / (n-grams) of a text's words, in [0, 1); 0 where it has none.

    The measure of the repetition penalty in arXiv 2502.03373, as a share.
    """
    words = units(text)
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
