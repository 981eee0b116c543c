"""An explanation as Unicode for a terminal, as LaTeX, as JSON and as a page's Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keel.algorithms.symbols import (
    prose_to_latex,
    prose_to_unicode,
    text_to_latex,
    to_unicode,
    width,
)
from keel.algorithms.terms import CHOICE, Equation, ModelUse, Term

_MARGIN = 5
"""Columns of the symbols on a terminal."""
_LATEX_COLUMNS = 80
"""Columns of Unicode that fit a printed line."""
_MARK = "†"
_LEGEND = f"{_MARK} {CHOICE}, in part at least: no paper fixes it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """All that is printed. Prose holds formulas between dollars."""

    name: str
    title: str
    objective: tuple[Equation, ...]
    reading: str
    terms: tuple[Term, ...]
    models: tuple[ModelUse, ...]
    notes: tuple[str, ...]

    @property
    def loaded(self) -> tuple[str, ...]:
        """The roles that take weights of their own."""
        return tuple(use.role for use in self.models if use.loaded)


# ---------------------------------------------------------------- terminal


def unicode(sheet: Sheet, columns: int) -> str:
    """Plain text of at most so many columns, where no single symbol is wider."""
    blocks = [_head(sheet, columns), *(_term(term, columns) for term in sheet.terms)]
    blocks += [_models(sheet, columns)]
    if sheet.notes:
        blocks += ["\n".join(["Notes", *_bullets(sheet.notes, columns)])]
    if any(term.keels_choice for term in sheet.terms):
        blocks += [_LEGEND]
    return "\n\n".join(blocks)


def _head(sheet: Sheet, columns: int) -> str:
    lines = _fill(f"{sheet.name} · {sheet.title}", columns, "")
    lines += ["─" * columns]
    for line in sheet.objective:
        lines += _equation(line, columns, "")
    return "\n".join([*lines, "", *_fill(_unbroken(sheet.reading), columns, "")])


def _term(term: Term, columns: int) -> str:
    indent = " " * _MARGIN
    symbol = to_unicode(term.symbol)
    left = symbol + " " * max(_MARGIN - width(symbol), 1) + term.title
    gap = columns - width(left) - width(term.kind)
    lines = [left + " " * max(gap, 2) + term.kind]
    for line in term.equations:
        lines += _equation(line, columns, indent)
    lines += _fill(_unbroken(term.text), columns, indent)
    mark = f" {_MARK}" if term.keels_choice else ""
    return "\n".join([*lines, *_fill(f"Source{mark}: {term.source}", columns, indent)])


def _models(sheet: Sheet, columns: int) -> str:
    roles = ", ".join(sheet.loaded)
    lines = [f"Models in memory: {len(sheet.loaded)} ({roles})"]
    column = max(len(use.role) for use in sheet.models) + 2
    for use in sheet.models:
        start = " " * _MARGIN + use.role.ljust(column)
        lines += _fill(use.what, columns, start, " " * len(start))
    return "\n".join(lines)


def _bullets(notes: tuple[str, ...], columns: int) -> Iterator[str]:
    for note in notes:
        first = "·".rjust(_MARGIN - 1) + " "
        yield from _fill(_unbroken(note), columns, first, " " * _MARGIN)


def _equation(line: Equation, columns: int, indent: str) -> list[str]:
    """On one line if it fits, else broken between its parts under the relation's right side."""
    whole = indent + line.unicode
    if width(whole) <= columns:
        return [whole]
    start = f"{indent}{to_unicode(f'{line.left} {line.relation}')} "
    hang = " " * width(start)
    lines = [start + to_unicode(line.parts[0])]
    for part in map(to_unicode, line.parts[1:]):
        joined = f"{lines[-1]} {part}"
        lines = [*lines[:-1], joined] if width(joined) <= columns else [*lines, hang + part]
    return [
        piece
        for text in lines
        for piece in _fill(
            text.strip(), columns, text[: len(text) - len(text.lstrip())], hang + "  "
        )
    ]


def _unbroken(text: str) -> str:
    """Prose for `_fill`, which breaks no line within a formula."""
    return prose_to_unicode(text, space="\u00a0")


def _fill(text: str, columns: int, first: str, rest: str | None = None) -> list[str]:
    lines = textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\u00a0", " ") for line in lines]


# ---------------------------------------------------------------- LaTeX


def latex(sheet: Sheet) -> str:
    """A fragment for a document that loads `amsmath`."""
    lines = [
        rf"\paragraph{{{text_to_latex(sheet.name)}: {text_to_latex(sheet.title)}}}",
        r"\begin{align*}",
        " \\\\\n".join(_aligned(line) for line in sheet.objective),
        r"\end{align*}",
        prose_to_latex(sheet.reading),
        r"\begin{description}",
    ]
    for term in sheet.terms:
        lines += [
            rf"\item[{{${term.symbol}$ \quad {term.title} ({text_to_latex(term.kind)})}}] \hfill"
        ]
        lines += [rf"\[ {line.latex} \]" for line in term.equations]
        mark = r" (\dag)" if term.keels_choice else ""
        lines += [prose_to_latex(term.text)]
        lines += [rf"\emph{{Source{mark}: {text_to_latex(term.source)}.}}"]
    lines += [r"\end{description}", rf"\noindent Models in memory: {len(sheet.loaded)}."]
    lines += [r"\begin{itemize}"]
    lines += [rf"\item {use.role}: {prose_to_latex(use.what)}" for use in sheet.models]
    lines += [rf"\item {prose_to_latex(note)}" for note in sheet.notes]
    lines += [r"\end{itemize}"]
    if any(term.keels_choice for term in sheet.terms):
        lines += [r"\noindent " + _LEGEND.replace(_MARK, r"\dag{}")]
    return "\n".join(lines) + "\n"


def _aligned(line: Equation) -> str:
    first, *others = line.parts
    start = f"{line.left} &{line.relation} {first}"
    if width(line.unicode) <= _LATEX_COLUMNS:
        return " ".join([start, *others])
    return " \\\\\n".join([start, *(rf"&\quad {part}" for part in others)])


# ---------------------------------------------------------------- data and pages


def json(sheet: Sheet) -> dict[str, Any]:
    """The whole as plain data; every formula as Unicode and as LaTeX."""
    return {
        "name": sheet.name,
        "title": sheet.title,
        "objective": [line.json() for line in sheet.objective],
        "reading": prose_to_unicode(sheet.reading),
        "terms": [term.json() for term in sheet.terms],
        "models": [use.json() for use in sheet.models],
        "models_in_memory": list(sheet.loaded),
        "notes": [prose_to_unicode(note) for note in sheet.notes],
    }


def page_equation(sheet: Sheet) -> str:
    """The equation part of a page: the objective, then a table with one line for each term."""
    lines = [f"$$ {line.latex} $$" for line in sheet.objective]
    lines = ["\n\n".join(lines), ""]
    lines += ["| symbol | here | formula | source |", "|---|---|---|---|"]
    for term in sheet.terms:
        own = [line for line in term.equations if line not in sheet.objective]
        formulas = "; ".join(f"${line.latex}$" for line in own)
        lines += [f"| ${term.symbol}$ | {term.kind} | {formulas} | {term.source} |"]
    count, roles = len(sheet.loaded), ", ".join(sheet.loaded)
    lines += ["", f"Models in memory: {count} ({roles})."]
    return "\n".join(lines)
