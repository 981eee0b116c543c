"""The house as its source says it: files, sizes, first lines.

`python -m tests.house` writes the list of files into the README.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "keel"
HEADING = "## Every file in a line\n"
NEXT = "\n## Licence"


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
    def room(self) -> str:
        return self.name.split("/")[0] if "/" in self.name else ""

    @property
    def line(self) -> str:
        """The first sentence of the docstring, on one line."""
        doc = ast.get_docstring(self.tree) or ""
        return " ".join(doc.split("\n\n")[0].split())


def sources() -> list[Source]:
    """Every module of the package, in order of its path."""
    out = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        out.append(Source(path, text, ast.parse(text)))
    return out


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every function, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def listing() -> str:
    """The README's list: rooms from top to bottom, a line a file."""
    rooms = (
        *("", "cli", "pipelines", "training", "control", "engines", "rewards", "tasks", "learn"),
        *(
            "models",
            "kernels",
            "insight",
            "preferences",
            "runs",
            "config",
            "algorithms",
            "objective",
            "verify",
        ),
    )
    every = sources()
    assert {source.room for source in every} == set(rooms)
    lines: list[str] = []
    for room in rooms:
        own = [s for s in every if s.room == room]
        head = next((s.line for s in own if s.name == f"{room}/__init__.py"), "")
        lines.append(f"\n**{room}/** {head}\n" if room else "\n**keel/**\n")
        for source in own:
            if source.name != f"{room}/__init__.py":
                lines.append(f"- `{source.name}` {source.line}")
    recipes = sorted(p.name for p in (SOURCE / "config" / "recipes").glob("*.toml"))
    lines.append(f"\nShipped recipes in `config/recipes/`: {', '.join(recipes)}.")
    return "\n".join(lines) + "\n"


def readme(text: str) -> str:
    """The README with its list brought up to date."""
    start = text.index(HEADING) + len(HEADING)
    end = text.index(NEXT)
    return text[:start] + listing() + text[end:]


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text(encoding="utf-8")), encoding="utf-8")
