"""Numbers in text: the final answer of a worked solution, and when two numbers are the same.

Values are exact fractions, so that neither large integers nor decimals lose a digit.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 400
"""Longer numerals are not read: no answer has them, and big integers cost time to the square."""
MAX_EXPONENT = 400

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_UNSIGNED = rf"{_WHOLE}(?:\.\d+)?|\.\d+"
# A minus after a digit, a letter or a closing bracket, or before a blank, is a subtraction.
_SIGN = r"(?:(?<![\w)\]%])[-+](?=[$\d.]))?"
NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})\$?\s?"
    rf"(?:(?<![\w.,^])(?P<whole>{_WHOLE}) (?=\d++/\d++(?![.,]\d)))?(?P<value>{_UNSIGNED})"
    rf"(?:[eE](?P<exponent>[-+]?\d+)|\s?/\s?(?P<under>{_UNSIGNED}))?"
)
_LATEX_FRACTION = re.compile(
    r"\\[dt]?frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([-+]?[\d.,]+)\s*\}|(\d)\s*(\d))"
)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")


def parse_number(text: str) -> Fraction | None:
    """The number that the whole text is: `1,234`, `-3.5`, `$7`, `2/3`, `1 1/2`, `1e-3` and such.

    A `%` or a full stop behind it is allowed and changes nothing. None where the text is not one
    number.
    """
    cleaned = _plain(text).strip().rstrip(".").rstrip("%").rstrip()
    found = NUMBER.fullmatch(cleaned)
    value = _value(found) if found else None
    two = found is not None and value is not None and found["whole"] and not _proper(found)
    return None if two else value


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
    """The number a solution ends on: that of its marked answer, else the last in the text.

    A line `####` without a number is a heading, and does not count as marked.
    """
    box = text.rfind("\\boxed{")
    lines = [found.group(1) for found in _HASHES.finditer(text, max(box, 0))]
    values = [value for line in lines if (value := last_number(line)) is not None]
    if values:
        return values[-1]
    boxed = None if box < 0 else _braced(text, box + len("\\boxed{"))
    return last_number(text if boxed is None else boxed)


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
    if found["whole"]:
        if not _proper(found):
            return value  # `2024 5/2` are two numbers
        value += int(found["whole"].replace(",", ""))
    return -value if found["sign"] == "-" else value


def _proper(found: re.Match[str]) -> bool:
    return int(found["value"]) < int(found["under"])


def _plain(text: str) -> str:
    """LaTeX fractions, spacing and the typographic minus as plain characters."""
    text = text.replace("−", "-").replace("{,}", ",")
    text = text.replace("\\,", "").replace("\\!", "").replace("\\$", "$").replace("\\%", "%")
    return _LATEX_FRACTION.sub(_fraction, text)


def _fraction(found: re.Match[str]) -> str:
    """A LaTeX fraction as `1/2`, with a blank behind a digit or a brace: `2\\frac12` is 2 1/2."""
    before = found.string[found.start() - 1] if found.start() else ""
    apart = " " if before.isdigit() or before == "}" else ""
    return f"{apart}{found[1] or found[3]}/{found[2] or found[4]}"


def _braced(text: str, start: int) -> str | None:
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start:at].strip()
    return None
