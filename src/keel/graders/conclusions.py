"""What a sentence without a mark comes to: its number, or its formula.

The number is in the last clause with one, after its last `=` or else verb of being; what an
equation says of it has to hold.
"""

from __future__ import annotations

import re
from dataclasses import replace

from keel.graders.numbers import (
    IN_PROSE,
    LATEX_UNITS,
    Number,
    is_name,
    name_of,
    only_units,
    read_number,
    side_fits,
)
from keel.graders.prose import WORD, follows, leads
from keel.graders.reading.arithmetic import comes_to
from keel.graders.reading.notation import FORMULA, spaced
from keel.graders.reading.words import UNBROKEN, pattern

SYMBOL = re.compile(r"[\d$\\]")
"""What a number or formula holds."""
LABEL = re.compile(r"(?=[^:\n]{0,60}[A-Za-z]{2})([^:\n\\$={}]{1,60}):(?!\d)(.*)", re.DOTALL)
BETWEEN = re.compile(
    r"(?:[\s$,;.*&|/-]|^[^\w\n]{0,16}\d{1,3}[.)]|\\[\[\]() ,;:]|\\(?:text|quad|qquad|\\)|[{}~]"
    r"|\b(?:and|or|either|maybe|perhaps|possibly|also|alternatively|else|otherwise)\b)*+",
    re.MULTILINE,
)
"""What stands between the parts of a list."""
_COMMAND = re.compile(r"\\(?:text|mbox|mathrm) ?\{[^{}]*\}|\\[A-Za-z]+(?:\{[a-z]*matrix\})?")
_DELIMITERS = re.compile(r"\\[()\[\]]|\*\*|__")
_START = re.compile(r"(?<!\^)(?<!\^\{)[-+]?(?:\b(?:US|CA|AU))?\\?[$€£¥₹]?-?(?:\.?\d|\\[dt]?frac)")
_BEING = pattern("being")
_VAGUE = pattern("vague")
_EXPLAINS = pattern("explains", re.IGNORECASE | re.DOTALL)
_CONSEQUENCE = pattern("consequence")
_CLAUSE = re.compile(
    rf"[,;](?=[\s{UNBROKEN}])|\s(?=(?:so|thus|hence|therefore|which|making|giving|leaving|meaning)\b)",
    re.IGNORECASE,
)
_RELATIVE = re.compile(r"\b(?:who|that|which)(?: \w+)? ?(?:not\b|n['’]t)", re.IGNORECASE)
_CONTRAST = re.compile(
    r"(?:(?:\b(?:is|are|was|were)|['’]s)(?:n['’]t| not)|^not) [^,;.]{1,30} but (?:rather )?"
)
_UNSURE = re.compile(r"\b(?:or|not|either|n't)\b|[<>]", re.IGNORECASE)
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


def shortened(answer: str) -> str:
    """A statement less the clause after its number that explains it: `18, because 9 + 9 is`."""
    found = _EXPLAINS.search(answer)
    return answer[: found.start()] if found and SYMBOL.search(answer[: found.start()]) else answer


def number_of(sentence: str, *, evaluated: bool = True) -> Number | None:
    """The number that a sentence comes to. Candidates in turn (`4 or 3`; `4, 3`) are not one."""
    sentence = _CONTRAST.sub("is ", sentence).replace("=>", ": ")
    sentence = shortened(_DELIMITERS.sub("", spaced(sentence).replace("\\approx ", "= ")))
    sentence = sentence.rpartition("\\equiv")[2]
    before, equals, after = sentence.rpartition("=")
    found = _in_last_clause(after, evaluated)
    if not equals or found is None:
        return found
    first, *others = re.split("=", _CONSEQUENCE.split(before)[-1])
    if not leads(re.split("[,;] ", first)[-1] + " =") or _UNSURE.search(before):
        return None
    side = last_formula(first)
    if not stands_for(side, found) or not all(side_fits(one, found, 1) for one in others):
        return None  # x = 4, y = 3
    words = side.replace("$", " ").split()
    return replace(found, name=name_of(words[-1]) if words else "")


def _in_last_clause(words: str, evaluated: bool) -> Number | None:
    clauses = _CLAUSE.split(words)
    numbered = [at for at, clause in enumerate(clauses) if re.search(r"\d", clause)]
    if not numbered:
        return None
    clause = clauses[numbered[-1]]
    earlier = "".join(clauses[: numbered[-1]])
    if re.match(r"[\s$]*(?:(?:and|or|also) )?[$(-]*[\d.]", clause) and SYMBOL.search(earlier):
        return None  # a list: 4, 3
    if re.match(r"\s*which\b", clause) and (number := _in_last_clause(earlier, evaluated)):
        return _in_last_clause(clause.replace("which", "that", 1), evaluated) or number
    found: list[tuple[int, int, Number | None]] = []
    at = 0
    while start := _START.search(clause, at):
        at, number = number_at(clause, start.start(), evaluated=evaluated)
        ahead = clause[: start.start()]
        apart = not ahead or re.search(rf"[ $(:{{~{UNBROKEN}]\Z", ahead)
        found.append((start.start(), at, number if apart and leads(ahead) else None))
    if not found or _VAGUE.search(_RELATIVE.sub(" ", clause[: found[-1][0]])):
        return None
    numbers = found
    for verb in reversed(list(_BEING.finditer(clause))):
        if numbers := [one for one in found if one[0] >= verb.end()]:
            break
    numbers = numbers or found
    if "\\" in clause[: numbers[0][0]]:
        return None
    direct = numbers is not found or not clause[: numbers[0][0]].strip(" $({")
    # `$18 a day for 5 days`: which of them is not stated
    return numbers[0][2] if direct or len(numbers) == 1 else None


def number_at(text: str, start: int, *, evaluated: bool = True) -> tuple[int, Number | None]:
    """The number that begins at `start`, with the unit after it, and where it ends.

    None if what follows makes it another number, or something other than a unit is joined to it.
    """
    found = IN_PROSE.match(text, start)
    if found is None:
        return start + 1, None
    end = found.end()
    latex = LATEX_UNITS.match(text, end)
    if latex and latex[0].strip() and only_units(latex[0]):
        whole = read_number(found[0] + latex[0], evaluated=evaluated)
        return latex.end(), whole if follows(text, latex.end()) else None
    joined = re.compile(r"\S*").match(text, end)[0]  # type: ignore[index]
    unit = joined.rstrip(".,;:!?)]}*_\"'$")
    word = re.compile(r"\S*\s+((?:square|sq|cubic|cu)\.? )?([^\s,;:.)]+)").match(text, end)
    if not follows(text, end):
        return end, None
    if unbroken := re.match(r"[^\x00-\u0e00\W\d_]+", joined):
        unit, joined = unbroken[0], ""  # no blank stands between words
    if "!" in joined or (
        unit and not re.fullmatch(r"(?:-[A-Za-z]|[,;:()])[^\d]*", unit) and not only_units(unit)
    ):
        return end, None
    if word and not joined:
        unit = f" {word[1] or ''}{word[2]}"
    number = read_number(found[0], evaluated=evaluated)
    return end, read_number(found[0] + unit, evaluated=evaluated) or number


def formula_of(sentence: str, *, words: bool) -> str | None:
    """The formula, or with `words` the words, that a sentence without a number comes to."""
    sentence = sentence.strip()
    if label := LABEL.fullmatch(sentence):
        sentence = label[2].strip(" *_")
    if not WORD.search(_COMMAND.sub(" ", sentence)):
        return sentence
    formulas = list(FORMULA.finditer(sentence))
    if not formulas:
        verbs = list(_BEING.finditer(sentence))
        if verbs and not leads(sentence[: verbs[-1].end()]):
            return None
        return shortened(sentence[verbs[-1].end() :].strip()) if verbs else sentence
    last = formulas[-1]
    joined = [last]
    for one in reversed(formulas[:-1]):
        if not BETWEEN.fullmatch(sentence, one.end(), joined[0].start()):
            break
        joined.insert(0, one)
    before = sentence[: joined[0].start()]
    if len(joined) == 1 and _VAGUE.search(FORMULA.sub(" ", sentence)):
        return None
    if not leads(before) or not follows(sentence, last.end(), marked=True):
        return None
    if re.match(r" of \d", sentence[last.end() :]):
        return None  # a part of another number
    if len(joined) < len(formulas) and not re.search(r"(?:\b[a-z]+|=)\Z", before.rstrip(" :,")):
        return None
    after = sentence[last.end() :] if len(joined) == 1 and words else ""
    return ", ".join(next(g for g in one.groups() if g is not None) for one in joined) + after


def bare_symbols(line: str) -> bool:
    """Whether a line is a number or formula and nothing else: several such lines are a list."""
    symbols = SYMBOL.search(line) is not None and "=" not in line
    return symbols and not WORD.search(_COMMAND.sub(" ", line))


def may_be_equated(before: str, answer: str) -> bool:
    """Whether the equation that a box ends, if it ends one, is not false, and not of an unknown."""
    equals = _EQUALS.search(before[-300:])
    if equals is None:
        return True
    line = re.split(r"\n|[.;] ", before[-300:][: equals.start()])[-1]
    number, side = read_number(answer, evaluated=False), last_formula(line.rpartition("=")[2])
    if number is not None and comes_to(side, number.value) is False:
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
