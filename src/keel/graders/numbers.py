"""Numbers as answers: what number, if any, a whole text is, and what a calculation comes to.

Values are exact fractions, so that neither large integers nor decimals lose a digit. Every
pattern takes time in line with the text's length.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from keel.graders.notation import (
    ATTACHED,
    CHANGED,
    INNER,
    LETTERS,
    SCALES,
    UNITS,
    bare,
    spaced,
    word_class,
)

MAX_CHARACTERS = 1000
"""Longer texts are not read as one number: big integers cost time to the square."""
MAX_EXPONENT = 400

_WHOLE = r"(?:\d{1,3}(?:,\d{3})++(?![\d,])|\d{1,3}(?: \d{3})++(?! ?[\d/])|\d++)"
DECIMAL = rf"(?:{_WHOLE}(?:\.\d++)?|\.\d++)"
_OVER = (
    rf"(?:{_WHOLE} ?/ ?{_WHOLE}"
    rf"|\\frac ?(?:\{{ ?-?{_WHOLE} ?\}}|\d) ?(?:\{{ ?{_WHOLE} ?\}}|\d))"
)
_NUMERAL = re.compile(
    rf"(?P<mixed>{_WHOLE}(?= ?\\frac| \d++ ?/) ?)?(?P<over>{_OVER})"
    rf"|(?P<base>\d++) ?\^ ?(?:\{{ ?(?P<power>\d++) ?\}}|(?P<digit>\d))"
    rf"|(?P<decimal>{DECIMAL})"
    r"(?:[eE](?P<exponent>[-+]?\d++)"
    r"|(?: ?(?:\\times|\\cdot|\*) ?| [xX] )10 ?\^ ?"
    r"(?:\{ ?(?P<ten>[-+]?\d++) ?\}|\(?(?P<bare>[-+]?\d++)\)?))?"
)
_MONEY = r"(?:(?:US|CA|AU|C|A)?\\?\$|[€£¥₹]|\\(?:euro|pounds)\b|(?:USD|EUR|GBP|Rs\.?) ) ?"
_LEAD = re.compile(rf"([-+]?)\s*(?:({_MONEY})([-+]?)\s*)?")
_SCALE = " ?(?:" + "|".join(one + r"\b" * one.isascii() for one in SCALES) + ")"
_POWER = r"\^ ?(?:\{ ?-?\d ?\}|-?\d)"
_DEGREES = r"\^ ?(?:\{ ?\\circ ?\}|\\?(?:circ|degree)(?![a-z]))"
_WORDED = rf"\\(?:text|mbox|mathrm|operatorname) ?\{{(?P<text>{INNER})\}}(?:{_POWER})?"
_RATE = rf"\\frac ?\{{(?P<top>{INNER})\}} ?\{{(?P<bottom>{INNER})\}}"
_UNIT = re.compile(
    rf"[ ~]+|\\?%|{_DEGREES}|\\(?:degree|deg|circ|percent)\b|{_WORDED}|{_RATE}"
    rf"|(?P<word>[^\W\d_]+(?:[-'’][^\W\d_]+)*+)(?:{_POWER}|(?<![A-Za-z]{{3}})(?<=[mt])[23](?!\d))?\.?"
    r"|/(?! ?\d)|\\cdot\b|[€£¥₹]|\\?\$"
)
_UNNAMED = {pattern: re.sub(r"\?P<[a-z]+>", "?:", pattern) for pattern in (_WORDED, _RATE)}
LATEX_UNITS = re.compile(
    rf"(?: ?{_DEGREES}(?: ?[CF]\b)?)?(?: (?=[.,;!?)]|\Z))?"
    rf"(?:[ ~]*(?:{'|'.join(_UNNAMED.values())}|/|\\(?:cdot|mu|Omega)(?![a-z])))*+"
)
_FIRST = re.compile(
    r"([-+]?)(?:\$((?:[^$\\]|\\.)++)\$|\\\(((?:[^\\]|\\(?!\)))++)\\\))([^$]+)", re.DOTALL
)
_NAME = re.compile(
    r"(?:\\(?:text|mathrm|mbox|operatorname) ?\{[^{}=]*\}|\|[A-Z]{1,3}\||\\angle ?[A-Za-z]{1,3}"
    r"|[A-Za-z]'{0,2}(?: ?_ ?(?:\w|\{\w*\}))? ?\([-\w, ]{1,20}\)"
    r"|[A-Za-z](?: ?[-+] ?[A-Za-z])+"
    r"|\\?[A-Za-z][A-Za-z ]*'?(?: ?_ ?(?:\w|\{\w*\}))?) ?"
)
_CALCULATES = re.compile(
    r"\s*(?:\\?(?:log|ln|exp|sqrt)|we|if|let|say|try|discard|reject|exclude)\b", re.IGNORECASE
)
_SEVERAL = re.compile(r"[,;] |\b(?:and|or)\b|[<>]|\\[gln]eq?\b|\\\\\s*&?\s*[A-Za-z]")
_SYMBOLIC = re.compile(r"\\?[A-Za-z(]|[\d.]+ ?(?:\\|[A-Za-z(])")
IN_PROSE = re.compile(
    rf"[-+]?(?:{_MONEY})?-?(?:{re.sub(r'[?]P<[a-z]+>', '?:', _NUMERAL.pattern)})(?:{_SCALE})?",
    re.IGNORECASE,
)
"""A number in a sentence, with its currency and scale."""
_NOT_UNITS = frozenset("cSRHhotqnmdDv&")
"""Classes of words that follow no number, or make it another."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a text states.

    `name` is what it is named, the `x` of `x = 5`; `unit` a known unit, such as `cm^2`.
    """

    value: Fraction
    name: str = ""
    unit: str = ""

    def fits(self, gold: Number) -> bool:
        """Whether neither name nor unit contradicts the gold answer's: one may be left out."""
        if self.unit == "%" and not gold.unit and abs(gold.value) < 1:
            return False  # 0.5% of a gold answer that is a share
        return same_name(gold.name, self.name) and same_name(gold.unit, self.unit)


def same_name(gold: str, stated: str) -> bool:
    """Whether the name or unit of what was stated may be the gold answer's: one may have none."""
    return not gold or not stated or gold == stated


def same_number(a: Fraction, b: Fraction, tolerance: float = 0.0) -> bool:
    """Whether |a − b| ≤ tolerance · max(1, |b|): absolute for small b, relative for large."""
    return abs(a - b) <= Fraction(tolerance) * max(Fraction(1), abs(b))


_IN_BRACKETS = re.compile(r"^\((-?[^(),;]*)\)( ?\^ ?\{? ?\\circ ?\}?| ?\\degree)?$")


def read_number(text: str, *, evaluated: bool = True, letters: bool = True) -> Number | None:
    r"""The number that the whole text is, or None: `1,234`, `-3.5`, `\$7`, `2/3`, `1 1/2`, `x = 5`.

    Units after it are passed over, `%` and degrees among them: `8\%` is 8. `18 million` is
    18,000,000. An operation that is left to do (`17 \times 24`, `816/2`) is not a number; with
    `evaluated` False, powers and such fractions are. Scientific notation is a number. Single
    letters are units (`5 m`) unless `letters` is False: they may be variables. Of a chain of
    equations, all have to hold (`P = 8/12 = 2/3`).
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = bare(text)
    if formula := _FIRST.fullmatch(text):  # `$18$ dollars`
        text = f"{formula[1]}{formula[2] or formula[3]} {formula[4]}"
    text = _IN_BRACKETS.sub(r"\1\2", re.sub(r"^negative (?=\d)", "-", text))
    text, about, near = text.partition("\\approx")
    if about and (not text.strip() or text.rstrip().endswith("=") or is_name(text)):
        text, near = f"{text}={near}" if text.strip() else near, ""
    *sides, text = text.split("=")
    number = _single(bare(text), evaluated, letters)
    if number is None or not all(side_fits(one, number, at) for at, one in enumerate(sides)):
        return None
    if near.strip():
        rounded = _single(bare(near), evaluated, letters)
        if rounded is None or not comes_to(text, rounded.value):
            return None
    return replace(number, name=name_of(sides[0]) if sides else "")


def is_name(side: str) -> bool:
    """Whether the side of an equation names what is sought: `x`, `P(A)`, `Total cost`."""
    return _CALCULATES.match(side) is None and _NAME.fullmatch(side.strip()) is not None


def name_of(side: str) -> str:
    """A symbol, as `x` or `\\theta`, that an equation's side is; "" if it is words."""
    if not is_name(side):
        return ""
    name = bare(side).replace(" ", "").replace("{", "").replace("}", "")
    letters = re.sub(r"[_(|'].*", "", name)
    return name if len(letters) == 1 or letters.startswith("\\") else ""


def side_fits(side: str, number: Number, at: int = 0) -> bool:
    """Whether an equation's side, the one in the place `at`, comes to the last side's number.

    The first may be a name, and those in between hold symbols. A number alone is not a calculation.
    """
    side = side.strip(" $&")
    if at == 0 and is_name(side):
        return True
    found = comes_to(side, number.value)
    if found is None and at > 0:
        return _SEVERAL.search(side) is None and _SYMBOLIC.match(side) is not None
    return bool(found) and re.fullmatch(rf"-?{DECIMAL}", side) is None


def _single(text: str, evaluated: bool, letters: bool) -> Number | None:
    """The number that a side of an equation, or a text without one, is."""
    text = text.removeprefix("\\approx").strip()
    lead = _LEAD.match(text)
    assert lead is not None  # all of it may be missing
    sign, text = lead[1] + (lead[3] or ""), text[lead.end() :]
    if len(sign) > 1 or (sign == "-" and text.startswith("\\frac{-")):
        return None
    found = _NUMERAL.match(text)
    value = _value(found, evaluated) if found else None
    if found is None or value is None:
        return None
    rest = text[found.end() :]
    if scale := re.match(_SCALE, rest, re.IGNORECASE):
        value, rest = value * 10 ** SCALES[scale[0].strip().lower()], rest[scale.end() :]
    if not only_units(rest, letters):
        return None
    return Number(-value if sign == "-" else value, "", _unit(lead[2] or "", rest))


def _value(found: re.Match[str], evaluated: bool) -> Fraction | None:
    """What a numeral is worth; None if it is not a value yet, or out of bounds."""
    if found["base"]:
        power = found["power"] or found["digit"]
        if evaluated or len(power) > 4 or len(found["base"]) * int(power) > MAX_CHARACTERS:
            return None
        return Fraction(int(found["base"]) ** int(power))
    if found["over"]:
        over = [
            int(one) for one in re.findall(r"-?\d+", re.sub(r"[, ](?=\d{3})", "", found["over"]))
        ]
        if len(over) == 1:  # \frac12
            over = [int(one) for one in str(over[0])]
        if len(over) != 2 or over[1] == 0:
            return None
        value = Fraction(*over)
        if found["mixed"]:
            whole = int(re.sub(r"\D", "", found["mixed"]))
            return whole + value if 0 < value < 1 else None  # `2024 5/2` are two numbers
        return None if evaluated and value.denominator == 1 < over[1] else value
    value = Fraction(re.sub("[, ]", "", found["decimal"]))
    exponent = found["exponent"] or found["ten"] or found["bare"]
    if exponent is None:
        return value
    if len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    return value * Fraction(10) ** int(exponent)


def _unit(money: str, rest: str) -> str:
    """The known units that stand around a number, as `W m^-2`; "" if one is not known."""
    text = re.sub(r"\\(?:text|mbox|mathrm|operatorname)(?![a-z])", " ", money + rest)
    text = re.sub(rf"\\frac ?\{{({INNER})\}} ?\{{({INNER})\}}", r"\1/\2", text)
    units: list[tuple[str, int]] = []
    power = 1
    for part in re.findall(r"/|[%$€£]|-?\d|[^\W\d_]+", text):
        if part == "/":
            power = -1
        elif part.lower() in ("square", "sq", "cubic", "cu"):
            power *= 2 if part[0] in "sS" else 3
        elif part[-1].isdigit():
            units[-1:] = [(name, raised * int(part)) for name, raised in units[-1:]]
        else:
            names = (part, part.lower().removesuffix("s"), part.lower())
            found = next((UNITS[name] for name in names if name in UNITS), "")
            if not found:
                return ""
            units.append((found, power))
            power = 1
    if len(units) > 1 and all(raised > 0 for _, raised in units):
        return ""  # a noun and a unit, perhaps; those of a rate are sure
    return " ".join(sorted(name if raised == 1 else f"{name}^{raised}" for name, raised in units))


def only_units(rest: str, letters: bool = True) -> bool:
    """Whether what follows a number is units or nouns, and nothing that makes it another value.

    Single letters are units unless `letters` is False: they may be variables.
    """
    at = 0
    rest = re.sub(r"\\(?:Omega|ohm)(?![a-z])", "Ω", rest).replace(r"\mu", "µ")
    while at < len(rest):
        found = _UNIT.match(rest, at)
        if found is None:
            return False
        groups = found["text"], found["top"], found["bottom"]
        if not all(only_units(" " + re.sub(r"[()]", " ", g)) for g in groups if g is not None):
            return False
        word = found["word"]
        if word == "a" and re.match(r" +[A-Za-z]{3}", rest[found.end() :]):  # 18 a day
            word = ""
        if word and not _noun(word, at > 0 or found.start("word") > at, letters):
            return False
        at = found.end()
    return True


def _noun(word: str, apart: bool, letters: bool) -> bool:
    """Whether a word may be a unit: any noun that is apart from the number, else a known unit."""
    if (letters and word in LETTERS) or word in ATTACHED:
        return word != "K" or apart
    if not word.isascii() and CHANGED.search(word[:4]):
        return False
    if word_class(word) in _NOT_UNITS:
        return False
    if len(word) == 1 and word.isascii():  # a variable, or the imaginary unit
        return False
    return not word.isascii() or (apart and (len(word) > 2 or word_class(word) not in "wx"))


MAX_DIGITS = 1000
"""Of a power; larger ones are not computed."""


def comes_to(arithmetic: str, stated: Fraction) -> bool | None:
    """Whether a calculation comes to a number, or to one that it is rounded from to some decimals.

    None of what cannot be read as a calculation.
    """
    try:
        value = calculated(arithmetic)
    except ZeroDivisionError:
        return False
    if value is None or value == stated:
        return None if value is None else True
    units = [10**places for places in range(1, 13)]
    return any((stated * n).denominator == 1 and abs(stated - value) * 2 * n <= 1 for n in units)


def calculated(text: str) -> Fraction | None:
    """What a calculation of `+ - * / ^ !`, fractions, roots, binomials and decimals comes to.

    None if it is not one. Raises ZeroDivisionError.
    """
    if len(text) > 300:
        return None
    text = re.sub(r"\\(?:times|cdot)(?![a-z])", "*", spaced(text)).replace("\\div", "/")
    text = re.sub(r"(?<=\d) ?x ?(?=\d)", "*", text)
    text = re.sub(r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"[$\s]|(?<=\d),(?=\d{3})|\\text\{[^{}]*\}", "", text.replace("\\$", ""))
    for _ in range(4):  # fractions in fractions
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\binom\{(\d+)\}\{(\d+)\}", r"((\1)|(\2))", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"((\1)^(1/2))", text)
        text = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", text)
    text = re.sub(r"(\d+)!", r"(\1|0)", re.sub(r"\\?%", "/100", text))
    text = re.sub(r"(?<=[)\d])(?=\()|(?<=\))(?=\d)", "*", text)
    if re.search(r"[^-+*/().\d^|]|\*\*|//", text):
        return None
    text = re.sub(r"\d+(?:\.\d+)?|\.\d+", r"'\g<0>'", text).replace("^", "**").replace("|", "@")
    try:
        return _value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp):
        return _value_of(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if not isinstance(node, ast.BinOp):
        raise ValueError("no calculation")
    left, right = _value_of(node.left), _value_of(node.right)
    if isinstance(node.op, ast.Pow):
        return _power(left, right)
    if isinstance(node.op, ast.MatMult):  # n choose k, and n! as `n @ 0`
        n, k = int(left), int(right)
        if n > 170 or n != left or k != right:
            raise ValueError("too large")
        return Fraction(math.comb(n, k) if k else math.factorial(n))
    if isinstance(node.op, ast.Mult | ast.Div):
        return left * right if isinstance(node.op, ast.Mult) else left / right
    return left + right if isinstance(node.op, ast.Add) else left - right


def _power(base: Fraction, power: Fraction) -> Fraction:
    """A power with an exact value; ValueError for others, and for large ones."""
    if power == Fraction(1, 2) and base >= 0:
        root = Fraction(math.isqrt(base.numerator), math.isqrt(base.denominator))
        if root * root == base:
            return root
    digits = len(str(base.numerator)) + len(str(base.denominator))
    if power.denominator > 1 or abs(power) * digits > MAX_DIGITS:
        raise ValueError("not a plain power")
    return base ** int(power)
