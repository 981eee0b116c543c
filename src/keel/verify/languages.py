"""What language a text is in, by lingua: exact, the same at every call, from text alone.

In its low-accuracy mode, which reads three letters at a time: for texts of 120 characters or more
the other mode does the same, and for shorter ones it takes a gigabyte.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from keel.types import KeelError

LEAST = 20
"""Texts of fewer letters show no language."""

_NOT_PROSE = re.compile(
    r"```.*?(?:```|\Z)"  # code
    r"|`[^`\n]*`"
    r"|\\begin\{(\w+\*?)\}.*?\\end\{\1\}"  # mathematics
    r"|\$\$[^$]*\$\$|\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]"
    r"|\\[A-Za-z]+"
    r"|</?[A-Za-z][^<>\n]*>"  # tags
    r"|https?://\S+"
    # A formula or a number; a full stop behind it ends the sentence.
    r"|[^\s。，、]*[\d=+^_\\{}](?:[^\s。，、]*[^\s。，、.!?;:])?"
    r"|(?<![^\W\d_])[A-Za-z](?![^\W\d_])",  # the names of quantities
    re.DOTALL,
)
# A character of these scripts is worth three letters.
_DENSE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_DENSE_LETTER = re.compile(f"[{_DENSE}]")
_SENTENCE = re.compile(rf"[^{_DENSE}.!?;。！？；।]+[.!?;।]*|[{_DENSE}][{_DENSE}，、\s]*[。！？；]*")


def check_language(code: str) -> None:
    """Raise KeelError where lingua is not installed, or knows no language of this code."""
    if code not in _codes():
        raise KeelError(
            f"no language {code!r}: give a two-letter code of ISO 639-1, of {' '.join(_codes())}"
        )


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language that a text is most likely in; None where none shows.

    Code, mathematics and tags do not count; fewer than 20 letters show nothing.
    """
    return _detect(prose(text))


def language_share(text: str, code: str) -> float | None:
    """The share of a text's letters that stand in passages of a language; None where none shows.

    A passage is a sentence, or several short ones that follow each other in one kind of script.
    Code, mathematics, tags, and passages of no language do not count.
    """
    wanted = total = 0
    for passage in _passages(prose(text)):
        found = _detect(passage)
        if found is not None:
            total += _letters(passage)
            wanted += _letters(passage) * (found == code)
    return wanted / total if total else None


def _passages(text: str) -> list[str]:
    passages: list[str] = []
    for sentence in _SENTENCE.findall(text):
        last = passages[-1] if passages else ""
        if last and _letters(last) < 2 * LEAST and _dense(last) == _dense(sentence):
            passages[-1] += sentence
        elif _letters(sentence):
            passages.append(sentence)
    return passages


def _letters(text: str) -> int:
    """How many letters, in Latin ones' worth."""
    return sum(map(str.isalpha, text)) + 2 * len(_DENSE_LETTER.findall(text))


def _dense(text: str) -> bool:
    return _DENSE_LETTER.match(text) is not None


def prose(text: str) -> str:
    """A text without its code, mathematics, tags and links."""
    return _NOT_PROSE.sub(" ", text)


def _detect(text: str) -> str | None:
    if _letters(text) < LEAST:
        return None
    found = _detector().detect_language_of(text)
    return None if found is None else str(found.iso_code_639_1.name).lower()


@cache
def _detector() -> Any:
    return _lingua().LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode().build()


@cache
def _codes() -> tuple[str, ...]:
    every = _lingua().Language.all()
    return tuple(sorted(language.iso_code_639_1.name.lower() for language in every))


def _lingua() -> Any:
    try:
        import lingua
    except ImportError:
        raise KeelError("lingua is not installed: pip install 'keel-rl[language]'") from None
    return lingua
