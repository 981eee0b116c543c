"""The words that the readers of answers know (words.toml), and the tokens of prose.

A token has a letter: that of its class of words, or `9` a number, `w` another word, `u` a unit,
`S` a scale, `x` a single letter, `z` characters of a script without blanks, `=`, `+` an operator,
`%`, `.` the end of a sentence or line, `\\` a command of LaTeX, `s` a symbol, or itself of `,:()|`.
Blanks, emphasis, dollars, braces and quotes are none.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_TABLE = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
UNBROKEN = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Characters of scripts without blanks between words, for a pattern."""
SCRIPT = re.compile(f"[{UNBROKEN}]")
LETTERS = frozenset(_TABLE["units"]["letters"].split())
ATTACHED = frozenset(_TABLE["units"]["attached"].split())
UNITS = {name: line.split()[0] for line in _TABLE["units"]["known"] for name in line.split()}
"""Units by each of their names in the singular."""
SCALES: dict[str, int] = {
    one: power
    for names, power in _TABLE["scales"].items()
    for one in ([names] if names.isascii() else names)
}
"""The power of ten that a word multiplies the number before it by."""
_CLASSES, _COMMANDS = (
    {word: letter for letter, words in _TABLE[kind].items() for word in words.split()}
    for kind in ("classes", "commands")
)


def word_set(name: str) -> frozenset[str]:
    """A list of words of words.toml."""
    return frozenset(_TABLE["words"][name].split())


def pattern(name: str, flags: int = re.IGNORECASE, around: str = "{}") -> re.Pattern[str]:
    """A list of patterns of words.toml as one, set into what stands `around` it."""
    return re.compile(around.format(_joined(name)), flags)


def _joined(name: str) -> str:
    every = "|".join(_TABLE["patterns"][name])
    return re.sub("@([a-z]+)@", lambda found: f"(?:{_joined(found[1])})", every)


_SCALED = pattern("scaled")
CHANGED = pattern("changed")
_TOKEN = re.compile(
    r"(?P<bullet>^[ \t]*(?:[-+*>•]|\d{1,3}[.)])(?=[ \t]))"
    r"|(?P<number>\.?\d(?:[\d.,]*\d)?)"
    rf"|(?P<script>[{UNBROKEN}]+)"
    r"|(?P<nothing>[\"“”'`~$&{}\[\]]|\*\*+|\\[^A-Za-z%]|\\pmod ?\d+"
    r"|\\(?:begin|end|color|textcolor|tag|pmod) ?\{[^{}]*\}"
    r"|(?<=[A-Za-z}])\^ ?(?:\{ ?-?\d ?\}|-?\d))"
    r"|\\?(?P<percent>[%′″])"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?P<end>\n|[.;!?](?!\d)|\b[Nn]o ?[:,])"
    rf"|(?P<word>[^\W\d_{UNBROKEN}]+(?:['’&-][^\W\d_{UNBROKEN}]+)*)"
    r"|(?P<equals>(?<![<>])(?<!\D!)=>?|->|#+)"
    r"|(?P<operator>[-+/^<>=!]|\*(?=\s*(?:[\d$(\\.]|[A-Za-z](?![A-Za-z])))|_(?=\{))"
    r"|(?P<sign>[,:()|]|[^\x00-\x7f\s])",
    re.MULTILINE,
)
_LETTER = {"number": "9", "percent": "%", "end": ".", "equals": "=", "operator": "+"}


class Token(NamedTuple):
    """A word or sign of a text: the letter of its class, and where it starts and ends."""

    letter: str
    text: str
    start: int
    end: int


def tokens(text: str, start: int = 0, end: int | None = None) -> list[Token]:
    """The tokens of a text, less those that say nothing."""
    found = []
    for match in _TOKEN.finditer(text, start, len(text) if end is None else end):
        kind, said = match.lastgroup or "", match[0]
        letter = _LETTER.get(kind) or (word_class(said) if kind == "word" else "")
        if kind == "script":
            letter = "S" if CHANGED.search(said[:8]) else "z" if len(said) <= 8 else "p"
        elif kind == "command":
            letter = _COMMANDS.get(said[1:], "\\")
        elif kind == "sign":
            letter = said if said.isascii() else "s"
        if letter:
            found.append(Token(letter, said, *match.span()))
    return found


@lru_cache(maxsize=4096)
def word_class(word: str) -> str:
    """The letter of a word's class: `w` of a noun or name, `S` of a scale in another language."""
    word = word.lower().replace("’", "'")
    if word in _CLASSES:
        return str(_CLASSES[word])
    if word.endswith("n't"):
        return "n"
    if len(word) == 1:
        return "x"
    if _SCALED.fullmatch(word):
        return "S"
    return "u" if word in UNITS or word.removesuffix("s") in UNITS else "w"
