"""Wrong variants of programs: one operator, constant, condition or statement changed."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.FloorDiv,
    ast.Mod: ast.Add,
}


def mutants(program: str, function: str, count: int, seed: int) -> list[str]:
    """Up to `count` different variants of a program, each changed in one place of a function."""
    tree = ast.parse(program)
    made = {ast.unparse(tree)}
    found = []
    places = len(list(_changes(_function(tree, function))))
    for place in random.Random(seed).sample(range(places), places):
        changed = copy.deepcopy(tree)
        body = _function(changed, function)
        for at, _ in enumerate(_changes(body)):
            if at == place:
                break
        text = ast.unparse(changed)
        if text not in made and len(found) < count:
            made.add(text)
            found.append(text)
    return found


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    named = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return named[-1]


def _changes(function: ast.FunctionDef) -> Iterator[None]:
    """Change the function in one place after another; each change is undone by the next."""
    for node in list(ast.walk(function)):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            old, node.ops[0] = node.ops[0], COMPARED[type(node.ops[0])]()
            yield
            node.ops[0] = old
        elif isinstance(node, ast.BinOp) and type(node.op) in CALCULATED:
            operator, node.op = node.op, CALCULATED[type(node.op)]()
            yield
            node.op = operator
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            value, node.value = node.value, not node.value
            if type(value) is int:
                node.value = value + 1
            yield
            node.value = value
        elif isinstance(node, ast.Return) and node.value is not None:
            returned, node.value = node.value, ast.Constant(None)
            yield
            node.value = returned
        elif isinstance(node, ast.If | ast.While):
            test, node.test = node.test, ast.UnaryOp(ast.Not(), node.test)
            yield
            node.test = test
