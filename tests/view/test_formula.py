"""Formulas as MathML that browsers set well."""

from __future__ import annotations

import re

import pytest

from keel.algorithms.explain import explain_preset
from keel.algorithms.presets import PRESETS
from keel.view.library import FONT, font_face, mathml

LINES = [
    (name, line.latex)
    for name in PRESETS
    for equations in (
        explain_preset(name).objective,
        *(term.equations for term in explain_preset(name).terms),
    )
    for line in equations
]


@pytest.mark.parametrize(
    ("latex", "wanted"),
    [
        (r"\mathrm{clip}(x)", "<mi>clip</mi><mo"),
        (r"\min(x)", "<mi>min</mi><mo"),
        (r"A_n \exp(x)", '</msub><mspace width="0.167em" /><mi>exp</mi><mo'),
        (r"\log \rho_t", '<mi>log</mi><mspace width="0.167em" /><msub>'),
        (r"\exp\left(x\right)", "<mi>exp</mi><mrow><mo"),
        (r"V \pm 0.2", "<mo>&#x000B1;</mo>"),
        (r"(a, -0.4)", '<mo form="prefix">&#x02212;</mo>'),
        (r"\hat{R}_n", 'accent="true"><mrow><mi>R</mi></mrow><mo stretchy="false">&#x002C6;'),
        (r"\tilde{R}_i", 'accent="true"><mrow><mi>R</mi></mrow><mo stretchy="false">&#x0007E;'),
        (r"\frac{\sum_{j\in g} L_j}{2}", "<munder><mo>&#x02211;</mo><mrow>"),
        (r"\left(\sum_n x\right)", "<munder><mo>&#x02211;</mo><mi>n</mi></munder>"),
    ],
)
def test_mathml_says_what_each_part_is(latex: str, wanted: str) -> None:
    assert wanted in mathml(latex)


@pytest.mark.parametrize(("name", "latex"), LINES)
def test_words_of_presets_are_single_identifiers(name: str, latex: str) -> None:
    found = mathml(latex)
    assert 'normal">' not in found, name
    words = re.findall(r"\\(?:mathrm|min|max|exp|log)(?:\{(\w+)\})?", latex)
    assert all(f"<mi>{word}</mi>" in found for word in words if word), name


def test_font_is_in_the_style_unless_served() -> None:
    assert FONT.read_bytes().startswith(b"wOF2")
    assert len(FONT.read_bytes()) < 100_000
    assert 'url("data:font/woff2;base64,d09GMg' in font_face()
    assert 'url("/math.woff2")' in font_face("/math.woff2")
