"""What the process of a verdict on reasoning-gym reads an answer with, in place of `eval`.

Runs in the sandbox, without the rest of Keel. A syntax tree is made of the text, and of the tree
sympy's objects; only numbers, operators, names of symbols and a few functions are read.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import sympy

LONGEST = 10_000
"""Characters; an answer has a few dozen."""
MOST_BITS = 10_000.0
"""Of any number on the way, so that `9**9**9` is refused before it is computed."""
CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}
_CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
_KINDS = ("{}", "a{}", "{}h", "a{}h")
FUNCTIONS = {
    **{name: getattr(sympy, name) for kind in _KINDS for name in map(kind.format, _CIRCULAR)},
    **{name: getattr(sympy, name) for name in ("exp", "log", "ln", "sqrt", "cbrt", "Abs", "sign")},
    "abs": sympy.Abs,
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
# No comment, which a scorer would count the numbers of, and no other way to write one.
_ALLOWED = re.compile(r"[A-Za-z0-9_+\-*/%(),. ]*")
_NUMBER = re.compile(r"\d{1,100}(?:\.\d{0,100})?|\.\d{1,100}")


def arithmetic(text: str) -> Any:
    """The value of a text of numbers and operators. Raises ValueError for any other."""
    return _read(text, None, {})


def formula(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """The formula of a text; with functions if it has its own symbols (`local_dict`).

    Other names than those are symbols too, unless they are sympy's or Python's. Raises ValueError
    for any other text.
    """
    return _read(text, dict(local_dict or {}), FUNCTIONS if local_dict else {})


def _read(text: str, names: dict[str, Any] | None, functions: Mapping[str, Any]) -> Any:
    line = " ".join(text.split())
    if len(line) > LONGEST or not _ALLOWED.fullmatch(line):
        raise ValueError("not a formula")
    tree = ast.parse(line, mode="eval").body
    if _bits(tree) > MOST_BITS:
        raise ValueError("a formula of too large numbers")
    return _value(tree, line, names, functions)


def _value(node: ast.expr, text: str, names: dict[str, Any] | None, functions: Any) -> Any:
    if isinstance(node, ast.Constant):
        literal = text[node.col_offset : node.end_col_offset]
        if not _NUMBER.fullmatch(literal):
            raise ValueError("not a plain number")
        return sympy.Integer(literal) if literal.isdigit() else sympy.Float(literal)
    if isinstance(node, ast.Name):
        return _symbol(node.id, names)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, text, names, functions))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left = _value(node.left, text, names, functions)
        return _BINARY[type(node.op)](left, _value(node.right, text, names, functions))
    called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    if isinstance(node, ast.Call) and called in functions and not node.keywords:
        given = [_value(one, text, names, functions) for one in node.args[:3]]
        return functions[called](*given)
    raise ValueError("not a formula")


def _symbol(name: str, names: dict[str, Any] | None) -> Any:
    if names is None or name.startswith("_"):
        raise ValueError("a name in a formula that has none")
    if name in names:
        return names[name]
    if name in CONSTANTS:
        return CONSTANTS[name]
    if hasattr(sympy, name) or hasattr(builtins, name):
        raise ValueError(f"{name} is not a symbol")
    return sympy.Symbol(name)


def _bits(node: ast.expr) -> float:
    """How many binary digits a value may have, roughly; a symbol counts as 4."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = abs(node.value)
        return math.log2(value + 2) if value < math.inf else math.inf
    if isinstance(node, ast.UnaryOp):
        return _bits(node.operand)
    if isinstance(node, ast.Call):
        return 2.0 + sum(map(_bits, node.args))
    if isinstance(node, ast.BinOp):
        left, right = _bits(node.left), _bits(node.right)
        if isinstance(node.op, ast.Pow):
            return left * math.exp2(min(right, 64.0))
        return max(left, right) + 1 if isinstance(node.op, ast.Add | ast.Sub) else left + right
    return 2.0


def prepare() -> None:
    """Replace what scorers evaluate an answer with; for this process alone.

    Formulas are read, not evaluated; other scorers get a literal of Python, or nothing. NaN is
    refused where a comparison with it would pass for equality.
    """
    sympy.parse_expr = formula
    for path, name, replacement in (
        ("games.countdown", "parse_expr", arithmetic),
        ("games.puzzle24", "parse_expr", arithmetic),
        ("algorithmic.string_insertion", "eval", ast.literal_eval),
        ("algorithmic.spiral_matrix", "eval", ast.literal_eval),
        ("algorithmic.binary_matrix", "eval", ast.literal_eval),
        ("games.n_queens", "eval", ast.literal_eval),
        ("algorithmic.number_sorting", "float", _number(float)),
        ("algebra.complex_arithmetic", "float", _number(float)),
        ("algebra.complex_arithmetic", "complex", _number(complex)),
    ):
        setattr(sys.modules[f"reasoning_gym.{path}"], name, replacement)


def _number(kind: Callable[..., Any]) -> Callable[..., Any]:
    def number(*given: Any) -> Any:
        value = kind(*given)
        if value != value:
            raise ValueError("not a number")
        return value

    return number
