"""mkdocs hook: formulas become MathML while the site is built, so it needs no script."""

from __future__ import annotations

import html
import re
from typing import Any

from mkdocs.structure.files import File, Files

from keel.view.formulas import FONT, font_face, mathml

_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\(?:\((.*?)\\\)|\[(.*?)\\\])</\1>', re.DOTALL
)
_FONT = "math.woff2"
_STYLE = "math.css"


def on_config(config: Any) -> Any:
    """The configuration with the style of formulas."""
    config.extra_css.append(_STYLE)
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """The files with the font of formulas and its style."""
    style = font_face(_FONT) + ' math { font-family: "Keel Math", math; font-size: 1.1em; }'
    files.append(File.generated(config, _FONT, content=FONT.read_bytes()))
    files.append(File.generated(config, _STYLE, content=style))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """The page's HTML with each formula as MathML."""
    return _FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    inline, block = found[2], found[3]
    if block is None:
        return mathml(html.unescape(inline), block=False)
    return mathml(html.unescape(block))
