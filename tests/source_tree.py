"""The source tree of the package: files, sizes, docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "keel"


@dataclass(frozen=True)
class Source:
    """One module."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.relative_to(SOURCE).as_posix()

    @property
    def package(self) -> str:
        return self.name.split("/")[0] if "/" in self.name else ""

    @property
    def line(self) -> str:
        """The first sentence of the docstring, on one line."""
        doc = ast.get_docstring(self.tree) or ""
        return " ".join(doc.split("\n\n")[0].split())


@cache
def sources() -> tuple[Source, ...]:
    """Every module of the package, in order of its path."""
    out = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        out.append(Source(path, text, ast.parse(text)))
    return tuple(out)


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every function, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1
