r"""Answers as mathematics: numbers, words, tuples, intervals, sets, matrices, and expressions.

What holds parts is compared part by part; only what is left, single expressions and equations, is
parsed by latex2sympy and compared by math-verify. That is stricter than math-verify on whole
answers, which drops trailing letters as units (`4s` is 4), takes `8\%` for both 8 and 0.08, folds
case (`3R^2` is `3r^2`), rounds to six decimals and takes intervals for pairs.

May hang on hostile expressions: call it in a process that can be killed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from keel.graders.answers import chosen, final_answer, label_of, stated_number
from keel.graders.notation import bare, formulas, left_to_do, squeezed, stands_in, word_set
from keel.graders.numbers import DECIMAL, Number, name_of, only_units, read_number, same_name
from keel.graders.prose import formula_of

LONGEST = 600
"""Characters of an answer that is not a number: longer ones are not read."""
PARTS = 24
"""Parts of a list, at the most."""

_OPEN, _CLOSE = "([{", ")]}"
_INTERVALS = ("(]", "()", "[)", "[]")
_WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z][A-Za-z'’ .-]*|[Nn][Oo]|\(([A-Z])\)")
_OPTION = re.compile(r"\(?[A-Z]\)?|(?:\([A-Z]\)|[A-Z][).:]) .+")
_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\overline ?\{ ?(\d{1,20}) ?\}")
_FUNCTIONS = word_set("functions")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_BASE = re.compile(r"(\w+) ?_ ?(?:(\d+)|\{ ?(\d+) ?\})")
_MATRIX = re.compile(
    r"(?:[(\[] ?)?\\begin ?\{([pbB]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end ?\{\1\}(?: ?[)\]])?",
    re.DOTALL,
)
_SYSTEM = re.compile(
    r"(?:\\\{ ?)?\\begin ?\{(cases|aligned|align\*?|gathered|array)\}(?:\{[clr|]*\})?(.*=.*)"
    r"\\end ?\{\1\}(?: ?\\\}| ?\.)?",
    re.DOTALL,
)
_BUILDER = re.compile(
    r"\\\{ ?([A-Za-z])(?: ?\\in ?\\mathbb ?\{? ?R ?\}?)? ?(?::|\\(?:mid|vert|colon)|\|)(.+)\\\}"
)
_REALS = re.compile(
    r"(?:[A-Za-z] ?\\in ?)?(?:\\mathbb ?\{? ?R ?\}?|\\R)|-\\infty ?< ?[A-Za-z] ?< ?\+?\\infty"
    r"|(?:the set of )?all real(?:s| numbers| values)?(?: of)?(?: [a-z])?",
    re.IGNORECASE,
)
_FOR_ALL = re.compile(r",? ?(?:\\text ?\{,? ?)?\bfor (?:all|any|every)\b.*\Z", re.DOTALL)
_CONNECTED = re.compile(
    r"\\(?:text|mbox) ?\{ ?,? ?(?:and|or) ?\}|\\(?:q?quad)\b|(?<![a-z])(?:and|or)(?![a-z])"
)
_RELATION = re.compile(r"\\(?:leq?|geq?|leqslant|geqslant|lt|gt)(?![a-z])|[<>]=?")
_SIDE = re.compile(
    r"\\?[A-Za-z]+'?(?: ?_ ?(?:\w|\{\w*\}))?(?: ?\([\w, ]*\))?|\([a-z](?:, ?[a-z])+\)"
    r"|\\(?:mathbf|vec|overline|text|mathrm|operatorname) ?\{[^{}]*\}|\|[A-Za-z]+\|"
)
_TOWER = re.compile(
    r"\^[^-+*=,]{0,40}\^|\d{5,} ?!|! ?!|\) ?!|\*\*.{0,40}\*\*|\^ ?\{? ?-?\d{6}|\^ ?\{?[^}]{0,20}!"
)
_DOTTED = re.compile(r"\\dot ?\{?(\d)\}?(?:(\d*)\\dot ?\{?(\d)\}?)?")
_DECIMAL = re.compile(r"(\d*)\.(\d+)")
_CURRENCY = re.compile(r"\\?\$|[€£]")
_TAIL = re.compile(
    r"(?:\\%|%|\^ ?\\circ\b|\^ ?\{ ?\\circ ?\}|\\(?:degree|circ)\b"
    r"| ?\\(?:text|mbox|mathrm) ?\{[^{}]*\}(?:\^ ?(?:\{\d\}|\d))?| [A-Za-z/]+(?:\^?[23])?)\Z"
)


class Unreadable(Exception):
    """A text that cannot be compared as an answer."""


class NotPlainExpression(Exception):
    """More than a number or words: only a process that can be ended may parse it."""


@dataclass(frozen=True, slots=True)
class ParsedExpression:
    """An answer taken apart.

    `kind` is "number", "words", "option" (its letter), "quantities" (`1 h 20 min`), "base" (digits
    with a base), "expression", "relation" (sympy's), "list" (in no order), or of parts in order
    "matrix" and brackets such as "(]".
    """

    kind: str
    value: Any
    text: str
    name: str = ""


def same_answer(
    gold: str, stated: str, *, evaluated: bool = True, plain: bool = False, question: str = ""
) -> bool | None:
    """Whether the answer that a text ends on is mathematically the gold answer.

    None if gold cannot be read. Gold is an answer, or a solution that marks one by `#### …` or
    `\\boxed{…}`; of an option, the letter decides. With `evaluated`, an answer that leaves an
    operation to do of which gold has none, or that stands in the `question` and is not written as
    gold is, is wrong. With `plain`, only numbers, words and options are read; raises
    NotPlainExpression if there is more to read.
    """
    try:
        wanted = gold_answer(gold, plain=plain)
    except Unreadable:
        return None
    if wanted.kind == "option":
        return bool(chosen(stated, question) == wanted.value)
    answer = final_answer(stated, words=wanted.kind in ("words", "text"))
    if answer is None:
        return False
    if wanted.kind == "text":
        return bool(bare(answer.text).replace(" ", "") == wanted.value)
    if wanted.kind == "number" and (answer.how != "marked" or "=" in answer.text):
        number = stated_number(stated, evaluated=evaluated)
        if number is not None:
            return number.value == wanted.value.value and number.fits(wanted.value)
    text: str | None = answer.text
    if answer.how != "marked":
        text = formula_of(_FOR_ALL.sub("", answer.text), words=wanted.kind == "words")
    if text is None:
        return False
    try:
        read = _read(wanted, text, evaluated, plain)
        if not _same(wanted, read, evaluated):
            return False
        return not (evaluated and question and _asked(wanted, read, question))
    except Unreadable:
        return False


def same_to_math_verify(gold: str, stated: str) -> bool:
    """Whether math-verify by itself finds the gold answer in a text."""
    from math_verify import parse, verify

    marked = gold if re.search(r"[$]|\\\(|\\\[|\\boxed", gold) else f"${gold}$"
    wanted = parse(marked, parsing_timeout=0)
    return bool(verify(wanted, parse(stated, parsing_timeout=0), timeout_seconds=0))


def _read(wanted: ParsedExpression, text: str, evaluated: bool, plain: bool) -> ParsedExpression:
    """An answer taken apart; of a chain of equations that hold, the last side: `2(x+1) = 2x+2`.

    The first side may be its name.
    """
    if wanted.kind != "time" and _TIME.fullmatch(bare(text)):
        text = bare(text).replace(":", " : ")  # a ratio
    *sides, last = _split(bare(text), "=")
    name = sides.pop(0) + "=" if sides and _SIDE.fullmatch(bare(sides[0])) else ""
    if wanted.kind not in ("expression", "number") or not sides:
        return parse(text, evaluated=evaluated, plain=plain)
    read = parse(name + last, evaluated=evaluated, plain=plain)
    for one in sides:
        side = parse(one, evaluated=False, plain=plain)
        if re.fullmatch(rf" ?-?{DECIMAL} ?", one):
            raise Unreadable  # 5 = 5 says nothing
        kinds = {side.kind, read.kind}
        if not kinds <= {"number", "expression"} or not _equal(
            _symbolic(side.value), _symbolic(read.value)
        ):
            raise Unreadable
    return read


def _asked(wanted: ParsedExpression, read: ParsedExpression, question: str) -> bool:
    """Whether what was read is not what a question asks for.

    It leaves an operation to do of which gold has none, or stands in the question and is not
    written as gold.
    """
    if wanted.kind in ("number", "words") or squeezed(read.text) == squeezed(wanted.text):
        return False
    if _left(read) - _left(wanted):
        return True
    if wanted.kind in ("expression", "relation") and read.kind in ("expression", "relation"):
        return stands_in(question, wanted.value, read.value, read.text, _tree)
    return squeezed(read.text) in map(squeezed, formulas(question))


def _tree(text: str) -> Any:
    try:
        read = parse(text, gold=True)
    except Unreadable:
        return None
    return read.value if read.kind in ("expression", "relation") else None


def can_be_read(gold: str) -> bool:
    """Whether answers can be compared with a gold answer: as mathematics, or else as text."""
    try:
        return bool(gold_answer(gold))
    except Unreadable:
        return False


def parse(
    text: str, *, evaluated: bool = True, gold: bool = False, depth: int = 0, plain: bool = False
) -> ParsedExpression:
    """Take an answer apart. Raises as `same_answer` does, and Unreadable."""
    text = _DOTTED.sub(r"\\overline{\1\2\3}", bare(text)).replace("\\varnothing", "\\emptyset")
    if re.fullmatch(r"\\\{ ?\\\}", text):
        text = r"\emptyset"
    text = _REPEATING.sub(_as_repeating, _FOR_ALL.sub("", text))
    if _REALS.fullmatch(text):
        text = r"(-\infty, \infty)"
    if _TIME.fullmatch(text):
        return ParsedExpression("time", text.lstrip("0"), text)
    number = read_number(text, evaluated=evaluated and not gold, letters=not gold)
    if number is None and gold and re.match(r"[\d.,]+ ", text):
        rate = read_number(text, evaluated=False)  # 5 m/s
        number = rate if rate is not None and " " in rate.unit else None
    if number is not None:
        return ParsedExpression("number", number, text, number.name)
    if not text or len(text) > LONGEST or depth > 4:
        raise Unreadable
    if len(quantities := _quantities(text)) > 1:
        return ParsedExpression("quantities", tuple(quantities), text)
    if gold and _OPTION.fullmatch(text) and depth == 0:
        return ParsedExpression("option", label_of(text), text)
    if _WORDS.fullmatch(text) and not _FUNCTIONS & set(text.lower().split()):
        return ParsedExpression("words", _letters(text), text)
    if plain:
        raise NotPlainExpression
    text = text.replace("\\cup", "\\cup ").replace("\\dots", "\\ldots")
    if (system := _SYSTEM.fullmatch(text)) is not None:
        text = ", ".join(row for row in system[2].replace("&", "").split("\\\\") if row.strip())
    if (builder := _BUILDER.fullmatch(text)) is not None:
        text = builder[2].strip()
    name, text = _named(text)
    text = _trimmed(text)
    again: dict[str, Any] = {"evaluated": evaluated, "gold": gold, "depth": depth + 1}
    if (matrix := _MATRIX.fullmatch(text)) is not None:
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        cells = [
            ParsedExpression("row", [parse(cell, **again) for cell in row.split("&")], row)
            for row in rows
        ]
        return ParsedExpression("matrix", cells, text, name)
    if text.startswith("\\{") and text.endswith("\\}") and "\\emptyset" not in text:
        text = text[2:-2].strip()
    if not text:
        raise Unreadable
    for parts in (_split(_CONNECTED.sub(",", text), ",;"), text.split("\\cup")):
        if len(parts) > 1:
            items = [parse(part, **again) for part in parts if part.strip()]
            flat = [one for i in items for one in (i.value if i.kind == "list" else [i])]
            names = {one.name for one in flat}
            either = "\\cup" not in text and re.search(r"(?<![a-z])or(?![a-z])", text)
            if either and len(names) > 1:
                raise Unreadable  # x = 2 or y = 3 is not both
            bounds = [one for one in flat if one.kind in _INTERVALS and one.name]
            if bounds and re.search(r"(?<![a-z])and(?![a-z])", text):
                return _between(bounds, flat, text)
            return _listed(flat, text, name or (names.pop() if len(names) == 1 else ""))
    if text[0] in "([" and text[-1] in ")]" and 0 not in _depths(text)[:-1]:
        parts = _split(text[1:-1], ",;")
        if len(parts) > 1:
            ends = text[0] + text[-1]
            return ParsedExpression(ends, [parse(part, **again) for part in parts], text, name)
    if "\\pm" in text or "\\mp" in text:
        both = text.replace("\\pm", "+").replace("\\mp", "-")
        other = text.replace("\\pm", "-").replace("\\mp", "+")
        return _listed([parse(one, **again) for one in (both, other)], text, name)
    if (base := _BASE.fullmatch(text)) and base[1].isalnum() and base[1][0].isdigit():
        return ParsedExpression("base", (base[1].lower(), base[2] or base[3]), text, name)
    interval = _interval(text)
    if interval is not None:
        variable, ends, low, high = interval
        return ParsedExpression(ends, [parse(low, **again), parse(high, **again)], text, variable)
    return ParsedExpression(*_expression(text), text, name)


def _between(
    bounds: Sequence[ParsedExpression], flat: Sequence[ParsedExpression], text: str
) -> ParsedExpression:
    """The interval of `x > 1 and x < 3`."""
    above = [one for one in bounds if one.value[1].text == r"\infty"]
    below = [one for one in bounds if one.value[0].text == r"-\infty"]
    if not (len(flat) == 2 and len(above) == len(below) == 1 and above[0].name == below[0].name):
        raise Unreadable  # x < 2 and x < 5, or y = 3
    ends = above[0].kind[0] + below[0].kind[1]
    return ParsedExpression(ends, [above[0].value[0], below[0].value[1]], text, above[0].name)


def gold_answer(gold: str, *, plain: bool = False) -> ParsedExpression:
    """The gold answer, or that of the solution; what is not understood is of the kind "text".

    Raises Unreadable, and NotPlainExpression as `parse`.
    """
    marked = "\\boxed" in gold or "####" in gold
    answer = final_answer(gold, words=marked, trusted=True)
    for text in (None if marked else gold, answer and answer.text):
        with suppress(Unreadable):
            return parse(text or "", gold=True, plain=plain)
    number = stated_number(gold, evaluated=False)
    if number is not None:
        return ParsedExpression("number", number, gold, number.name)
    text = bare(answer.text if answer and answer.how == "marked" else gold).replace(" ", "")
    depths = [0, *_depths(text)]
    if not re.search(r"\w", text) or depths[-1] != 0 or min(depths) < 0:
        raise Unreadable
    return ParsedExpression("text", text, text)


def _same(gold: ParsedExpression, stated: ParsedExpression, evaluated: bool) -> bool:
    if not same_name(gold.name, stated.name):
        return False
    if gold.kind == "words":
        return bool(gold.value == _letters(stated.text))
    if {gold.kind, stated.kind} == {"()", "list"}:  # x = 3, y = 4 for (3, 4), and the reverse
        listed = gold if gold.kind == "list" else stated
        names = {one.name for one in listed.value if one.name}
        named = [sorted(read.value, key=lambda one: str(one.name)) for read in (gold, stated)]
        return len(names) == len(listed.value) and _in_order(named[0], named[1], evaluated)
    if stated.kind == "list":  # else several ways to write one answer
        if gold.kind == "list":
            return _matched(gold.value, stated.value, evaluated)
        return all(_same(gold, one, evaluated) for one in stated.value)
    if gold.kind == stated.kind and isinstance(gold.value, list):
        return _in_order(gold.value, stated.value, evaluated)
    if gold.kind == stated.kind == "number":
        return bool(gold.value.value == stated.value.value and stated.value.fits(gold.value))
    kinds = {gold.kind, stated.kind}
    if not kinds <= {"number", "expression", "relation"}:
        return len(kinds) == 1 and bool(gold.value == stated.value)
    if evaluated and not _evaluated(gold, stated):
        return False
    if "relation" in kinds:
        return len(kinds) == 1 and _equal(gold.value, stated.value)
    return _equal(_symbolic(gold.value), _symbolic(stated.value))


def _evaluated(gold: ParsedExpression, stated: ParsedExpression) -> bool:
    """Whether nothing is left to do of which the gold answer has nothing."""
    if squeezed(gold.text) == squeezed(stated.text):
        return True
    if gold.kind == "number" or stated.kind == "number":
        return stated.kind == "number"
    left = _left(stated) - _left(gold)
    return not left & {"written"} and ("terms" not in left or bool(stated.value.free_symbols))


def _left(read: ParsedExpression) -> set[str]:
    """What an answer, or a part of it, leaves to do."""
    if isinstance(read.value, list) and read.kind != "matrix":
        return set().union(*map(_left, read.value))
    return left_to_do(read.value, read.text) if read.kind == "expression" else set()


def _in_order(
    gold: Sequence[ParsedExpression], stated: Sequence[ParsedExpression], evaluated: bool
) -> bool:
    return len(gold) == len(stated) and all(
        _same(g, s, evaluated) for g, s in zip(gold, stated, strict=True)
    )


def _matched(
    gold: Sequence[ParsedExpression], stated: Sequence[ParsedExpression], evaluated: bool
) -> bool:
    """Whether each part has one that is the same, in whatever order."""
    if len(gold) != len(stated):
        return False
    left = list(stated)
    names = {one.name for one in gold}
    if len(names) > 1 and not any(one.name for one in stated):  # which is which, the order says
        return _in_order(gold, stated, evaluated)
    for one in gold:
        at = next((i for i, s in enumerate(left) if _same(one, s, evaluated)), None)
        if at is None:
            return False
        left.pop(at)
    return True


def _listed(items: Sequence[ParsedExpression], text: str, name: str) -> ParsedExpression:
    """A list; one that names the same thing again and again is that thing."""
    if not items or len(items) > PARTS:
        raise Unreadable
    distinct = {i.value.value if i.kind == "number" else i.text.replace(" ", "") for i in items}
    return items[0] if len(distinct) == 1 else ParsedExpression("list", list(items), text, name)


def _letters(text: str) -> str:
    return " ".join(re.sub(r"[^\w ]", "", bare(text)).casefold().split())


def _named(text: str) -> tuple[str, str]:
    """The symbol that an answer is named, and the answer: `x = …`, `x \\in …`."""
    membership = re.split(r"\\in(?![a-z])", text)
    if len(membership) == 2 and _SIDE.fullmatch(membership[0].strip()):
        return name_of(membership[0]), membership[1].strip()
    sides = _split(text, "=")
    if len(sides) != 2 or not _SIDE.fullmatch(sides[0].strip()) or _RELATION.search(text):
        return "", text
    if len(_split(sides[1], ",;")) == 1 or sides[1].strip()[:1] in "(\\":
        return name_of(sides[0]), bare(sides[1])
    return "", text


def _trimmed(text: str) -> str:
    """An answer less a currency before it and units after it."""
    text = _CURRENCY.sub("", text).strip()
    for _ in range(8):
        tail = _TAIL.search(text)
        if tail is None or tail.start() == 0 or not only_units(tail[0], letters=False):
            break
        shorter = text[: tail.start()].strip()
        if shorter.endswith((",", ";", " or", " and")):  # the last of a list
            break
        text = shorter
    return text


def _depths(text: str) -> list[int]:
    """How many brackets are open after each character."""
    return list(accumulate((one in _OPEN) - (one in _CLOSE) for one in text))


def _split(text: str, separators: str) -> list[str]:
    """A text parted at separators that are in no brackets."""
    parts, start = [], 0
    for at, depth in enumerate(_depths(text)):
        unequal = separators == "=" and text[at - 1 : at] in ("<", ">", "!")
        if depth == 0 and text[at] in separators and not unequal:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _interval(text: str) -> tuple[str, str, str, str] | None:
    """The variable, brackets and bounds of `a < x \\le b` or `x > a`."""
    sides = [side.strip() for side in _RELATION.split(text)]
    signs = _RELATION.findall(text)
    less = {"l" in sign or "<" in sign for sign in signs}
    closed = ["=" in sign or "e" in sign for sign in signs]
    if len(sides) > 3 or not all(sides) or len(less) != 1:
        return None
    if less == {False}:
        sides, closed = sides[::-1], closed[::-1]
    if len(sides) == 2:
        if _variable(sides[0]):
            sides, closed = [r"-\infty", *sides], [False, *closed]
        else:
            sides, closed = [*sides, r"\infty"], [*closed, False]
        if _variable(sides[0]) or _variable(sides[2]):
            return None
    if not _variable(sides[1]):
        return None
    return sides[1], "(["[closed[0]] + ")]"[closed[1]], sides[0], sides[2]


def _variable(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z]|\\(?!infty|pi)[a-z]+", text) is not None


def _expression(text: str) -> tuple[str, Any]:
    """The kind and sympy's form of an expression or relation. Raises Unreadable."""
    from latex2sympy2_extended import latex2sympy2 as latex
    from sympy.core.relational import Relational

    words = {word.lower() for word in _PROSE.findall(re.sub(r"\\[A-Za-z]+", " ", text))}
    if words - _FUNCTIONS and not all(len(word) == 3 for word in words):
        raise Unreadable
    if _TOWER.search(text) and not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)):
        raise Unreadable
    exact = _DECIMAL.sub(_as_fraction, text.replace("+\\infty", "\\infty").replace("**", "^"))
    units = latex.NormalizationConfig(
        units=False, malformed_operators=True, nits=True, boxed="none"
    )
    try:
        made = latex.latex2sympy(
            latex.normalize_latex(exact, units),
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=latex.ConversionConfig(lowercase_symbols=False),
        )
    except Exception as error:
        raise Unreadable from error
    relation = isinstance(made, Relational) or type(made).__name__ == "And"
    if relation and not made.free_symbols:
        raise Unreadable  # 5 = 5 says nothing
    return "relation" if relation else "expression", made


def _as_fraction(found: re.Match[str]) -> str:
    return rf"\frac{{{int(found[1] + found[2])}}}{{{10 ** len(found[2])}}}"


def _as_repeating(found: re.Match[str]) -> str:
    """An exact fraction: 0.1\\overline{6} is (16 - 1) / 90."""
    ahead = (found[1] or "0") + found[2]
    top = int(ahead + found[3]) - int(ahead)
    return rf"\frac{{{top}}}{{{'9' * len(found[3])}{'0' * len(found[2])}}}"


def _symbolic(value: Any) -> Any:
    from sympy import Rational

    return Rational(value.value) if isinstance(value, Number) else value


def _equal(gold: Any, stated: Any) -> bool:
    """Whether math-verify takes them for the same, and 40 digits at one point do not differ."""
    from math_verify import verify
    from sympy import Expr, Rational

    if not verify(gold, stated, timeout_seconds=0):
        return False
    if not (isinstance(gold, Expr) and isinstance(stated, Expr)):
        return True
    symbols = sorted((gold - stated).free_symbols | gold.free_symbols, key=str)
    point = {symbol: Rational(7 + 3 * at, 5) for at, symbol in enumerate(symbols)}
    apart, scale = ((one.doit().subs(point)).evalf(40) for one in (gold - stated, gold))
    return not (apart.is_finite and scale.is_finite) or bool(abs(apart) <= abs(scale) * 10**-25)


def _quantities(text: str) -> list[tuple[Any, str]]:
    """The numbers with units that a quantity is made of: `1 hour 20 minutes`."""
    text = re.sub(r"\\(?:text|mathrm|mbox) ?\{([^{}]*)\}", r" \1 ", text)
    pieces = re.split(r"[,\s]+(?:and\s+)?(?=\d)", text.strip())
    read = [read_number(piece) for piece in pieces] if 1 < len(pieces) < 5 else []
    found = [(one.value, one.unit) for one in read if one is not None and one.unit]
    return found if len(found) == len(pieces) and len({unit for _, unit in found}) > 1 else []
