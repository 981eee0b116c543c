"""Formulas are written once, in a small subset of LaTeX; their Unicode is read off from there.

The subset is what plain LaTeX, MathJax and matplotlib all typeset. A space in a formula means
nothing to LaTeX and is kept in the Unicode. In prose, formulas stand between dollars.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from typing import Final

_COMMANDS: Final = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eta": "η", "theta": "θ",
    "lambda": "λ", "mu": "μ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ",
    "ell": "ℓ", "nabla": "∇", "sum": "Σ", "cdot": "·", "times": "×", "pm": "±", "geq": "≥",
    "leq": "≤", "neq": "≠", "in": "∈", "leftarrow": "←", "Vert": "‖", "quad": "\0", "omega": "ω",
    "min": "min", "max": "max", "exp": "exp", "log": "log", "ln": "ln", "tanh": "tanh",
    "left": "", "right": "", "kappa": "κ",
}  # fmt: skip
_UPRIGHT: Final = frozenset({"mathrm", "text"})
_ACCENTS: Final = {"tilde": "\u0303", "hat": "\u0302"}
_ESCAPES: Final = {",": "", "_": "_", " ": " ", "%": "%"}
_SUPERSCRIPTS: Final = str.maketrans("0123456789−", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_FRACTIONS: Final = {("1", "2"): "½"}
_TOKEN: Final = re.compile(r"\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)
_DOLLAR: Final = re.compile(r"(?<!\\)\$")
_SPECIAL: Final = {
    "$": r"\$",
    "\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "§": r"\S{}",
    "“": "``", "”": "''", "−": "$-$", "–": "--", "’": "'",
}  # fmt: skip
_GREEK: Final = {
    glyph: f"$\\{name}$" for name, glyph in _COMMANDS.items() if glyph in "αβγδεθκλμπρστφω"
}


def number(value: float) -> str:
    """A figure as a person writes it: 0.2, 1, 256, 10^{-8}, 3 \\cdot 10^{-5}."""
    exact = Decimal(repr(value)).normalize()
    if exact == 0 or Decimal("1e-4") <= abs(exact) < Decimal("1e9"):
        return f"{exact:f}"
    mantissa, exponent = f"{exact:e}".split("e")
    power = f"10^{{{int(exponent)}}}"
    return power if mantissa == "1" else rf"{mantissa} \cdot {power}"


def offset(value: float, shift: float) -> str:
    """`value + shift` as a figure, without the noise of binary fractions."""
    return number(float(Decimal(repr(value)) + Decimal(repr(shift))))


def function(entry: str) -> str:
    """The upright name of a user's `module:function` or `path.py:function` in a formula."""
    return r"\mathrm{" + entry.rpartition(":")[2].replace("_", r"\_") + "}"


def factor(formula: str) -> str:
    """The formula as a factor of a product: in brackets where it is a sum."""
    depth = 0
    for i, character in enumerate(formula):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth == 0 and i > 0 and formula[i : i + 2] in ("+ ", "- "):
            return f"({formula})"
    return formula


def to_unicode(formula: str) -> str:
    """The formula in Unicode, on one line.

    Raises ValueError for an unbalanced brace or a command outside the subset.
    """
    tokens = _TOKEN.findall(formula)
    text, end = _run(tokens, 0)
    if end != len(tokens):
        raise ValueError(f"unbalanced }} in {formula!r}")
    text = re.sub(r" *‖ *", "‖", re.sub(r" +", " ", text))
    return re.sub(r" ?\0 ?", "   ", re.sub(r" ([,)])", r"\1", text)).strip()


def prose_parts(text: str) -> Iterator[tuple[bool, str]]:
    """The parts of prose, in order, each with whether it is one of its `$formulas$`."""
    for i, piece in enumerate(_DOLLAR.split(text)):
        yield (True, piece) if i % 2 else (False, piece.replace(r"\$", "$"))


def prose_to_unicode(text: str, space: str = " ") -> str:
    """Prose with its `$formulas$` in Unicode; `space` stands for the spaces within these."""
    return "".join(
        to_unicode(piece).replace(" ", space) if formula else piece
        for formula, piece in prose_parts(text)
    )


def prose_to_latex(text: str) -> str:
    """Prose with its `$formulas$` for LaTeX."""
    return "".join(
        f"${piece}$" if formula else text_to_latex(piece) for formula, piece in prose_parts(text)
    )


def quote(text: str) -> str:
    """A user's text such that it may stand in prose: its dollars begin no formula."""
    return text.replace("$", r"\$")


def text_to_latex(text: str) -> str:
    """Plain text for LaTeX: what is special escaped, Greek letters set as mathematics."""
    return "".join(_SPECIAL.get(c, _GREEK.get(c, c)) for c in text)


def width(text: str) -> int:
    """Columns on a terminal: accents that combine take none."""
    return sum(not unicodedata.combining(character) for character in text)


def _run(tokens: list[str], start: int) -> tuple[str, int]:
    """Everything up to the closing brace or the end."""
    out = ""
    i = start
    while i < len(tokens) and tokens[i] != "}":
        piece, i = _one(tokens, i)
        out += piece
    return out, i


def _group(tokens: list[str], start: int) -> tuple[str, int]:
    """The argument at `start`: a braced run, or one token."""
    i = start
    while i < len(tokens) and tokens[i].isspace():
        i += 1
    if i == len(tokens):
        raise ValueError(f"argument missing in {''.join(tokens)!r}")
    if tokens[i] != "{":
        return _one(tokens, i)
    text, i = _run(tokens, i + 1)
    if i == len(tokens):
        raise ValueError(f"unbalanced {{ in {''.join(tokens)!r}")
    return text, i + 1


def _one(tokens: list[str], i: int) -> tuple[str, int]:
    token = tokens[i]
    if token == "{":
        return _group(tokens, i)
    if token == "_":
        text, i = _group(tokens, i + 1)
        text = text.replace(" ", "")
        return ("_" + text if len(text) == 1 or text.isalpha() else f"_{{{text}}}"), i
    if token == "^":
        text, i = _group(tokens, i + 1)
        if re.fullmatch(r"−?\d+", text):
            return text.translate(_SUPERSCRIPTS), i
        return (f"^{text}" if len(text) == 1 else f"^{{{text}}}"), i
    if token.startswith("\\"):
        return _command(tokens, i)
    if token == "-":
        return "−", i + 1
    return (" " if token.isspace() else token), i + 1


def _command(tokens: list[str], i: int) -> tuple[str, int]:
    command = tokens[i][1:]
    if command in _COMMANDS:
        return _COMMANDS[command], i + 1
    if command in _ESCAPES:
        return _ESCAPES[command], i + 1
    if command in _UPRIGHT:
        return _group(tokens, i + 1)
    if command in _ACCENTS:
        text, i = _group(tokens, i + 1)
        return text + _ACCENTS[command], i
    if command == "sqrt":
        text, i = _group(tokens, i + 1)
        return f"√({text})", i
    if command == "frac":
        above, i = _group(tokens, i + 1)
        below, i = _group(tokens, i)
        return _fraction(above, below), i
    raise ValueError(f"command \\{command} is outside the subset")


def _fraction(above: str, below: str) -> str:
    if (above, below) in _FRACTIONS:
        return _FRACTIONS[above, below]
    bare = re.compile(r"[\w.\u0303\u0302]+(_\{[^{}]*\})?|√\(.*\)|[\w]+\(\w\)")
    above, below = (t if bare.fullmatch(t) else f"({t})" for t in (above, below))
    tight = " " not in above and " " not in below
    return f"{above}/{below}" if tight else f"{above} / {below}"
