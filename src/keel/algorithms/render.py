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
MARK = "†"
LEGEND = f"{MARK} {CHOICE}, in part at least: no paper fixes it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Objective, terms, models and notes; prose holds formulas between dollars."""

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

    def unicode(self, width: int = 100) -> str:
        """Plain text for a terminal of `width` columns (60 or more), without colour."""
        columns = max(width, 60)
        blocks = [_head(self, columns), *(_term(term, columns) for term in self.terms)]
        blocks += [_models(self, columns)]
        if self.notes:
            blocks += ["\n".join(["Notes", *_bullets(self.notes, columns)])]
        if any(term.keels_choice for term in self.terms):
            blocks += [LEGEND]
        return "\n\n".join(blocks)

    def latex(self) -> str:
        """A LaTeX fragment; the document must load amsmath and be UTF-8."""
        lines = [
            rf"\paragraph{{{text_to_latex(self.name)}: {text_to_latex(self.title)}}}",
            r"\begin{align*}",
            " \\\\\n".join(_aligned(line) for line in self.objective),
            r"\end{align*}",
            prose_to_latex(self.reading),
            r"\begin{description}",
        ]
        for term in self.terms:
            kind = text_to_latex(term.kind)
            lines += [rf"\item[{{${term.symbol}$ \quad {term.title} ({kind})}}] \hfill"]
            lines += [rf"\[ {line.latex} \]" for line in term.equations]
            mark = r" (\dag)" if term.keels_choice else ""
            lines += [prose_to_latex(term.text)]
            lines += [rf"\emph{{Source{mark}: {text_to_latex(term.source)}.}}"]
        lines += [r"\end{description}", rf"\noindent Models in memory: {len(self.loaded)}."]
        lines += [r"\begin{itemize}"]
        lines += [rf"\item {use.role}: {prose_to_latex(use.what)}" for use in self.models]
        lines += [rf"\item {prose_to_latex(note)}" for note in self.notes]
        lines += [r"\end{itemize}"]
        if any(term.keels_choice for term in self.terms):
            lines += [r"\noindent " + LEGEND.replace(MARK, r"\dag{}")]
        return "\n".join(lines) + "\n"

    def json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; every formula as Unicode and as LaTeX."""
        return {
            "name": self.name,
            "title": self.title,
            "objective": [line.json() for line in self.objective],
            "reading": prose_to_unicode(self.reading),
            "terms": [term.json() for term in self.terms],
            "models": [use.json() for use in self.models],
            "models_in_memory": list(self.loaded),
            "notes": [prose_to_unicode(note) for note in self.notes],
        }

    def page_equation(self) -> str:
        """The part of the algorithm's page in `docs/algorithms` that states its formula.

        The objective, then a table with one line for each term that there is, with what the
        objective does not show.
        """
        whole = " ".join(line.latex for line in self.objective)

        def shown(latex: str) -> bool:
            symbol, _, value = latex.partition(" = ")
            return symbol in ("s", "D_n") and value in whole

        lines = [f"$$ {line.latex} $$" for line in self.objective]
        lines = ["\n\n".join(lines), ""]
        lines += ["| symbol | here | formula | source |", "|---|---|---|---|"]
        for term in self.terms:
            if term.kind == "none":
                continue
            own = [x for x in term.equations if x not in self.objective and not shown(x.latex)]
            formulas = "; ".join(f"${line.latex}$" for line in own)
            lines += [f"| ${term.symbol}$ | {term.kind} | {formulas} | {term.source} |"]
        count, roles = len(self.loaded), ", ".join(self.loaded)
        lines += ["", f"Models in memory: {count} ({roles})."]
        return "\n".join(lines)


# ---------------------------------------------------------------- terminal


def _head(found: Explanation, columns: int) -> str:
    lines = _fill(f"{found.name} · {found.title}", columns, "")
    lines += ["─" * columns]
    for line in found.objective:
        lines += _equation(line, columns, "")
    return "\n".join([*lines, "", *_fill(_unbroken(found.reading), columns, "")])


def _term(term: Term, columns: int) -> str:
    indent = " " * _MARGIN
    symbol = to_unicode(term.symbol)
    left = symbol + " " * max(_MARGIN - width(symbol), 1) + term.title
    gap = columns - width(left) - width(term.kind)
    lines = [left + " " * max(gap, 2) + term.kind]
    for line in term.equations:
        lines += _equation(line, columns, indent)
    lines += _fill(_unbroken(term.text), columns, indent)
    mark = f" {MARK}" if term.keels_choice else ""
    return "\n".join([*lines, *_fill(f"Source{mark}: {term.source}", columns, indent)])


def _models(found: Explanation, columns: int) -> str:
    roles = ", ".join(found.loaded)
    lines = [f"Models in memory: {len(found.loaded)} ({roles})"]
    column = max(len(use.role) for use in found.models) + 2
    for use in found.models:
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


def _aligned(line: Equation) -> str:
    first, *others = line.parts
    start = f"{line.left} &{line.relation} {first}"
    if width(line.unicode) <= _LATEX_COLUMNS:
        return " ".join([start, *others])
    return " \\\\\n".join([start, *(rf"&\quad {part}" for part in others)])
