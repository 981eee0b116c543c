"""The code of a completion: in fences, in tags such as `[PYTHON]…[/PYTHON]`, or all of it."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from keel.graders.formats import ANSWER_NAME

_OPENING = re.compile(
    r"^([ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?:<\w+>|[^\n`]*:[ \t]+)?"
    r"(`{3,}|~{3,})[ \t]*+(\w*+)[^\n`]*+\n",
    re.MULTILINE,
)
_CLOSING = re.compile(r"^([ \t>]*+)(`{3,}|~{3,})([^\n]*+)", re.MULTILINE)
_CLOSINGS = 8
"""Lines that are tried as the end of a fence: code may hold fences in its docstrings."""
_TAGGED = re.compile(
    rf"^[ \t]*[<\[]((?i:{ANSWER_NAME}|code|python))[>\]][ \t]*\n?(.*?)(?:[<\[]/\1[>\]]|\Z)",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("py", "py3", "python", "python3")
DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


def python_code(text: str, wanted: Collection[str] = ()) -> str:
    """The code of the last fence ```` ```python ```` (or `py`), of the last without a name if there
    is none, of the last tag around an answer or code, or all the text.

    A fence that is not closed runs to the end. The blanks at the beginnings of lines stay, less
    those (and the `>`) that the fence itself has in a list or quotation. A fence in a docstring is
    part of the code. A fence that does not define any of the `wanted` names, as an example of how
    to use them, counts only if none does; fences that define what it uses are put around it.
    """
    fences = list(_fences(text)) or [("python", found[2]) for found in _TAGGED.finditer(text)]
    named = [at for at, (name, _) in enumerate(fences) if name in _PYTHON]
    # One without a name next to it shows what the code prints, more likely than not.
    every = [*(at for at, (name, _) in enumerate(fences) if not name), *named]
    if not every:
        return text
    chosen = [at for at in every if _defines(fences[at][1], wanted)] or every
    parts = {chosen[-1]}
    missing = _missing(fences[chosen[-1]][1])
    for at in reversed(range(len(fences))):
        code = fences[at][1]
        if at in every and at not in parts and missing & _bound(code, imports=True):
            parts.add(at)
            missing |= _missing(code)
    return "\n".join(fences[at][1] for at in sorted(parts))


def _defines(code: str, wanted: Collection[str]) -> bool:
    """Whether code defines one of the names, or is the body of a function."""
    body = code.startswith((" ", "\t")) and not _tree(code).body
    return body or not _bound(code).isdisjoint(wanted)


def _bound(code: str, *, imports: bool = False) -> set[str]:
    """The names that code defines or assigns at its top level, with `imports` those as well."""
    kinds = [*DEFINING, ast.Assign, ast.AnnAssign]
    kinds += [ast.Import, ast.ImportFrom] if imports else []
    found: set[str] = set()
    for node in _tree(code).body:
        if isinstance(node, DEFINING):
            found.add(node.name)
        elif isinstance(node, tuple(kinds)):
            found |= names_in([node], ast.Store)
    return found


def _missing(code: str) -> set[str]:
    """The names that code uses and does not bind anywhere."""
    tree = _tree(code)
    return names_in([tree], ast.Load) - names_in([tree], ast.Store) - set(dir(builtins))


def _tree(code: str) -> ast.Module:
    """The syntax tree of code; an empty one if it is not Python."""
    with suppress(*NOT_PYTHON):
        return parsed(code)
    return ast.Module([], [])


def _fences(text: str) -> Iterator[tuple[str, str]]:
    """The name of each fence, in lower case, and its code."""

    def code(end: re.Match[str] | None) -> str:
        inside = text[start : end.start() if end else None]
        blanks = "[ \t>]" if ">" in indent else "[ \t]"
        return re.sub(f"^{blanks}{{0,{len(indent)}}}", "", inside, flags=re.MULTILINE)

    at = 0
    while opening := _OPENING.search(text, at):
        start, indent, ticks = opening.end(), opening[1], opening[2]
        found = (m for m in _CLOSING.finditer(text, start) if m[2][0] == ticks[0])
        lines = list(itertools.islice(found, _CLOSINGS))
        ends = [m for m in lines if len(m[2]) >= len(ticks) and not m[3].strip()]
        near = [m for m in lines if len(m[1]) < len(indent) + 4]
        whole = (m for m in ends if _is_python(code(m)))
        end = next((m for m in (*whole, *near, *ends)), None)
        yield opening[3].lower(), code(end)
        # A line with a name opens the next fence; the one before it was not closed.
        at = len(text) if end is None else end.end() if end in ends else end.start()


def _is_python(code: str) -> bool:
    """Whether a text can be parsed, as a program or as the body of a function."""
    for before in ("", "if 1:\n"):
        with suppress(*NOT_PYTHON):
            return bool(parsed(before + code))
    return False


def names_in(nodes: Iterable[ast.AST], context: type[ast.expr_context]) -> set[str]:
    """The names that are used (Load), or that are bound in any way (Store)."""
    found = set()
    for node in (one for top in nodes for one in ast.walk(top)):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, context):
                found.add(node.id)
        elif context is ast.Store:
            if isinstance(node, DEFINING):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
                found.add(node.name or "")
            elif isinstance(node, ast.alias):
                found.add(node.asname or node.name.partition(".")[0])
    return found


_PARSING = threading.Lock()


def parsed(text: str) -> ast.Module:
    """The syntax tree of a text, in one thread at a time.

    CPython counts the depth of the tree that it converts for all threads together, and raises
    SystemError if they mix (seen with 3.11.7).
    """
    with _PARSING:
        return ast.parse(text)
