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

# Each of these takes time in line with the text's length, whatever the text: a span that does not
# close is given up at the next that opens, and nothing is looked for from every place to the end.
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_ENVIRONMENT = re.compile(r"\\begin\{(\w++\*?)\}(?:(?!\\begin\{).)*?\\end\{\1\}", re.DOTALL)
_SPANS = re.compile(
    r"\$\$(?:[^$\\]|\\.)*+\$\$|\$(?:[^$\\]|\\.)*+\$"  # mathematics
    r"|\\\((?:(?!\\\().)*?\\\)|\\\[(?:(?!\\\[).)*?\\\]"
    r"|</?[A-Za-z][^<>\n]*>"  # tags
    r"|https?://\S+"
    # A formula or a number, from where it begins: a $ within it opens nothing.
    r"|(?<![^\s。，、])[^\s。，、\d=+^_\\{}]*+[\d=+^_\\{}](?:[^\s。，、]*[^\s。，、.!?;:])?"
    r"|\\(?:[A-Za-z]+|\$)",
    re.DOTALL,
)
# What is left of one after a span; a full stop after it ends the sentence.
_TOKEN = re.compile(r"[^\s。，、]+")
_FORMULA = re.compile(r"[\d=+^_\\{}]")
_NAME = re.compile(r"(?<![^\W\d_])[A-Za-z](?![^\W\d_])")  # the names of quantities
# lingua takes time to the square of a word's length.
_LONG = re.compile(r"\S{200}")
# A character of these scripts is worth three letters.
_DENSE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_DENSE_LETTER = re.compile(f"[{_DENSE}]")
_SENTENCE = re.compile(rf"[^{_DENSE}.!?;。！？；।]+[.!?;।]*|[{_DENSE}][{_DENSE}，、\s]*[。！？；]*")


def check_language(code: str) -> None:
    """Raise KeelError if lingua is not installed, or knows no language of this code."""
    if code not in _codes():
        raise KeelError(
            f"no language {code!r}: give a two-letter code of ISO 639-1, of {' '.join(_codes())}"
        )


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language that a text is most likely in; None if none shows.

    Code, mathematics and tags do not count; fewer than 20 letters show nothing.
    """
    return _detect(prose(text))


def language_share(text: str, code: str) -> float | None:
    """The share of a text's letters that stand in passages of a language; None if none shows.

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
    passages: list[list[str]] = []
    last = 0  # letters of the last one
    for sentence in _SENTENCE.findall(text):
        letters = _letters(sentence)
        if passages and last < 2 * LEAST and _dense(passages[-1][0]) == _dense(sentence):
            passages[-1].append(sentence)
            last += letters
        elif letters:
            passages.append([sentence])
            last = letters
    return ["".join(sentences) for sentences in passages]


def _letters(text: str) -> int:
    """How many letters, in Latin ones' worth."""
    return sum(map(str.isalpha, text)) + 2 * len(_DENSE_LETTER.findall(text))


def _dense(text: str) -> bool:
    return _DENSE_LETTER.match(text) is not None


def prose(text: str) -> str:
    """A text without its code, mathematics, tags and links."""
    text = _CODE.sub(" ", text)
    for _ in range(3):  # environments in environments
        text = _ENVIRONMENT.sub(" ", text)
    return _NAME.sub(" ", _TOKEN.sub(_word, _SPANS.sub(" ", text)))


def _word(token: re.Match[str]) -> str:
    """A token that is not a formula or number; of one that is, what ends the sentence after it."""
    if not _FORMULA.search(token[0]):
        return token[0]
    return " " + token[0][len(token[0].rstrip(".!?;:")) :]


def _detect(text: str) -> str | None:
    if _letters(text) < LEAST:
        return None
    found = _detector().detect_language_of(_LONG.sub(r"\g<0> ", text))
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
