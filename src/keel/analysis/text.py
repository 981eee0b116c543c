"""Text that models and data wrote, made safe to show on a terminal and on a page."""

from __future__ import annotations

import unicodedata

JOINERS = "\u200c\u200d"
"""Zero width, between letters that are written apart or together."""


def visible(
    text: str, limit: int | None = None, *, lines: bool = False, prose: bool = False
) -> str:
    """The text with characters that are not seen, or that act on what is, written as escapes.

    These are those that `str.isprintable` calls so: controls (such as `\\x1b`), zero-width and
    bidirectional formats (`\\u202e`), surrogates, unassigned characters, and blanks other than the
    space. With `lines`, newlines and tabs stay. With `prose`, blanks of any width stay, and so do
    joiners between characters that are not ASCII, which Persian, Hindi and emoji need. What is
    longer than `limit` characters is cut, with a note of how many are left out.
    """
    left = 0
    if limit is not None and len(text) > limit:
        left, text = len(text) - limit, text[:limit]
    if not text.isprintable():
        kept = "\n\t" if lines else ""
        text = "".join(
            c
            if c.isprintable() or c in kept or (prose and _is_prose(text, at))
            else c.encode("unicode_escape").decode("ascii")
            for at, c in enumerate(text)
        )
    return f"{text}… ({left:,} more characters)" if left else text


def _is_prose(text: str, at: int) -> bool:
    """Whether a character that does not print is a blank, or joins two that do."""
    if text[at] not in JOINERS:
        return unicodedata.category(text[at]) == "Zs"
    around = text[max(at - 1, 0) : at] + text[at + 1 : at + 2]
    return len(around) == 2 and around.isprintable() and not any(c.isascii() for c in around)
