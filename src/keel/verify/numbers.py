"""Numbers in text: the final answer of a worked solution, and when two numbers are the same.

Values are exact fractions, so that neither large integers nor decimals lose a digit.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 400
"""Longer numerals are not read: no answer has them, and big integers cost time to the square."""
MAX_EXPONENT = 400

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus after a digit, a letter or a closing bracket, or before a blank, is a subtraction.
_SIGN = r"(?:(?<![\w)\]%])[-+](?=[$\d.]))?"
NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})\$?\s?(?P<value>{_UNSIGNED})"
    rf"(?:[eE](?P<exponent>[-+]?\d+)|\s?/\s?(?P<under>{_UNSIGNED}))?"
)
_LATEX_FRACTION = re.compile(
    r"\\[dt]?frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([-+]?[\d.,]+)\s*\}|(\d)\s*(\d))"
)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")


def parse_number(text: str) -> Fraction | None:
    """The number that the whole text is, such as `1,234`, `-3.5`, `$7`, `2/3` or `1e-3`.

    A `%` or a full stop behind it is allowed and changes nothing. None where the text is not one
    number.
    """
    cleaned = _plain(text).strip().rstrip(".").rstrip("%").rstrip()
    found = NUMBER.fullmatch(cleaned)
    return _value(found) if found else None


def last_number(text: str) -> Fraction | None:
    """The last number in a text; None where there is none."""
    for found in reversed(list(NUMBER.finditer(_plain(text)))):
        value = _value(found)
        if value is not None:
            return value
    return None


def marked_answer(text: str) -> str | None:
    r"""What stands in the last marked answer, `#### …` (to the end of the line) or `\boxed{…}`.

    Where both occur, the one further down counts. None where nothing is marked.
    """
    hashes = max(_HASHES.finditer(text), key=lambda found: found.start(), default=None)
    at = text.rfind("\\boxed{")
    if hashes is not None and hashes.start() > at:
        return hashes.group(1).strip()
    return None if at < 0 else _braced(text, at + len("\\boxed{"))


def final_number(text: str) -> Fraction | None:
    """The number a solution ends on: that of its marked answer, else the last in the text."""
    marked = marked_answer(text)
    return last_number(text if marked is None else marked)


def same_number(a: Fraction, b: Fraction, tolerance: float = 0.0) -> bool:
    """Whether |a − b| ≤ tolerance · max(1, |b|): absolute for small b, relative for large."""
    return abs(a - b) <= Fraction(tolerance) * max(Fraction(1), abs(b))


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found.group()) > MAX_DIGITS:
        return None
    value = Fraction(found["value"].replace(",", ""))
    if found["exponent"]:
        exponent = int(found["exponent"])
        if abs(exponent) > MAX_EXPONENT:
            return None
        value *= Fraction(10) ** exponent
    if found["under"]:
        under = Fraction(found["under"].replace(",", ""))
        if under == 0:
            return None
        value /= under
    return -value if found["sign"] == "-" else value


def _plain(text: str) -> str:
    """LaTeX fractions, spacing and the typographic minus as plain characters."""
    text = text.replace("−", "-").replace("{,}", ",")
    text = text.replace("\\,", "").replace("\\!", "").replace("\\$", "$").replace("\\%", "%")
    return _LATEX_FRACTION.sub(lambda m: f"{m[1] or m[3]}/{m[2] or m[4]}", text)


def _braced(text: str, start: int) -> str | None:
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start:at].strip()
    return None
