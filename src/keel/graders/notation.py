"""How answers are written: characters and formulas in one way, words by class, tokens of prose.

The words are in words.toml. A token has a letter: that of its class of words, or `9` a number, `w`
another word, `u` a unit, `S` a scale, `x` a single letter, `z` characters of a script without
blanks, `=`, `+` an operator, `%`, `.` the end of a sentence or line, `\\` a command of LaTeX, `s` a
symbol, or itself of `,:()|`. Blanks, emphasis, dollars, braces and quotes are none.

An expression has a form, by which it is seen what it leaves to do and whether it is the question's
own: of sympy's trees as latex2sympy makes them, which evaluate little (`2x + 3x` is two terms).
"""

from __future__ import annotations

import math
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "₀₁₂₃₄₅₆₇₈₉"
_MARKS = re.compile("(?<=[\u0300-\u036f]{4})[\u0300-\u036f]+")
"""Of many accents on one letter: to put them in order takes the square of their number."""
_ROOT = re.compile(r"√ ?(\d+|[A-Za-z]|\([^()]*\))")
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–‐‑‒﹣－⁻", "-"),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
        **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp "},
        **{"√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap "},
        **{"∈": r"\in ", "°": r"^\circ ", "º": r"^\circ ", "θ": r"\theta ", "∅": r"\emptyset "},
        **{"⁄": "/", "∕": "/", "…": r"\ldots ", "。": ". ", "、": ", ", "，": ", ", "；": "; "},
        **{"：": ": ", "？": "? ", "！": "! "},
    }
)

_EMPHASIS = re.compile(r"(\*{1,3}|_{1,3}|[`\"'])([^*_`\"'].*)\1", re.DOTALL)
FORMULA = re.compile(
    r"\$\$([^$]*)\$\$|(?<!\\)\$((?:[^$\\]|\\.)++)\$(?!\d)"
    r"|\\\(((?:(?!\\[()]).)*)\\\)|\\\[((?:(?!\\[\[\]]).)*)\\\]",
    re.DOTALL,
)
"""A formula between dollars or brackets of LaTeX; one group holds what is in it."""
_BRACES = re.compile(r"(?:\\(?:text|mbox|mathrm|mathbf|textbf|boldsymbol|bm|fbox|boxed) ?)?\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SIZES = re.compile(
    r"\\(?:left|right|[Bb]igg?[lr]?|displaystyle|textstyle|limits|bf|rm)(?![A-Za-z])|(?<!\\)\\[,!;:>]|~"
)
_BLANK = re.compile(r"(?<!\\)\\ ")
_FRACTIONS = re.compile(r"\\(?:d|t|c)frac(?![a-z])")
_MATH_TEXT = re.compile(r"\\(?:textnormal|textrm|textit|mathit|mathsf|texttt|hbox)(?= ?\{)")
INNER = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+"
"""What braces hold, for a pattern: braces in braces in braces at the most."""
_SIUNITX = re.compile(rf"\\(SI|qty|num|ang) ?\{{({INNER})\}}(?: ?\{{({INNER})\}})?")
_COMMA = re.compile(r"(?<=\d)(?:\{,\}|, ?(?:\\! ?)+| ?\\, ?)(?=\d{3})")
_OVER = re.compile(r"(?:\{|\A)([^{}]*)\\over(?![a-z])([^{}]*)(?:\}|\Z)")


def plain(text: str) -> str:
    """A text with one way to write each character: full-width digits, minus signs, `π`, `x²`."""
    text = _SIUNITX.sub(_written_out, text)
    if text.isascii():
        return text
    text = _MARKS.sub("", text)
    text = re.sub(f"[{_RAISED}]+", r"^{\g<0>}", text)  # NFKC makes digits of them
    text = re.sub(f"[{_LOWERED}]+", r"_{\g<0>}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text).translate(_CHARACTERS)
    for character in set(re.findall("[\u00bc-\u00be\u2150-\u215e]", text)):  # ½ and such
        text = text.replace(character, " " + unicodedata.normalize("NFKC", character))
    return unicodedata.normalize("NFKC", text).replace("⁄", "/")


def _written_out(found: re.Match[str]) -> str:
    r"""A command of siunitx as what it prints: `\SI{7}{\watt\per\meter\squared}`."""
    command, number, unit = found.groups("")
    unit = re.sub(r"\\per(?![a-z])", "/", unit).replace(r"\squared", "^2").replace(r"\cubed", "^3")
    unit = re.sub(r"\\(?!frac|cdot)([a-z]+)", r" \1", unit)
    return number + r"^\circ" * (command == "ang") + (rf" \mathrm{{{unit}}}" if unit else "")


def spaced(text: str) -> str:
    r"""A text with `\,`, `\ ` and such as blanks, and one command for each of text and fraction."""
    text = _FRACTIONS.sub(r"\\frac", _COMMA.sub(",", text))
    return _BLANK.sub(" ", _SIZES.sub(" ", _MATH_TEXT.sub(r"\\text", text)))


def bare(text: str) -> str:
    """An answer less what stands around it: blanks, emphasis, dollars, braces, a full stop."""
    text = _OVER.sub(r"\\frac{\1}{\2}", " ".join(spaced(plain(text)).split()))
    for _ in range(8):  # layers; more of them are not an answer
        before = text
        text = text.strip().rstrip(" ,;:").removesuffix(".")
        found = _EMPHASIS.fullmatch(text)
        if found and found[1] not in found[2]:
            text = found[2]
        if found := FORMULA.fullmatch(text):
            text = next(part for part in found.groups() if part is not None)
        if (braces := _BRACES.match(text)) and closing(text, braces.end()) == len(text):
            text = text[braces.end() : -1]
        if text == before:
            break
    return text.strip()


def closing(text: str, start: int) -> int:
    """Where braces that are open before `start` are closed; −1 if they are not."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.end()
    return -1


_TABLE = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
UNBROKEN = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Characters of scripts without blanks between words, for a pattern."""
SCRIPT = re.compile(f"[{UNBROKEN}]")
LETTERS = frozenset(_TABLE["units"]["letters"].split())
ATTACHED = frozenset(_TABLE["units"]["attached"].split())
UNITS = {name: line.split()[0] for line in _TABLE["units"]["known"] for name in line.split()}
"""Units by each of their names in the singular."""
SCALES: dict[str, int] = {
    one: power
    for names, power in _TABLE["scales"].items()
    for one in ([names] if names.isascii() else names)
}
"""The power of ten that a word multiplies the number before it by."""
_CLASSES, _COMMANDS = (
    {word: letter for letter, words in _TABLE[kind].items() for word in words.split()}
    for kind in ("classes", "commands")
)


def word_set(name: str) -> frozenset[str]:
    """A list of words of words.toml."""
    return frozenset(_TABLE["words"][name].split())


def pattern(name: str, flags: int = re.IGNORECASE, around: str = "{}") -> re.Pattern[str]:
    """A list of patterns of words.toml as one, set into what stands `around` it."""
    return re.compile(around.format(_joined(name)), flags)


def _joined(name: str) -> str:
    every = "|".join(_TABLE["patterns"][name])
    return re.sub("@([a-z]+)@", lambda found: f"(?:{_joined(found[1])})", every)


_SCALED = pattern("scaled")
CHANGED = pattern("changed")
_TOKEN = re.compile(
    r"(?P<bullet>^[ \t]*(?:[-+*>•]|\d{1,3}[.)])(?=[ \t]))"
    r"|(?P<number>\.?\d(?:[\d.,]*\d)?)"
    rf"|(?P<script>[{UNBROKEN}]+)"
    r"|(?P<nothing>[\"“”'`~$&{}\[\]]|\*\*+|\\[^A-Za-z%]|\\pmod ?\d+"
    r"|\\(?:begin|end|color|textcolor|tag|pmod) ?\{[^{}]*\}"
    r"|(?<=[A-Za-z}])\^ ?(?:\{ ?-?\d ?\}|-?\d))"
    r"|\\?(?P<percent>[%′″])"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?P<end>\n|[.;!?](?!\d)|\b[Nn]o ?[:,])"
    rf"|(?P<word>[^\W\d_{UNBROKEN}]+(?:['’&-][^\W\d_{UNBROKEN}]+)*)"
    r"|(?P<equals>(?<![<>])(?<!\D!)=>?|->|#+)"
    r"|(?P<operator>[-+/^<>=!]|\*(?=\s*(?:[\d$(\\.]|[A-Za-z](?![A-Za-z])))|_(?=\{))"
    r"|(?P<sign>[,:()|]|[^\x00-\x7f\s])",
    re.MULTILINE,
)
_LETTER = {"number": "9", "percent": "%", "end": ".", "equals": "=", "operator": "+"}


class Token(NamedTuple):
    """A word or sign of a text: the letter of its class, and where it starts and ends."""

    letter: str
    text: str
    start: int
    end: int


def tokens(text: str, start: int = 0, end: int | None = None) -> list[Token]:
    """The tokens of a text, less those that say nothing."""
    found = []
    for match in _TOKEN.finditer(text, start, len(text) if end is None else end):
        kind, said = match.lastgroup or "", match[0]
        letter = _LETTER.get(kind) or (word_class(said) if kind == "word" else "")
        if kind == "script":
            letter = "S" if CHANGED.search(said[:8]) else "z" if len(said) <= 8 else "p"
        elif kind == "command":
            letter = _COMMANDS.get(said[1:], "\\")
        elif kind == "sign":
            letter = said if said.isascii() else "s"
        if letter:
            found.append(Token(letter, said, *match.span()))
    return found


@lru_cache(maxsize=4096)
def word_class(word: str) -> str:
    """The letter of a word's class: `w` of a noun or name, `S` of a scale in another language."""
    word = word.lower().replace("’", "'")
    if word in _CLASSES:
        return str(_CLASSES[word])
    if word.endswith("n't"):
        return "n"
    if len(word) == 1:
        return "x"
    if _SCALED.fullmatch(word):
        return "S"
    return "u" if word in UNITS or word.removesuffix("s") in UNITS else "w"


FORMULAS = 24
"""Formulas of a question that are compared, at the most."""

_PLAIN = re.compile(
    r"(?:(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|\\[A-Za-z]+|[\d\s+*/^(){}\[\]_.=<>,|-])+"
)
_WRITTEN = re.compile(
    r"!|\\(?:d?binom|choose|gcd|lcm|det|bmod|operatorname|int|iint|oint|sum|prod|lim|cdots|l?dots"
    r"|frac ?\{ ?(?:d|\\partial) ?\})(?![a-z])|\d ?(?:\\times|\\cdot|\\div|\*) ?\d+(?![\d.]* ?\^)"
)
"""Operations that the parser carries out, or that take long."""
_QUOTIENT = re.compile(r"\\[dt]?frac ?\{ ?(\d{1,18})[^-+{}]*\} ?\{ ?(\d{1,18}) ?\}")
_RATIONAL = re.compile(r"-?\d+(?:/\d+)?")
_RELATION = re.compile(r"\\(?:leq?|geq?|lt|gt|neq?|approx)(?![a-z])|[<>=,]")


def squeezed(text: str) -> str:
    """A formula less blanks, dots, sizes, and braces of one character."""
    text = re.sub(r"\\(?:left|right|cdot|displaystyle|[,;!: ])|[\s$*~]", "", text)
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"\\[dt]frac", r"\\frac", text))


def formulas(question: str) -> Iterator[str]:
    """The formulas of a question and their sides; of one without any, what looks like one."""
    found = [
        next(part for part in match.groups() if part is not None)
        for match in FORMULA.finditer(question)
    ]
    found = found or [m[0] for m in _PLAIN.finditer(question) if re.search(r"[-+*/^\\(]", m[0])]
    for one in found[:FORMULAS]:
        yield from dict.fromkeys([one, *_RELATION.split(one)])


def stands_in(question: str, gold: Any, stated: Any, text: str, read: Callable[[str], Any]) -> bool:
    """Whether an expression stands in the question, and is not written as gold is.

    Neither is one of fewer brackets than gold, if the question asks for factors. `read` makes a
    formula a tree, or None.
    """
    given = form(stated)
    if form(gold) == given:
        return False
    factors = re.search(r"\b(?:factor|faktoris)|分解", question, re.IGNORECASE)
    if factors and brackets(gold) > brackets(stated):
        return True
    if squeezed(text) in map(squeezed, formulas(question)):
        return True
    return any(form(made) == given for made in map(read, formulas(question)) if made is not None)


def form(made: Any) -> Any:
    """What is the same for expressions that are written alike, in whatever order.

    A leaf is a text; of a product's numbers, one is made.
    """
    name, args = type(made).__name__, list(getattr(made, "args", ()))
    if name == "Pow" and args[1] == -1:
        inner = type(args[0]).__name__
        if inner == "Pow" and args[0].args[1].is_Rational:
            return form(type(made)(args[0].args[0], -args[0].args[1], evaluate=False))
        if inner == "Mul":
            name, args = "Mul", [type(made)(one, -1, evaluate=False) for one in args[0].args]
    if not args or made.is_Rational:
        return str(made)
    parts = [form(one) for one in args]
    if name == "Pow" and parts[1] == "-1" and _RATIONAL.fullmatch(str(parts[0])):
        return parts[0] if parts[0] == "0" else str(1 / Fraction(parts[0]))
    if parts[1:] in (["1"], ["E"]) and name in ("Pow", "log"):
        return parts[0] if name == "Pow" else (name, parts[:1])
    if name not in ("Add", "Mul"):
        return (name, parts)
    flat = [x for p in parts for x in (p[1] if isinstance(p, tuple) and p[0] == name else [p])]
    if name == "Mul":
        factors = [Fraction(x) for x in flat if isinstance(x, str) and _RATIONAL.fullmatch(x)]
        factor = str(math.prod(factors, start=Fraction(1)))
        flat = [x for x in flat if not (isinstance(x, str) and _RATIONAL.fullmatch(x))]
        flat += [factor] if factor != "1" or not flat else []
    return flat[0] if len(flat) == 1 else (name, sorted(flat, key=str))


def left_to_do(made: Any, text: str) -> set[str]:
    """The kinds of operations that an expression leaves to do."""
    from sympy import preorder_traversal
    from sympy.core.parameters import distribute

    with distribute(False):
        done = _evaluated(made)
    divided = any(int(n) % max(1, int(d)) == 0 < int(d) - 1 for n, d in _QUOTIENT.findall(text))
    kinds = {
        "written": divided or _WRITTEN.search(text) is not None,
        "terms": _cost(form(made)) > _cost(form(done)),
        "root": any(map(_reducible, preorder_traversal(made))),
        "brackets": brackets(made) > 1,
        "fraction": _cancels(made),
        "logarithms": any(map(_combines, preorder_traversal(made))),
    }
    return {kind for kind, found in kinds.items() if found}


def brackets(made: Any) -> int:
    """How many sums are multiplied in an expression, at the most: 2 in (x + 1)²."""
    name = type(made).__name__
    args: Any = getattr(made, "args", ())
    if name == "Mul":
        return sum(map(brackets, args))
    if name == "Pow" and args[1].is_Integer:
        return max(0, int(args[1])) * brackets(args[0])
    return max(int(name == "Add"), *map(brackets, args), 0)


def _evaluated(made: Any) -> Any:
    args = getattr(made, "args", ())
    try:
        return made.func(*map(_evaluated, args)) if args else made
    except Exception:
        return made


def _cost(part: Any) -> int:
    """Leaves, sums and functions of a form."""
    if isinstance(part, str):
        return 1
    name, parts = part
    more = len(parts) - 1 if name == "Add" else 3 * (name not in ("Mul", "Pow", "exp", "Abs"))
    return more + sum(map(_cost, parts))


def _cancels(made: Any) -> bool:
    """Whether it is one fraction with names, of which numerator and denominator share a factor."""
    from sympy import PolynomialError, gcd

    if type(made).__name__ != "Mul":
        return False
    try:
        numerator, denominator = made.as_numer_denom()
        return bool(made.free_symbols) and abs(gcd(numerator, denominator)) != 1
    except (PolynomialError, AttributeError, TypeError):
        return False


def _combines(made: Any) -> bool:
    """Whether it is a sum of logarithms of numbers, as ln 4 - ln 2."""
    terms = made.args if type(made).__name__ == "Add" else ()
    factors = ([one, *one.args] if type(one).__name__ == "Mul" else [one] for one in terms)
    return sum(any(type(f).__name__ == "log" and f.is_number for f in fs) for fs in factors) > 1


def _reducible(made: Any) -> bool:
    """Whether it is a root of a number that can be made simpler, as √50, √4 and √(1/2)."""
    if type(made).__name__ != "Pow" or not all(one.is_Rational for one in made.args):
        return False
    base, power = made.args
    return bool(power.q > 1 and power > 0 and type(base**power).__name__ != "Pow")
