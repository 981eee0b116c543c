"""Formats: whether a text has the shape that was asked for, and what stands in its parts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import regex

SECONDS = 5
"""Of computing, that a search of one text may take; one that may backtrack takes far longer."""


_BLANKS = "\u2800\u3164\u115f\u1160\uffa0\u034f"
"""Characters that show nothing and are not spaces."""


def matches(pattern: str, texts: Sequence[str]) -> list[bool | None]:
    """Whether a regular expression is found in each text, less the blanks around it.

    `^` and `$` are the ends of the text, and `.` matches newlines too. None of a text for which the
    search takes more than SECONDS. Raises re.error for a pattern that is not valid.
    """
    re.compile(pattern, re.DOTALL)
    try:
        search = regex.compile(pattern, regex.DOTALL).search
    except regex.error as error:
        raise re.error(str(error)) from None
    found: list[bool | None] = []
    for text in texts:
        try:
            found.append(search(text.strip(), timeout=SECONDS) is not None)
        except TimeoutError:
            found.append(None)
    return found


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Whether the text is `<a>…</a><b>…</b>…`: each tag once, in order, with something in each and
    nothing but blanks between.

    So `tags = ("think", "answer")` asks for `<think>…</think> <answer>…</answer>`.
    """
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
            return False
        content, found, rest = rest.removeprefix(opening).partition(closing)
        if not found or not any(c.isprintable() and c not in _BLANKS for c in content if c.strip()):
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


def normalise(text: str) -> str:
    """Case folded, composed (NFKC), runs of blanks as one, without full stops at the end.

    Characters whose place is a meaning (`²`, `½`, `①`, `㎡`) stay: `3²` is not `32`.
    """
    return " ".join(_composed(_composed(text).casefold()).split()).rstrip(" .")


_PLACED = re.compile("<(?:super|sub|fraction|circle|square)>")


def _composed(text: str) -> str:
    def form(c: str) -> str:
        placed = _PLACED.match(unicodedata.decomposition(c))
        return c if placed else unicodedata.normalize("NFKC", c)

    return unicodedata.normalize("NFC", "".join(map(form, text)))


def same_text(a: str, b: str, *, normalised: bool = False) -> bool:
    """Whether two texts are equal: less the blanks around them, or `normalised`."""
    return normalise(a) == normalise(b) if normalised else a.strip() == b.strip()


# Scripts that put no blanks between words: each character of theirs is a unit.
_UNBROKEN = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNIT = re.compile(f"[{_UNBROKEN}\U00020000-\U0003ffff]|[^\\s{_UNBROKEN}\U00020000-\U0003ffff]+")


_RUN = re.compile(r"(\S{1,32}?)\1{2,}")
_PLAIN_RUN = 64
"""Characters of a run of digits or signs, as in a number or the border of a table, that is one."""


def units(text: str) -> list[str]:
    """The words of a text, case folded: what blanks part; in scripts without them, characters.

    A run without blanks (`hahaha`) is as many words as it has repetitions.
    """
    return _UNIT.findall(_RUN.sub(_spread, text.casefold()))


def _spread(run: re.Match[str]) -> str:
    unit = run[1]
    plain = unit.isascii() and not any(map(str.isalpha, unit)) and len(run[0]) <= _PLAIN_RUN
    return run[0] if plain else f" {unit}" * (len(run[0]) // len(unit)) + " "


def repeated_share(text: str, n: int) -> float:
    """1 − (distinct n-grams) / (n-grams) of a text's words, in [0, 1); 0 if it has none.

    The measure of the repetition penalty in arXiv 2502.03373, as a share.
    """
    words = units(text)
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
