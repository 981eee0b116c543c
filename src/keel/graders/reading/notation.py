"""A text with one way to write each thing: characters, formulas, what stands around an answer."""

from __future__ import annotations

import re
import unicodedata

_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "₀₁₂₃₄₅₆₇₈₉"
_MARKS = re.compile("(?<=[\u0300-\u036f]{4})[\u0300-\u036f]+")
"""Of many accents on one letter: to put them in order takes the square of their number."""
_ROOT = re.compile(r"√ ?(\d+|[A-Za-z]|\([^()]*\))")
_SYMBOLS = {
    **dict.fromkeys("−–‐‑‒﹣－⁻", "-"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div "},
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp "},
    **{"√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap "},
    **{"∈": r"\in ", "°": r"^\circ ", "º": r"^\circ ", "θ": r"\theta ", "∅": r"\emptyset "},
    **{"⁄": "/", "∕": "/", "…": r"\ldots ", "。": ". ", "、": ", ", "，": ", ", "；": "; "},
    **{"：": ": ", "？": "? ", "！": "! "},
}
_TABLE = str.maketrans(_SYMBOLS)

_EMPHASIS = re.compile(r"(\*{1,3}|_{1,3}|[`\"'])([^*_`\"'].*)\1", re.DOTALL)
FORMULA = re.compile(
    r"\$\$([^$]*)\$\$|(?<!\\)\$((?:[^$\\]|\\.)++)\$(?!\d)"
    r"|\\\(((?:(?!\\[()]).)*)\\\)|\\\[((?:(?!\\[\[\]]).)*)\\\]",
    re.DOTALL,
)
"""A formula between dollars or brackets of LaTeX; one group holds what is in it."""
_BRACES = re.compile(r"(?:\\(?:text|mbox|mathrm|mathbf|textbf|boldsymbol|bm|fbox|boxed) ?)?\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SIZES = re.compile(
    r"\\(?:left|right|[Bb]igg?[lr]?|displaystyle|textstyle|limits|bf|rm)(?![A-Za-z])|(?<!\\)\\[,!;:>]|~"
)
_BLANK = re.compile(r"(?<!\\)\\ ")
_COMMANDS = re.compile(r"\\(?:d|t|c)frac(?![a-z])")
_MATH_TEXT = re.compile(r"\\(?:textnormal|textrm|textit|mathit|mathsf|texttt|hbox)(?= ?\{)")
INNER = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+"
"""What braces hold, for a pattern: braces in braces in braces at the most."""
_SIUNITX = re.compile(rf"\\(SI|qty|num|ang) ?\{{({INNER})\}}(?: ?\{{({INNER})\}})?")
_COMMA = re.compile(r"(?<=\d)(?:\{,\}|, ?(?:\\! ?)+| ?\\, ?)(?=\d{3})")
_OVER = re.compile(r"(?:\{|\A)([^{}]*)\\over(?![a-z])([^{}]*)(?:\}|\Z)")


def plain(text: str) -> str:
    """A text with one way to write each character: full-width digits, minus signs, `π`, `x²`."""
    text = _SIUNITX.sub(_written_out, text)
    if text.isascii():
        return text
    text = _MARKS.sub("", text)
    text = re.sub(f"[{_RAISED}]+", r"^{\g<0>}", text)  # NFKC makes digits of them
    text = re.sub(f"[{_LOWERED}]+", r"_{\g<0>}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text).translate(_TABLE)
    for character in set(re.findall("[\u00bc-\u00be\u2150-\u215e]", text)):  # ½ and such
        text = text.replace(character, " " + unicodedata.normalize("NFKC", character))
    return unicodedata.normalize("NFKC", text).replace("⁄", "/")


def _written_out(found: re.Match[str]) -> str:
    r"""A command of siunitx as what it prints: `\SI{7}{\watt\per\meter\squared}`."""
    command, number, unit = found.groups("")
    unit = re.sub(r"\\per(?![a-z])", "/", unit).replace(r"\squared", "^2").replace(r"\cubed", "^3")
    unit = re.sub(r"\\(?!frac|cdot)([a-z]+)", r" \1", unit)
    return number + r"^\circ" * (command == "ang") + (rf" \mathrm{{{unit}}}" if unit else "")


def spaced(text: str) -> str:
    r"""A text with `\,`, `\ ` and such as blanks, and one command for each of text and fraction."""
    text = _COMMANDS.sub(r"\\frac", _COMMA.sub(",", text))
    return _BLANK.sub(" ", _SIZES.sub(" ", _MATH_TEXT.sub(r"\\text", text)))


def bare(text: str) -> str:
    """An answer less what stands around it: blanks, emphasis, dollars, braces, a full stop."""
    text = _OVER.sub(r"\\frac{\1}{\2}", " ".join(spaced(plain(text)).split()))
    for _ in range(8):  # layers; more of them are not an answer
        before = text
        text = text.strip().rstrip(" ,;:").removesuffix(".")
        found = _EMPHASIS.fullmatch(text)
        if found and found[1] not in found[2]:
            text = found[2]
        if found := FORMULA.fullmatch(text):
            text = next(part for part in found.groups() if part is not None)
        if (braces := _BRACES.match(text)) and closing(text, braces.end()) == len(text):
            text = text[braces.end() : -1]
        if text == before:
            break
    return text.strip()


def closing(text: str, start: int) -> int:
    """Where braces that are open before `start` are closed; −1 if they are not."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.end()
    return -1
