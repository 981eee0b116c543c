"""How an expression is written: what it leaves to do, and whether it is the question's own.

On sympy's trees as latex2sympy makes them, which evaluate little: `2x + 3x` is a sum of two terms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from keel.graders.notation import FORMULA

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
_OVER = re.compile(r"\\[dt]?frac ?\{ ?(\d{1,18})[^-+{}]*\} ?\{ ?(\d{1,18}) ?\}")
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
    divided = any(int(n) % max(1, int(d)) == 0 < int(d) - 1 for n, d in _OVER.findall(text))
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
