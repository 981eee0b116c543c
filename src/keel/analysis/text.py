"""Text that models and data wrote, made safe to show on a terminal and on a page."""

from __future__ import annotations


def visible(text: str, limit: int | None = None, *, lines: bool = False) -> str:
    """The text with characters that are not seen, or that act on what is, written as escapes.

    These are those that `str.isprintable` calls so: controls (such as `\\x1b`), zero-width and
    bidirectional formats (`\\u202e`), surrogates, unassigned characters, and blanks other than the
    space. With `lines`, newlines and tabs stay. What is longer than `limit` characters is cut, with
    a note of how many are left out.
    """
    left = 0
    if limit is not None and len(text) > limit:
        left, text = len(text) - limit, text[:limit]
    if not text.isprintable():
        kept = "\n\t" if lines else ""
        text = "".join(
            c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii")
            for c in text
        )
    return f"{text}… ({left:,} more characters)" if left else text
