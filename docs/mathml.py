"""mkdocs hook: formulas become MathML while the site is built, so it needs no script."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\(?:\((.*?)\\\)|\[(.*?)\\\])</\1>', re.DOTALL
)


def on_page_content(content: str, **_: Any) -> str:
    """The page's HTML with each formula as MathML."""
    return _FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    inline, block = found[2], found[3]
    if block is None:
        return convert(html.unescape(inline))
    return convert(html.unescape(block), display="block")
