"""Tests that take over changes to arguments between their statements, not within one.

`assert ordered(n) == sorted(n)` asks whether `ordered` sorts; code that empties `n` and returns
`[]` must not pass it by that change. So what a call that returns a value has changed in place is
seen from the next statement on.
"""

from __future__ import annotations

import ast
from functools import lru_cache

SETTLE = "__keel_settle__"
"""The function that tests call before each statement (`keel.sandbox.boundary`)."""


@lru_cache(4096)
def stepwise(text: str) -> str:
    """The source of tests with a call of `SETTLE` before each statement."""
    tree = ast.parse(text)
    for node in list(ast.walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, [part for one in block for part in _settled(one)])
    return ast.unparse(ast.fix_missing_locations(tree))


def _settled(statement: ast.stmt) -> list[ast.stmt]:
    first = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    if first or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
        return [statement]  # what must stand first: imports from the future, docstrings
    call = ast.Expr(ast.Call(ast.Name(SETTLE, ast.Load()), [], []))
    return [call, statement]
