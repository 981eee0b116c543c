"""Formulas as MathML, and the font that sets them: with a font that has no table of mathematics,
browsers place sums, accents and subscripts badly. Torch-free."""

from __future__ import annotations

import base64
import re
from importlib.resources import files as resources
from pathlib import Path

from latex2mathml.converter import convert

FONT = Path(str(resources("keel.view").joinpath("math.woff2")))
STYLE = """
.formula math { font-family: "Keel Math", math; font-size: 18px; }
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
