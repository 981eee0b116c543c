"""Calculations, as answers hold them, in exact fractions."""

from __future__ import annotations

import ast
import math
import re
from fractions import Fraction

from keel.graders.reading.notation import spaced

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
