"""Right and wrong answers to the benchmarks, made from their own rows."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]


def changed_number(text: str) -> str:
    """A text with the last digit of its last number changed, or, without one, its last letter."""
    for pattern in (r"\d(?=\D*\Z)", r"[A-Za-z](?=[^A-Za-z]*\Z)"):
        found = re.search(pattern, text)
        if found is not None:
            other = "7" if found[0] != "7" else "4"
            letter = "Q" if found[0] != "Q" else "Z"
            new = other if found[0].isdigit() else letter
            return text[: found.start()] + new + text[found.end() :]
    raise AssertionError(f"nothing to change in {text!r}")


def gsm8k(row: Row) -> tuple[list[str], list[str]]:
    solution, _, number = row["answer"].rpartition("#### ")
    boxed = f"So the answer is \\boxed{{{number}}}."
    wrong = changed_number(number)
    return [row["answer"], boxed], [f"{solution}#### {wrong}", boxed.replace(number, wrong)]


def math500(row: Row) -> tuple[list[str], list[str]]:
    wrong = changed_number(row["answer"])
    return [row["solution"], f"\\boxed{{{row['answer']}}}"], [f"It is \\boxed{{{wrong}}}."]


# ---------------------------------------------------------------- code

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Add, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE,
    ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitXor: ast.BitOr,
}  # fmt: skip
MUTANTS = 12
"""Of a solution, the first: most are seen by the tests."""


def humaneval(row: Row) -> tuple[list[str], list[str]]:
    """The reference solution as a text that goes on, and in a fence; and its mutants in fences."""
    whole = row["prompt"] + row["canonical_solution"]
    fenced = "Here it is:\n\n```python\n{}\n```\nDone.".format
    first = row["prompt"].count("\n")
    seen = (fenced(code) for code in mutants(whole, first) if not passes(code, row))
    return [row["canonical_solution"], fenced(whole)], list(itertools.islice(seen, 1))


def mutants(code: str, first: int) -> Iterator[str]:
    """The code with one operator swapped, one after the other, below its line `first`."""
    for number in range(MUTANTS):
        tree = ast.parse(code)
        places = [
            (owner, name, at)
            for owner in ast.walk(tree)
            if getattr(owner, "lineno", 0) > first
            for name, value in ast.iter_fields(owner)
            for at, node in enumerate(value if isinstance(value, list) else [value])
            if type(node) in SWAPPED
        ]
        if number >= len(places):
            return
        owner, name, at = places[number]
        value = getattr(owner, name)
        if isinstance(value, list):
            value[at] = SWAPPED[type(value[at])]()
        else:
            setattr(owner, name, SWAPPED[type(value)]())
        yield ast.unparse(tree)


def passes(code: str, row: Row) -> bool:
    """Whether code passes the row's tests in a plain interpreter."""
    text = f"{code}\n{row['test']}\ncheck({row['entry_point']})\n"
    try:
        return subprocess.run(
            [sys.executable, "-c", text], timeout=10, capture_output=True, check=False
        ).returncode == 0  # fmt: skip
    except subprocess.TimeoutExpired:
        return False


ANSWERS = {"gsm8k": gsm8k, "math500": math500, "humaneval": humaneval}
