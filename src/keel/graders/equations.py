"""Equations that end on an answer: `x = 36`, `12 + 24 = 36`; not `2x = 36`, nor `1 + 1 = 36`."""

from __future__ import annotations

import re

from keel.graders.numbers import Number, comes_to, is_name, read_number, side_fits

_FORMULA_END = re.compile(
    r"(?:[\s\d.,$()+*/^!|{}_%'<>-]|\\(?:[A-Za-z]+|.)"
    r"|(?<![A-Za-z\\])(?:[A-Za-z]|log|ln|exp|sqrt)(?![A-Za-z]))*+\Z"
)
_EQUALS = re.compile(r"=[\s$*{(\\\[]*\Z")
_LEAD_WORD = re.compile(
    r"(?<![\\A-Za-z])(?!so|thus|then|hence|therefore|we|get|have|obtain)[a-z]{2,}\b", re.IGNORECASE
)
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_UNIT_LETTERS = re.compile(r"(?<=\d) ?[mshgLlk](?![A-Za-z])")


def may_be_equated(before: str, answer: str) -> bool:
    """Whether the equation that a box ends, if it ends one, is not false, and not of an unknown."""
    equals = _EQUALS.search(before[-300:])
    if equals is None:
        return True
    line = re.split(r"\n|[.;] ", before[-300:][: equals.start()])[-1]
    number, side = read_number(answer, evaluated=False), last_formula(line.rpartition("=")[2])
    if number is not None and comes_to(side, number) is False:
        return False
    alone = "=" not in line and _LEAD_WORD.search(line) is None and not _VARIABLE.search(answer)
    unknown = len(set(_VARIABLE.findall(side))) == 1 and not is_name(side.strip("|"))
    return not (alone and unknown)


def last_formula(words: str) -> str:
    """The formula that words end on; "" if it is a part of what they say."""
    words = words[-200:]
    starts = (at for at in range(len(words) + 1) if _FORMULA_END.match(words, at))
    start = next(starts)
    formula = _UNIT_LETTERS.sub("", words[start:]).strip(" $,.")
    part = re.search(r"\bof\s*\Z", words[:start]) or re.match(
        r"[-+*/^]|\\(?:times|cdot|div)", formula
    )
    return "" if part and words[:start].strip() else re.sub(r"\A[aAI] (?=\d)", "", formula)


def stands_for(formula: str, number: Number) -> bool:
    """Whether a formula is a name for a number or a calculation of it, so that `=` states it."""
    if not formula or is_name(formula) or re.search(r"\.\.\.|dots", formula):
        return True
    return side_fits(formula, number)
