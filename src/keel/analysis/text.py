"""Text that models and data wrote, made safe to show on a terminal and on a page."""

from __future__ import annotations

import unicodedata

_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories of characters that are not seen, or that reorder what is: controls, formats
(zero-width and bidirectional marks), surrogates, private and unassigned ones, separators."""


def visible(text: str, limit: int | None = None, *, lines: bool = False) -> str:
    """The text with invisible characters written as escapes, such as `\\x1b` and `\\u202e`.

    With `lines`, newlines and tabs stay. What is longer than `limit` characters is cut, with a note
    of how many are left out. The escapes are of ASCII, so the result has no control characters, and
    runs from left to right as far as its letters do.
    """
    left = 0
    if limit is not None and len(text) > limit:
        left, text = len(text) - limit, text[:limit]
    if not text.isprintable():
        text = "".join(_shown(character, lines) for character in text)
    return f"{text}… ({left:,} more characters)" if left else text


def _shown(character: str, lines: bool) -> str:
    if unicodedata.category(character) in _INVISIBLE:
        if lines and character in "\n\t":
            return character
        return character.encode("unicode_escape").decode("ascii")
    return character
