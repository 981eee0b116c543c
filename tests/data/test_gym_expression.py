"""Formulas are what sympy's parser makes of them, where that parser may be used."""

from __future__ import annotations

import pytest

sympy = pytest.importorskip("sympy")
from sympy.parsing.sympy_parser import parse_expr  # noqa: E402

from keel.data.gym_worker import arithmetic, formula  # noqa: E402

X = {"x": sympy.Symbol("x"), "C": sympy.Symbol("C")}


@pytest.mark.parametrize("text", ["3 + 4*(5 - 2)/7", "-2**3", "7//2 + 7 % 4", ".5*8", "(1)\n"])
def test_arithmetic_is_what_the_parser_says(text: str) -> None:
    assert arithmetic(text) == parse_expr(text.strip())


@pytest.mark.parametrize(
    "text",
    [
        "x**3/3 - 5*x/2 + C",
        "-cos(2*x)/2 + exp(-x)*log(x) + k",
        "sqrt(x + 1)*asin(x) + abs(x) + ln(x, 2) + pi*E",
        "(3*x - 2)**10/30 + C1",
    ],
)
def test_a_formula_is_what_the_parser_says(text: str) -> None:
    assert formula(text, X) == parse_expr(text, local_dict=dict(X))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "x",
            "0x10",
            "1_0",
            "1e5",
            "2 # 3",
            "9**9**9",
            "2**-9**9",
            "4!",
            "sqrt(4)",
            "1 if 1 else 2",
        ),
        *("().__class__", "[1][0]", "'1'", "1 < 2", "2j", "True", "", "1,2", "9" * 101, "１"),
    ],
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        arithmetic(text)


@pytest.mark.parametrize(
    "text",
    [
        *("integrate(x, x)", "diff(x)", "eval(x)", "exit", "S", "Symbol", "_", "__import__"),
        *(
            "x.diff",
            "sin(x=1)",
            "sin(*x)",
            "lambda: x",
            "(x + 1)**10**9",
            "sympify(x)",
            "x if x else x",
        ),
    ],
)
def test_what_is_no_formula_is_refused(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        formula(text, X)


def test_functions_are_for_integrals_only() -> None:
    assert formula("x*y + 2") == parse_expr("x*y + 2")
    with pytest.raises(ValueError, match="not a formula"):
        formula("sin(x)")
