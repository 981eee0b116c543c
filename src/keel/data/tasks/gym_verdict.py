"""What the process of one verdict on reasoning-gym changes before it scores an answer.

Runs in the sandbox, without the rest of Keel.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any

import sympy

from .gym_expression import arithmetic, formula


def bounded(value: Any) -> float:
    """A verdict: from 0 to 1, and 0 for what is no number."""
    number = float(value)
    return min(max(number, 0.0), 1.0) if number == number else 0.0


def prepare() -> None:
    """Replace what scorers evaluate an answer with; for this process alone.

    Formulas are read, not evaluated; other scorers get a literal of Python, or nothing. And where
    a comparison with what is no number would pass for equality, there is no such number.
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
