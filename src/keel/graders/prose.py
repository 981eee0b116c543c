r"""What prose states: what may stand around an answer, and what a sentence comes to.

Before an answer stand articles, currency, names, verbs, `=`; after it, units and nouns. Operands,
bounds, labels, denials and other numbers do not leave it as it is. The grammars are in the letters
of tokens (notation.py). The number of a sentence is in the last clause with one, after its last `=`
or else verb of being; what an equation says of it has to hold.
"""

from __future__ import annotations

import re
from dataclasses import replace

from keel.graders.notation import FORMULA, LETTERS, SCRIPT, UNBROKEN, Token, pattern, spaced, tokens
from keel.graders.numbers import (
    IN_PROSE,
    LATEX_UNITS,
    Number,
    comes_to,
    is_name,
    name_of,
    only_units,
    read_number,
    side_fits,
)

NEAR = 300
"""Characters before and after an answer that are looked at."""
WORD = re.compile(rf"(?<![\\{{A-Za-z])[A-Za-z]{{2,}}(?![A-Za-z}}])|[{UNBROKEN}]")
END = re.compile(r"(?<!\\)[.!?]['\"”)*_]*(?=\s(?! *=)|\Z)|\n")
"""What ends a sentence or line."""

_LEADS = re.compile(
    r"""(?: \A                                    # nothing, or articles and verbs alone
    | [wupjfAzsMBDR=:%O)&c|]                      # a noun or a verb: she has, the total is, x =
    | [bghHqrS9x\\] [alt]* v                      # the price per egg is, the root is, x is
    | (?: M | a [wM]? [wuMR] | v l* ) F | B y     # a total of, a group of, est de, decreased by
    | (?P<marked> [Aw] p h | \A o | g )           # has at least, or, fraction: of a mark alone
    ) [alvt]*\Z""",
    re.VERBOSE,
)
_NOUN = "[wuxzbMBlDhO%]"
_CHANGED = rf"""
    [+] [9x(\\] | [hH] y? [9(\\] | x 9 | h j      # 25 * 2, 25 times 3, 25 x 3, 25 times as
    | \\ | [|] 9 | [)] [9x+] | & \Z               # 25 \alpha, 25 | 26, (25)x
    | , o | [cdmnHDR]                             # 25, or; 25 dozen, 25 wrong
    | {_NOUN}* [&tH] [9caS\\]                     # 25 apples and a half, 25 to 30
    | {_NOUN}* [%O] F 9                           # 25 percent of 80, 25 out of 30
    | {_NOUN}? [(]? o | {_NOUN}* o [9caS\\]       # 25 apples (or 26)
    | .{{0,3}} q (?: [9x] | \Z )                  # 25 more than 3
    | [vA] a? [ndD]                               # 25 is not, 25 is rejected
"""
_CHANGED_MARK = re.compile(rf"{_CHANGED} | 9 | {_NOUN}* [ux] 9 | {_NOUN}? S", re.VERBOSE)
_CHANGED_NUMBER = re.compile(
    rf"{_CHANGED} | {_NOUN}* 9 | [aAflryFhvtq&] 9 | {_NOUN}{{0,3}} S | .{{0,4}} R", re.VERBOSE
)
_PHRASE = re.compile(r"[^.:!?()=\n,]*")
_DOUBTED = pattern("doubted")
_OPERAND = pattern("operand", around=r"(?:{})\Z")


def letters_of(found: list[Token]) -> str:
    """The letters of tokens."""
    return "".join(token.letter for token in found)


def leads(before: str, *, marked: bool = False) -> bool:
    """Whether an answer may follow this text: not as an operand, a bound, a label, or denied.

    `marked` is of a box or tag, before which formulas stand as well.
    """
    before = before[-NEAR:]
    found = tokens(before)
    gap = before[found[-1].end :] if found else ""
    while found and (found[-1].text == "\n" or _opens(before, found[-1], marked)):
        gap += found.pop().text
    if not found:
        return True
    last = found[-1].letter
    if marked and last == ":":
        return found[-2:-1] == [] or found[-2].letter != "n"
    if marked and last in "=s.,|)":
        return last in "=s." or gap != ""
    if marked and last in "+9":
        return "\n" in gap
    at = max((at for at, token in enumerate(found) if token.letter in ".,"), default=-1)
    clause = found[at + 1 :]
    letters = letters_of(clause)
    if "d" in letters or (clause and _DOUBTED.search(before, clause[0].start, clause[-1].end)):
        return False
    if clause and SCRIPT.match(clause[-1].text):
        return _OPERAND.search(clause[-1].text) is None
    led = _LEADS.search(re.sub("(?<!n):", "", letters))
    return led is not None and (marked or not led["marked"])


def _opens(before: str, token: Token, marked: bool) -> bool:
    """Whether a token is a bracket around the answer: before a mark, one that is no function's or
    factor's."""
    if token.letter != "(":
        return False
    return (
        not marked or re.search(r"(?:\A|[\s$~])(?:\\left\s*)?\Z", before[: token.start]) is not None
    )


def follows(text: str, end: int, *, marked: bool = False) -> bool:
    """Whether an answer that ends there is left as it is by what comes after it."""
    if re.match(r"\^(?! ?\{? ?\\circ)", text[end : end + 9]):
        return False
    after = tokens(text, end, end + NEAR)
    if not after:
        return True
    letters = _PHRASE.match(letters_of(after))[0]  # type: ignore[index]
    first = after[0]
    if not marked and first.letter == "x" and first.text not in LETTERS:
        return False
    if marked:
        glued = first.start == end
        if first.text == "!" and glued:
            return WORD.search(text[max(0, end - 100) : end]) is not None
        if first.letter in "wxuz" and (glued or len(first.text) == 1):
            return only_units(first.text)
        if first.letter == "(" and glued:
            return False
        if first.letter == "=" and letters_of(after)[1:2] not in ("x", "w"):
            return False
    if len(letters) < len(after) and after[len(letters)].letter in "(,)":
        letters += letters_of(after[len(letters) : len(letters) + 2])
    changed = _CHANGED_MARK if marked else _CHANGED_NUMBER
    return changed.match(letters) is None


def sentences(text: str) -> list[tuple[str, int]]:
    """The sentences and lines of a text, and where each ends."""
    ends = [*(found.end() for found in END.finditer(text)), len(text)]
    return [(text[a:b], b) for a, b in zip([0, *ends], ends, strict=False)]


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
_COUNT = r"(?:\d+(?:\.\d+)?|\\[dt]?frac ?(?:\{ ?\d+ ?\} ?\{ ?\d+ ?\}|\d ?\d))"
_POWER = r"(?:\d+ ?)?[A-Za-z](?: ?\^ ?\{? ?\d+ ?\}?)?"
_MULTIPLE = re.compile(
    rf"-? ?(?:{_COUNT} ?(?:\\cdot|\\times|\*|\\,)? ?)?"
    rf"(?:{_POWER}|\\sqrt ?\{{? ?{_POWER} ?\}}?"
    rf"|\\[dt]?frac ?\{{ ?-? ?{_POWER} ?\}} ?\{{ ?\d+ ?\}})(?: ?/ ?\d+)?(?: ?[-+] ?\d+(?:\.\d+)?)?"
)
"""A multiple, power, root or part of an unknown, perhaps with a number added."""
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
    """Whether the equation that a box ends, if it ends one, is not false, and does not leave an
    unknown to be found, as `2x = \\boxed{6}` does."""
    equals = _EQUALS.search(before[-300:])
    if equals is None:
        return True
    line = re.split(r"\n|[.;] ", before[-300:][: equals.start()])[-1]
    number, side = read_number(answer, evaluated=False), last_formula(line.rpartition("=")[2])
    if number is not None and comes_to(side, number.value) is False:
        return False
    alone = "=" not in line and _LEAD_WORD.search(line) is None and not _VARIABLE.search(answer)
    return not (alone and _MULTIPLE.fullmatch(side) and not is_name(side))


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
