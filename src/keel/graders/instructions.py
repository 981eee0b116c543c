"""Instructions that a program can check, by the names and arguments of IFEval's data set.

What each asks for is arXiv:2311.07911, table 1; what counts as following it is what the published
program counts (google-research/instruction_following_eval), its oddities included, but for two
things that need large models there. Sentences are separated by punctuation and the commonest
abbreviations, not by NLTK's Punkt; the language is what a detector says of the prose, not
langdetect, and any if none shows.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

from keel.types import KeelError

Language = Callable[[str], str | None]
"""The ISO 639-1 code of a text's language; None if none shows."""
SCRIPTS = {"kn": "KANNADA", "ne": "DEVANAGARI"}
"""Languages that the detector does not know, by the script that they are written in."""
_RELATIONS = ("less than", "at least")
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCE = re.compile(r"\A```(?:json|Json|JSON)?|```\Z")
_ENDS = re.compile(r"""[.!?]["'”’)\]]*\s+""")
"""What may end a sentence, up to the next one."""
_TITLE = re.compile(
    r"\b(?:mr|mrs|ms|dr|prof|st|gen|col|lt|sgt|rev|sen|rep|gov|vs|e\.g|i\.e|cf|(?-i:[A-HJ-Z]))\.\Z",
    re.IGNORECASE,
)
"""Abbreviations that no sentence ends with."""
_SHORT = re.compile(
    r"\b(?:etc|inc|ltd|co|corp|jr|sr|approx|a\.m|p\.m|u\.s|u\.k|ph\.d)\.\Z|\.\.\Z", re.IGNORECASE
)
"""What no sentence ends with if a small letter follows."""
LONGEST = 12
"""Characters before a full stop that show whether an abbreviation ends there."""
_APART = re.compile(
    r"""\.\.\.|--|[,:](?=\D|\Z)|[;@\#$%&?!()\[\]{}<>]|["“”„‘’«»]|``|''"""
    r"""|(?=n't\b)|(?='(?:s|m|d|ll|re|ve)\b)|(?='\s)|(?<=\bcan)(?=not\b)|(?<=\bgon)(?=na\b)""",
    re.IGNORECASE,
)
"""What NLTK's word_tokenize takes apart, as far as it makes capital words."""


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
    checks = [_check(name, given, language) for name, given in _paired(names, arguments)]
    return [any(form.strip() and check(form) for form in forms) for check in checks]


def _paired(names: Any, arguments: Any) -> list[tuple[Any, Any]]:
    """The instructions of a row, each with its arguments. Raises KeelError for other columns."""
    lists = isinstance(names, list | tuple) and isinstance(arguments, list | tuple)
    if not lists or len(names) != len(arguments):
        shown = f"{names!r:.80} and {arguments!r:.80}"
        raise KeelError(
            f"instruction_id_list and kwargs hold {shown}: give a list of names, and a list with "
            "the arguments of each"
        )
    return list(zip(names, arguments, strict=True))


def _check(name: Any, given: Any, language: Language) -> Callable[[str], bool]:
    """An instruction with its arguments. Raises KeelError for one that is not of the data set."""
    if name not in CHECKS:
        raise KeelError(f"instruction_id_list: {name!r} is not an instruction of IFEval")
    if not isinstance(given, Mapping):
        raise KeelError(f"kwargs of {name!r}: {given!r:.80} is not a table of arguments")
    own = {key: value for key, value in given.items() if value is not None}
    wanted = set(list(signature(CHECKS[name]).parameters)[1:]) - {"detect"}
    if wanted != own.keys():
        raise KeelError(
            f"kwargs of {name!r} hold {', '.join(sorted(own)) or 'nothing'}: the instruction has "
            f"the arguments {', '.join(sorted(wanted)) or 'none'}"
        )
    if name in _BY_LANGUAGE:
        own["detect"] = language
    return partial(CHECKS[name], **own)


def _compares(count: int, wanted: int, relation: str | None) -> bool:
    if relation not in _RELATIONS:
        raise KeelError(f"relation {relation!r}: {' or '.join(map(repr, _RELATIONS))}")
    return count < wanted if relation == "less than" else count >= wanted


def _sentences(text: str) -> int:
    count, start = 0, 0
    for found in _ENDS.finditer(text):
        opening = max(start, found.start() - LONGEST)
        said, after = text[opening : found.start() + 1], text[found.end() : found.end() + 1]
        if _TITLE.search(said) or (after.islower() and _SHORT.search(said)):
            continue
        count, start = count + 1, found.end()
    return count + bool(text[start:].strip())


def _capitals(text: str) -> int:
    """The number of words in capital letters."""
    return sum(word.isupper() for word in _APART.sub(" ", text).split())


def _holds(text: str, phrase: str) -> int:
    """How often a phrase occurs, whatever its case."""
    return len(re.findall(re.escape(phrase), text, re.IGNORECASE))


def _is_json(text: str) -> bool:
    try:
        json.loads(_FENCE.sub("", text.strip()))
    except (ValueError, RecursionError):
        return False
    return True


def _paragraph_begins(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Empty paragraphs do not count, but the number of the paragraph does count them."""
    found = [part.strip() for part in text.split("\n\n")]
    if sum(map(bool, found)) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    word = re.match(r"'*\"*([^\s.,?!'\"]*)", found[nth_paragraph - 1])
    return word is not None and word[1].lower() == first_word.lower()


def _divided(text: str, divider: str) -> list[str]:
    """The parts between dividers; empty ones at either end are none."""
    parts = [part.strip() for part in text.split(divider)]
    return parts[not parts[0] : len(parts) - (not parts[-1] and len(parts) > 1)]


def _sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def _highlights(text: str, *, num_highlights: int) -> bool:
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(one.strip()) for one in (*single, *double)) >= num_highlights


def _postscript(text: str, *, postscript_marker: str) -> bool:
    spaced = re.escape(postscript_marker.strip()).replace(r"\.", r"\.\s?")
    return re.search(spaced, text, re.IGNORECASE) is not None


def _bullets(text: str) -> int:
    """A star needs something after it, even if that is the next line."""
    stars = re.findall(r"^\s*\*(?:\n|[^*]).*", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-", text, re.MULTILINE))


def _titled(text: str) -> bool:
    found = re.findall(r"<<(.+)>>", text)
    return any(one.lstrip("<").rstrip(">").strip() for one in found)


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
        _holds(t, keyword.strip()), frequency, relation
    ),
    "keywords:forbidden_words": lambda t, *, forbidden_words: (
        not any(re.search(rf"\b{re.escape(one)}\b", t, re.IGNORECASE) for one in forbidden_words)
    ),
    "keywords:letter_frequency": lambda t, *, letter, let_frequency, let_relation: _compares(
        t.lower().count(letter.lower()), let_frequency, let_relation
    ),
    "language:response_language": _in_language,
    "length_constraints:number_sentences": lambda t, *, num_sentences, relation: _compares(
        _sentences(t), num_sentences, relation
    ),
    "length_constraints:number_paragraphs": lambda t, *, num_paragraphs: (
        all(parts := _divided(t, "***")) and len(parts) == num_paragraphs
    ),
    "length_constraints:number_words": lambda t, *, num_words, relation: _compares(
        len(re.findall(r"\w+", t)), num_words, relation
    ),
    "length_constraints:nth_paragraph_first_word": _paragraph_begins,
    "detectable_content:number_placeholders": lambda t, *, num_placeholders: (
        len(re.findall(r"\[[^\n]*?\]", t)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda t, *, num_bullets: _bullets(t) == num_bullets,
    "detectable_format:constrained_response": lambda t: any(a in t for a in _ANSWERS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _titled,
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
        _compares(_capitals(t), capital_frequency, capital_relation)
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
