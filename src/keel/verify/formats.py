"""Formats: whether a text has the shape that was asked for, and what stands in its parts."""

from __future__ import annotations

import re
from collections.abc import Sequence


def matches(pattern: str | re.Pattern[str], text: str) -> bool:
    """Whether a regular expression is found in the text, less the blanks around it.

    `^` and `$` are the ends of the text, and `.` matches newlines too. Raises re.error for a
    pattern that is none.
    """
    compiled = re.compile(pattern, re.DOTALL) if isinstance(pattern, str) else pattern
    return compiled.search(text.strip()) is not None


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Whether the text is `<a>…</a><b>…</b>…`: each tag once, in order, nothing but blanks between.

    So `tags = ("think", "answer")` asks for `<think>…</think> <answer>…</answer>`.
    """
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
            return False
        _, found, rest = rest.partition(closing)
        if not found:
            return False
        rest = rest.lstrip()
    return not rest


def tag_content(text: str, tag: str) -> str | None:
    """What stands in the last complete `<tag>…</tag>`, less the blanks around it; None without."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    if end < 0 or start < 0:
        return None
    return text[start + len(tag) + 2 : end].strip()
