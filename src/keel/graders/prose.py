r"""What may stand around an answer in prose: before it, and after it.

Before an answer stand articles, currency, names, verbs, `=`; after it, units and nouns. Operands,
bounds, labels, denials and other numbers do not leave it as it is. The grammars are in the letters
of tokens (words.py).
"""

from __future__ import annotations

import re

from keel.graders.numbers import only_units
from keel.graders.reading.words import LETTERS, SCRIPT, UNBROKEN, Token, pattern, tokens

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
