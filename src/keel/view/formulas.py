"""Formulas as MathML: the objective of a stage, and all that an explanation says. Torch-free."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files as resources
from pathlib import Path

from latex2mathml.converter import convert

from keel.algorithms.render import LEGEND, MARK, Explanation
from keel.algorithms.symbols import prose_parts
from keel.analysis.text import visible
from keel.view.library import OpenRun, recipe_of

# With a font that has no table of mathematics, browsers place sums, accents and subscripts badly.
FONT = Path(str(resources("keel.view").joinpath("math.woff2")))
FORMULA_STYLE = """
math { font-family: "Keel Math", math; font-size: 16px; }
.formula math { font-size: 18px; }
.formula { overflow-x: auto; max-width: 100%; }
.formula math { width: fit-content; margin: 6px 0; }
"""
_FUNCTION = "<mi>(?:min|max|exp|log|arg)</mi>"
_SUM = "<mo>&#x02211;</mo>"
_THIN = '<mspace width="0.167em" />'
_FIXES = (
    # Upright words are one identifier, not a product of letters.
    (
        r'<mrow>((?:<mi mathvariant="normal">[^<]+</mi>){2,})</mrow>',
        lambda found: f"<mi>{re.sub('<[^>]*>', '', found[1])}</mi>",
    ),
    # Functions are spaced from their neighbours, but not from a bracket.
    (r"<(mo|mi)>(min|max|exp|log|arg)</\1>", r"<mi>\2</mi>"),
    (rf"(</m(?:sub|sup|frac)>)(?={_FUNCTION})", rf"\1{_THIN}"),
    (rf"({_FUNCTION})(?=<m)(?!(?:<mrow>)?<mo[^>]*>&#x00028;)", rf"\1{_THIN}"),
    # Limits stand under a sum unless it is within a line of text, a fraction or an index.
    (rf"<msub>({_SUM}(?:<mi>[^<]*</mi>|<mrow>.*?</mrow>))</msub>", r"<munder>\1</munder>"),
    (r"<mi>(&#x000B1;|:)</mi>", r"<mo>\1</mo>"),
    (r"(?<=<mo>&#x0002C;</mo>)<mo>&#x02212;", '<mo form="prefix">&#x02212;'),
    # Accents in their full size; a hat of the font's in place of the keyboard's character.
    (r"<mo[^>]*>&#x0005E;</mo>(?=</mover>)", '<mo stretchy="false">&#x002C6;</mo>'),
    (r"<mover>", '<mover accent="true">'),
)


def mathml(latex: str, *, block: bool = True) -> str:
    """The MathML of a formula."""
    text: str = convert(latex, display="block" if block else "inline")
    for pattern, replacement in _FIXES:
        text = re.sub(pattern, replacement, text)
    return text


def font_face(url: str | None = None) -> str:
    """The style that loads the font from an address; without one the font is in the style."""
    data = base64.b64encode(FONT.read_bytes()).decode("ascii") if url is None else ""
    source = url or f"data:font/woff2;base64,{data}"
    return f'@font-face {{ font-family: "Keel Math"; src: url("{source}") format("woff2"); }}'


def explanation_of(run: OpenRun, stage: str) -> Explanation | None:
    """What a stage optimises, by the run's recipe; None if no algorithm says it."""
    recipe = recipe_of(run)
    found = None if recipe is None else next((s for s in recipe.stages if s.name == stage), None)
    if recipe is None or found is None:
        return None
    explained: Explanation | None = found.explain(lora=recipe.model.lora is not None)
    return explained


def formula_of(run: OpenRun, stage: str) -> list[str]:
    """The objective of a stage with its figures, as lines of MathML; none for other stages."""
    found = explanation_of(run, stage)
    return [] if found is None else [mathml(line.latex) for line in found.objective]


def explanation_html(found: Explanation) -> str:
    """An explanation as HTML: formulas as MathML, all else escaped."""
    lines = [f"<h2>{_text(found.name)}</h2>", f'<p class="muted">{_text(found.title)}</p>']
    lines += [_formula(line.latex) for line in found.objective]
    lines += [f"<p>{_prose(found.reading)}</p>", '<div class="panels">']
    for term in found.terms:
        mark = f" {MARK}" if term.keels_choice else ""
        title = f"{mathml(term.symbol, block=False)} {_text(term.title)}"
        lines += [
            f'<section class="panel"><h2>{title}</h2><p class="muted">{_text(term.kind)}</p>',
            *(_formula(line.latex) for line in term.equations),
            f"<p>{_prose(term.text)}</p>",
            f'<p class="muted">Source{mark}: {_text(term.source)}</p></section>',
        ]
    lines += [f"</div><h2>Models in memory: {len(found.loaded)}</h2>"]
    lines += [_list(f"<b>{use.role}</b>: {_prose(use.what)}" for use in found.models)]
    if found.notes:
        lines += ["<h2>Notes</h2>", _list(map(_prose, found.notes))]
    if any(term.keels_choice for term in found.terms):
        lines += [f'<p class="muted">{_text(LEGEND)}</p>']
    return "\n".join(lines)


def _formula(latex: str) -> str:
    return f'<div class="formula">{mathml(latex)}</div>'


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _text(text: str) -> str:
    return escape(visible(text, 2_000))


def _prose(text: str) -> str:
    return "".join(
        mathml(piece, block=False) if formula else _text(piece)
        for formula, piece in prose_parts(text)
    )
