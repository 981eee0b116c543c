"""Instructions that a program can check, by the names and arguments of IFEval's data set.

What each asks for is arXiv:2311.07911, table 1. Words are runs of letters, digits and `_`;
sentences end at `.`, `!` or `?` before a blank; paragraphs at `***` or an empty line, as the
instruction says.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keel.types import KeelError

Language = Callable[[str], str | None]
"""The ISO 639-1 code of a text's language; None if none shows."""
SCRIPTS = {"kn": "KANNADA", "ne": "DEVANAGARI"}
"""Languages that the detector does not know, by the script that they are written in."""
_RELATIONS = ("less than", "at least")
_ANSWERS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
_FENCE = re.compile(r"\A```\w*\n?(.*?)\n?```\Z", re.DOTALL)


def followed(
    text: str,
    names: Sequence[str],
    arguments: Sequence[Mapping[str, Any]],
    language: Language,
    *,
    loose: bool = False,
) -> list[bool]:
    """Whether a text follows each instruction. An empty text follows none.

    `loose`: if one of eight forms of it does: with or without its first line, its last line, and
    its asterisks. Raises KeelError for an instruction that is not one of the data set.
    """
    forms = [text]
    if loose:
        lines = text.split("\n")
        parts = [lines, lines[1:], lines[:-1], lines[1:-1]]
        cut = ["\n".join(part).strip() for part in parts]
        forms = [text, *cut[1:], *(one.replace("*", "") for one in (text, *cut[1:]))]
    found = []
    for name, given in zip(names, arguments, strict=True):
        if name not in CHECKS:
            raise KeelError(f"{name!r} is not an instruction of IFEval")
        own = {key: value for key, value in given.items() if value is not None}
        if name in _BY_LANGUAGE:
            own["detect"] = language
        try:
            found.append(any(form.strip() and CHECKS[name](form, **own) for form in forms))
        except TypeError as error:
            raise KeelError(f"instruction {name!r} with {own!r:.100}: {error}") from None
    return found


def _compares(count: int, wanted: int, relation: str | None) -> bool:
    if relation not in _RELATIONS:
        raise KeelError(f"relation {relation!r}: {' or '.join(map(repr, _RELATIONS))}")
    return count < wanted if relation == "less than" else count >= wanted


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _holds(text: str, phrase: str) -> int:
    """How often a phrase occurs, whatever its case."""
    return len(re.findall(re.escape(phrase), text, re.IGNORECASE))


def _is_json(text: str) -> bool:
    inside = _FENCE.match(text.strip())
    try:
        json.loads(inside[1] if inside else text)
    except (ValueError, RecursionError):
        return False
    return True


def _paragraph_begins(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    found = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(found) != num_paragraphs or not 1 <= nth_paragraph <= len(found):
        return False
    word = re.match(r"[\"'“‘*_#\s]*([^\s.,?!\"'”’*]*)", found[nth_paragraph - 1])
    return word is not None and word[1].lower() == first_word.lower()


def _divided(text: str, divider: str) -> list[str]:
    """The parts between dividers; empty ones at either end are none."""
    parts = [part.strip() for part in text.split(divider)]
    return parts[not parts[0] : len(parts) - (not parts[-1] and len(parts) > 1)]


def _sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    splits = re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)
    return len(splits) >= num_sections


def _highlights(text: str, *, num_highlights: int) -> bool:
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(one.strip()) for one in (*single, *double)) >= num_highlights


def _postscript(text: str, *, postscript_marker: str) -> bool:
    spaced = r"\s?".join(map(re.escape, re.sub(r"\s", "", postscript_marker)))
    return re.search(spaced, text, re.IGNORECASE) is not None


def _in_language(text: str, *, language: str, detect: Language) -> bool:
    if language in SCRIPTS:
        letters = [c for c in text if c.isalpha()]
        of_script = [c for c in letters if unicodedata.name(c, "").startswith(SCRIPTS[language])]
        return 2 * len(of_script) > len(letters)
    return detect(text) in (language, None)


def _english(text: str, same_case: bool, detect: Language) -> bool:
    return same_case and detect(text.lower()) in ("en", None)


def _no_repeats(parts: Sequence[str]) -> bool:
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda t, *, keywords: all(_holds(t, one) for one in keywords),
    "keywords:frequency": lambda t, *, keyword, frequency, relation: _compares(
        _holds(t, keyword), frequency, relation
    ),
    "keywords:forbidden_words": lambda t, *, forbidden_words: (
        not any(re.search(rf"\b{re.escape(one)}\b", t, re.IGNORECASE) for one in forbidden_words)
    ),
    "keywords:letter_frequency": lambda t, *, letter, let_frequency, let_relation: _compares(
        t.lower().count(letter.lower()), let_frequency, let_relation
    ),
    "language:response_language": _in_language,
    "length_constraints:number_sentences": lambda t, *, num_sentences, relation: _compares(
        sum(bool(_words(one)) for one in re.split(r"(?<=[.!?])\s+", t)), num_sentences, relation
    ),
    "length_constraints:number_paragraphs": lambda t, *, num_paragraphs: (
        all(parts := _divided(t, "***")) and len(parts) == num_paragraphs
    ),
    "length_constraints:number_words": lambda t, *, num_words, relation: _compares(
        len(_words(t)), num_words, relation
    ),
    "length_constraints:nth_paragraph_first_word": _paragraph_begins,
    "detectable_content:number_placeholders": lambda t, *, num_placeholders: (
        len(re.findall(r"\[[^\n]*?\]", t)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda t, *, num_bullets: (
        len(re.findall(r"^\s*(?:\*(?!\*)|-)", t, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda t: any(a in t.lower() for a in _ANSWERS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda t: re.search(r"<<[^\n>]*[^\n\s>][^\n>]*>>", t) is not None,
    "combination:two_responses": lambda t: _no_repeats(_divided(t, "******")),
    "combination:repeat_prompt": lambda t, *, prompt_to_repeat: (
        t.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda t, *, end_phrase: (
        t.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda t: (
        len(t.strip()) > 1 and t.strip()[0] == '"' and t.strip()[-1] == '"'
    ),
    "change_case:capital_word_frequency": lambda t, *, capital_frequency, capital_relation: (
        _compares(sum(w.isupper() for w in t.split()), capital_frequency, capital_relation)
    ),
    "change_case:english_capital": lambda t, *, detect: _english(t, t.isupper(), detect),
    "change_case:english_lowercase": lambda t, *, detect: _english(t, t.islower(), detect),
    "punctuation:no_comma": lambda t: "," not in t,
}
"""Whether a text follows an instruction, by its name and the arguments of the data set."""
_BY_LANGUAGE = (
    "language:response_language",
    "change_case:english_capital",
    "change_case:english_lowercase",
)
