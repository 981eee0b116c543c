"""Numbers as answers: what number, if any, a whole text is.

Values are exact fractions, so that neither large integers nor decimals lose a digit. Every
pattern takes time in line with the text's length.
"""

from __future__ import annotations

import ast
import math
import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction

MAX_CHARACTERS = 1000
"""Longer texts are not read as one number: big integers cost time to the square."""
MAX_EXPONENT = 400


def word_set(words: str) -> frozenset[str]:
    """A set of words, which blanks part."""
    return frozenset(words.split())


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

_WHOLE = r"(?:\d{1,3}(?:,\d{3})++(?![\d,])|\d{1,3}(?: \d{3})++(?! ?[\d/])|\d++)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d++)?|\.\d++)"
_OVER = (
    rf"(?:{_WHOLE} ?/ ?{_WHOLE}"
    rf"|\\frac ?(?:\{{ ?-?{_WHOLE} ?\}}|\d) ?(?:\{{ ?{_WHOLE} ?\}}|\d))"
)
_NUMERAL = re.compile(
    rf"(?P<mixed>{_WHOLE}(?= ?\\frac| \d++ ?/) ?)?(?P<over>{_OVER})"
    rf"|(?P<base>\d++) ?\^ ?(?:\{{ ?(?P<power>\d++) ?\}}|(?P<digit>\d))"
    rf"|(?P<decimal>{_DECIMAL})"
    r"(?:[eE](?P<exponent>[-+]?\d++)"
    r"|(?: ?(?:\\times|\\cdot|\*) ?| [xX] )10 ?\^ ?"
    r"(?:\{ ?(?P<ten>[-+]?\d++) ?\}|\(?(?P<bare>[-+]?\d++)\)?))?"
)
_SHAPE = re.sub(r"\?P<[a-z]+>", "?:", _NUMERAL.pattern)
_MONEY = re.compile(
    r"(?:(?:US|CA|AU|C|A)?\\?\$|[€£¥₹]|\\(?:euro|pounds)\b|(?:USD|EUR|GBP|Rs\.?) ) ?"
)
_LEAD = re.compile(rf"([-+]?)\s*(?:({_MONEY.pattern})([-+]?)\s*)?")
_SCALES = {
    **{"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12},
    **dict.fromkeys("万萬만", 4),
    **dict.fromkeys("亿億억", 8),
}
_SCALE = re.compile(r" ?((?:hundred|thousand|[mbtr]+illion)\b|[万萬만亿億억])", re.IGNORECASE)
_INNER = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+"
_POWER = r"\^ ?(?:\{ ?-?\d ?\}|-?\d)"
_UNIT = re.compile(
    r"[ ~]+|\\?%|\^ ?\\?(?:circ|degree)\b|\^ ?\{ ?\\circ ?\}|\\(?:degree|deg|circ|percent)\b"
    rf"|\\(?:text|mbox|mathrm|operatorname) ?\{{(?P<text>{_INNER})\}}(?:{_POWER})?"
    rf"|\\frac ?\{{(?P<top>{_INNER})\}} ?\{{(?P<bottom>{_INNER})\}}"
    rf"|(?P<word>[^\W\d_]+(?:[-'’][^\W\d_]+)*+)(?:{_POWER}|(?<![A-Za-z]{{3}})(?<=[mt])[23](?!\d))?\.?"
    r"|/(?! ?\d)|\\cdot\b|[€£¥₹]|\\?\$"
)
_LATEX_UNITS = re.compile(
    r"(?: ?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-z]))(?: ?[CF]\b)?)?(?: (?=[.,;!?)]|\Z))?"
    rf"(?:[ ~]*(?:\\(?:text|mbox|mathrm|operatorname) ?\{{{_INNER}\}}(?:{_POWER})?"
    rf"|\\frac ?\{{{_INNER}\}} ?\{{{_INNER}\}}|/|\\(?:cdot|mu|Omega)(?![a-z])))*+"
)
_LETTERS = frozenset("msglLhAVWNJKCFTHΩ")
_ATTACHED = word_set(
    "mm cm dm km nm in ft yd mi mg kg lb lbs oz ml mL cl dl dL kmh mph kph rpm hr hrs min mins sec "
    "secs ms cc sq cu am pm deg degrees Hz kHz MHz GHz kW MW kWh MB GB KB kB USD EUR "
    "cents feet inches Pa kPa MPa kJ kN mA mV kV eV kΩ MΩ mol rad bar atm cal kcal ohm ohms"
)
_AMOUNTS = word_set(
    "ten hundred thousand million billion trillion dozen score pair third quarter fourth fifth "
    "sixth seventh eighth ninth tenth hundredth thousandth millionth"
)
_CHANGES = (
    _AMOUNTS
    | {f"{word}s" for word in _AMOUNTS}
    | word_set(
        "plus minus divided over mod modulo pi sqrt sin cos tan log ln exp choose factorial "
        "squared cubed point half halves couple gross k zero one two three four five six seven "
        "eight nine eleven twelve twenty thirty forty fifty"
    )
)
"""Words that make the number before them another number."""
_SCALED = re.compile(
    r"(?:million|milliard|millón|millone|milione|milhõ|milhão|billion|billón|trillion|thousand|hundert"
    r"|tausend|dutzend|douzain|docen|dozzin|dúzi|decen|dizain|centen|centain|тысяч|миллион|миллиард"
    r"|дюжин|десят|половин|трет|четверт|fünftel|sechstel|siebtel|zehntel)\w*|\w+ièmes?"
    r"|mill?|mil[ae]|mille|mio|mln|mrd|mld|bn|tn|cien|ciento|cento|cent|lakhs?|lacs?|crores?|тыс|млн|млрд"
    r"|(?:ein|ander)?halbe?[nrs]?|(?:demi|medi|mei|mezz)[aeio]?s?|drittel|viertel|achtel|tiers"
    r"|ter[cz](?:i|io|ios|o|os)|[qc]u[ai][rn]t[oi]s?|(?:sext|séptim|octav|oitav|noven|décim)os?"
    r"|trios?|remainder|resto?|root"
)
"""Such words of other languages, and scales and parts as they are abbreviated."""
_NO_UNITS = _CHANGES | word_set(
    "or and to than not but times if maybe perhaps possibly either versus vs is are was equals "
    "less fewer short below above wrong incorrect fails"
)
_UNITS = {
    name: names.split()[0]
    for names in re.split(
        ",",
        "mm millimeter millimetre,cm centimeter centimetre,m meter metre,km kilometer kilometre,"
        "in inch inches,ft foot feet,yd yard,mi mile,g gram,kg kilogram,lb lbs pound,oz ounce,"
        "L l liter litre,degree circ deg,$ usd dollar,€ eur euro,£ gbp,"
        "cent,% percent,s second sec,min minute,"
        "h hour hr,day,week,month,year,W watt,J joule,N newton,Pa pascal,V volt,K kelvin,Hz hertz,"
        "mol mole",
    )
    for name in names.split()
}
_CHANGED = re.compile(
    "分之|분의|[百十半多余餘几幾倍折割成弱強]|千(?![克米瓦卡])|以[上下内外]|未[満满]|より|超|천|백|반|이상|이하|미만"
    "|กว่า|ครึ่ง|ล้าน|แสน|หมื่น|พัน|ร้อย|아닙|아니|ではな|ではあり|じゃな|不是|不对|不對|错|แต่"
)
"""What makes the number before it another or denies it, in scripts without blanks."""
_NAME = re.compile(
    r"(?:\\(?:text|mathrm|mbox|operatorname) ?\{[^{}=]*\}|\|[A-Z]{1,3}\||\\angle ?[A-Za-z]{1,3}"
    r"|[A-Za-z]'{0,2}(?: ?_ ?(?:\w|\{\w*\}))? ?\([-\w, ]{1,20}\)"
    r"|[A-Za-z](?: ?[-+] ?[A-Za-z])+"
    r"|\\?[A-Za-z][A-Za-z ]*'?(?: ?_ ?(?:\w|\{\w*\}))?) ?"
)
_EMPHASIS = re.compile(r"(\*{1,3}|_{1,3}|`)([^*_`].*)\1", re.DOTALL)
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
_FIRST = re.compile(
    r"([-+]?)(?:\$((?:[^$\\]|\\.)++)\$|\\\(((?:[^\\]|\\(?!\)))++)\\\))([^$]+)", re.DOTALL
)
_IN_PROSE = re.compile(
    rf"[-+]?(?:{_MONEY.pattern})?-?(?:{_SHAPE})(?:{_SCALE.pattern})?", re.IGNORECASE
)
_OPERATOR = re.compile(
    r"\s*(?:[-+*/^<>]|[xX]\b|times\b|divided by\b)\s*[\d$(\\.]|\s*[-+*^]\s*[A-Za-z](?![A-Za-z])"
    r"|\s*\\(?!text|mbox|mathrm|%|circ|degree|deg|percent|\$)[a-z]"
)
_SIUNITX = re.compile(rf"\\(SI|qty|num|ang) ?\{{({_INNER})\}}(?: ?\{{({_INNER})\}})?")
_PARTS = re.compile(r"\d[\d.,]*|\\?[^\W\d_]+(?:['’-][^\W\d_]+)*|[^\s\w]")
_FUNCTION = word_set(
    "a an the of for in on at to by per each every is are was were do does did has have had can "
    "could would will should may might must that who which with from than as more if so because "
    "since and or not cannot can't isn't aren't wasn't won't doesn't"
)
"""English words that are neither units nor nouns."""
_APART = word_set(
    "for on after at when if since because so as while before that which who i we he she "
    "they it you"
)
"""Words after which a number says nothing of the one before them."""
_DENIED = re.compile(
    r"(?:is|are|was|were|do|does|did|has|have|can|could|would|will|should|may|might|must)"
    r"(?:n['’]t| not| never| (?:wrong|incorrect|false|impossible|too))\b"
    r"|(?:is|are|was|were) (?:an? )?(?:extraneous|reject|ruled|exclu|discard|invalid|upper|lower)"
    r"|cannot\b|can['’]t\b|won['’]t\b"
)
_COMMA = re.compile(r"(?<=\d)(?:\{,\}|, ?(?:\\! ?)+| ?\\, ?)(?=\d{3})")


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a text states.

    `name` is what it is named, the `x` of `x = 5`; `unit` a unit of `_UNITS`, such as `cm^2`.
    """

    value: Fraction
    name: str = ""
    unit: str = ""

    def fits(self, gold: Number) -> bool:
        """Whether neither name nor unit contradicts the gold answer's: one may be left out."""
        if self.unit == "%" and not gold.unit and abs(gold.value) < 1:
            return False  # 0.5% of a gold answer that is a share
        return same_name(gold.name, self.name) and same_name(gold.unit, self.unit)


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
    text = " ".join(spaced(plain(text)).split())
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


def read_number(text: str, *, evaluated: bool = True, letters: bool = True) -> Number | None:
    r"""The number that the whole text is, or None: `1,234`, `-3.5`, `\$7`, `2/3`, `1 1/2`, `x = 5`.

    Units after it are passed over, `%` and degrees among them: `8\%` is 8. `18 million` is
    18,000,000. An operation that is left to do (`17 \times 24`, `816/2`) is not a number; with
    `evaluated` False, powers and such fractions are. Scientific notation is a number. Single
    letters are units (`5 m`) unless `letters` is False: they may be variables.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = bare(text)
    if formula := _FIRST.fullmatch(text):  # `$18$ dollars`
        text = f"{formula[1]}{formula[2] or formula[3]} {formula[4]}"
    text = re.sub(r"^\((-?[^(),;]*)\)$", r"\1", re.sub(r"^negative (?=\d)", "-", text))
    text, about, near = text.partition("\\approx")
    if about and (not text.strip() or text.rstrip().endswith("=") or is_name(text)):
        text, near = f"{text}={near}" if text.strip() else near, ""
    *sides, text = text.split("=")
    name = name_of(sides[0]) if sides and is_name(sides[0]) else ""
    number = _single(bare(text), evaluated, letters)
    if number is None or not all(side_fits(one, number, at) for at, one in enumerate(sides)):
        return None
    rounded = _single(bare(near), evaluated, letters) if near.strip() else number
    if rounded is None or (near.strip() and not comes_to(text, rounded)):
        return None
    return replace(number, name=name)


def is_name(side: str) -> bool:
    """Whether the side of an equation names what is sought: `x`, `P(A)`, `Total cost`."""
    other = re.match(
        r"\s*(?:\\?(?:log|ln|exp|sqrt)|we|if|let|say|try|discard|reject|exclude)\b",
        side,
        re.IGNORECASE,
    )
    return other is None and _NAME.fullmatch(side.strip()) is not None


def side_fits(side: str, number: Number, at: int = 0) -> bool:
    """Whether an equation's side, the one in the place `at`, comes to the last side's number.

    The first may be a name, and those in between hold symbols. A number alone is not a calculation.
    """
    side = side.strip(" $&")
    if at == 0 and is_name(side):
        return True
    found = comes_to(side, number)
    if found is None and at > 0:
        return re.search(r"[,;] |\b(?:and|or)\b|[<>]|\\[gln]eq?\b", side) is None and bool(
            re.match(r"\\?[A-Za-z(]|[\d.]+ ?(?:\\|[A-Za-z(])", side)
        )
    return bool(found) and re.fullmatch(rf"-?{_DECIMAL}", side) is None


def comes_to(arithmetic: str, number: Number) -> bool | None:
    """Whether a calculation comes to a number, or to one that it is rounded from to some decimals.

    None of what cannot be read as a calculation.
    """
    try:
        value, stated = calculated(arithmetic), number.value
    except ZeroDivisionError:
        return False
    if value is None or value == stated:
        return None if value is None else True
    units = [10**places for places in range(1, 13)]
    return any((stated * n).denominator == 1 and abs(stated - value) * 2 * n <= 1 for n in units)


def _single(text: str, evaluated: bool, letters: bool) -> Number | None:
    """The number that a side of an equation, or a text without one, is."""
    text = text.removeprefix("\\approx").strip()
    lead = _LEAD.match(text)
    assert lead is not None  # all of it may be missing
    sign, text = lead[1] + (lead[3] or ""), text[lead.end() :]
    if len(sign) > 1 or (sign == "-" and text.startswith("\\frac{-")):
        return None
    found = _NUMERAL.match(text)
    value = _value(found, evaluated) if found else None
    if found is None or value is None:
        return None
    rest = text[found.end() :]
    if scale := _SCALE.match(rest):
        value, rest = value * 10 ** _SCALES[scale[1].lower()], rest[scale.end() :]
    if not only_units(rest, letters):
        return None
    return Number(-value if sign == "-" else value, "", _unit(lead[2] or "", rest))


def number_in_prose(text: str, start: int, *, evaluated: bool = True) -> tuple[int, Number | None]:
    """The number that begins at `start`, with the unit after it, and where it ends.

    Any word may follow it but one that makes it another number (`3 dozen`). None if something
    other than a unit is joined to it, or an operation follows.
    """
    found = _IN_PROSE.match(text, start)
    if found is None:
        return start + 1, None
    end = found.end()
    latex = _LATEX_UNITS.match(text, end)
    if latex and latex[0].strip() and only_units(latex[0]):
        whole = read_number(found[0] + latex[0], evaluated=evaluated)
        return latex.end(), None if continues(text[latex.end() :]) else whole
    joined = re.compile(r"\S*").match(text, end)[0]  # type: ignore[index]
    unit = joined.rstrip(".,;:!?)]}*_\"'$")
    word = re.compile(r"\S*\s+((?:square|sq|cubic|cu)\.? )?([^\s,;:.)]+)").match(text, end)
    if _OPERATOR.match(text, end + len(joined)) or continues(text[end:]):
        return end, None
    if unbroken := re.match(r"[^\x00-\u0e00\W\d_]+", joined):
        unit, joined = unbroken[0], ""  # no blank stands between words
    if "!" in joined or (
        unit and not re.fullmatch(r"(?:-[A-Za-z]|[,;:()])[^\d]*", unit) and not only_units(unit)
    ):
        return end, None
    if word and not joined:
        unit = f" {word[1] or ''}{word[2]}"
    number = read_number(found[0], evaluated=evaluated)
    whole = read_number(found[0] + unit, evaluated=evaluated)
    return end, whole or number


def continues(after: str, *, marked: bool = False) -> bool:
    """Whether what follows a number, or a mark, makes it another one, or denies it.

    Units or nouns may come first; then another number, a part (`and a half`), an alternative or a
    denial may not.
    """
    if _OPERATOR.match(after) or re.match(r"[\s(,]*or\b", after):
        return True
    phrase = re.split(r"[.;:!?()=\n]|, ", after[:200], maxsplit=1)[0]
    parts = [part.lower() for part in _PARTS.findall(phrase)]
    parts = [part for part in parts if part not in ("*", "_", "$", '"', "'", "′", "″", "}", "{")]
    if parts and parts[0] in _NO_UNITS - _FUNCTION - word_set("times fewer less equals but"):
        return True
    if _CHANGED.search(phrase[:8]) and not phrase.isascii():
        return True
    stops = (
        i
        for i, one in enumerate(parts)
        if one in _FUNCTION | _APART or not (one[0] in "%\\" or one[0].isalpha())
    )
    at = next(stops, len(parts))
    if any(map(_SCALED.fullmatch, parts[: min(at, 1 if marked else 4)])):
        return True
    if not marked and "remainder" in parts[:5]:
        return True
    unit = parts[at - 1].removesuffix("s") if at else "%"
    joins = not marked or unit in _UNITS or parts[at - 1] in _UNITS
    left = [*parts[at:], "", ""]
    number = left[1][:1].isdigit() or left[1] in _CHANGES | {"a", "an", "another", "\\frac"}
    if (left[0][:1].isdigit() and joins) or (left[0] in ("and", "to", "plus", "minus") and number):
        return True
    if left[1][:1].isdigit() and left[0] not in _APART | {"of"} and at == 0 and not marked:
        return True
    if left[0] == "of" and left[1][:1].isdigit() and at and unit in "%percentout":
        return True
    if left[0] == "or" and (at < 2 or number):
        return True
    than = parts.index("than") + 1 if "than" in parts[:4] else None
    if than is not None and (
        len(parts) == than or parts[than][0].isdigit() or len(parts[than]) == 1
    ):
        return True
    return at == 0 and _DENIED.match(" ".join(parts)) is not None


def same_number(a: Fraction, b: Fraction, tolerance: float = 0.0) -> bool:
    """Whether |a − b| ≤ tolerance · max(1, |b|): absolute for small b, relative for large."""
    return abs(a - b) <= Fraction(tolerance) * max(Fraction(1), abs(b))


def calculated(text: str) -> Fraction | None:
    """What a calculation of `+ - * / ^ !`, fractions, roots, binomials and decimals comes to.

    None if it is not one. Raises ZeroDivisionError.
    """
    if len(text) > 300:
        return None
    text = re.sub(r"\\(?:times|cdot)(?![a-z])", "*", spaced(text)).replace("\\div", "/")
    text = re.sub(r"(?<=\d) ?x ?(?=\d)", "*", text)
    text = re.sub(r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"[$\s]|(?<=\d),(?=\d{3})|\\text\{[^{}]*\}", "", text.replace("\\$", ""))
    for _ in range(4):  # fractions in fractions
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\binom\{(\d+)\}\{(\d+)\}", r"((\1)|(\2))", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"((\1)^(1/2))", text)
        text = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", text)
    text = re.sub(r"(\d+)!", r"(\1|0)", re.sub(r"\\?%", "/100", text))
    text = re.sub(r"(?<=[)\d])(?=\()|(?<=\))(?=\d)", "*", text)
    if re.search(r"[^-+*/().\d^|]|\*\*|//", text):
        return None
    text = re.sub(r"\d+(?:\.\d+)?|\.\d+", r"'\g<0>'", text).replace("^", "**").replace("|", "@")
    try:
        return _value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp):
        return _value_of(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if not isinstance(node, ast.BinOp):
        raise ValueError("no calculation")
    left, right = _value_of(node.left), _value_of(node.right)
    if isinstance(node.op, ast.Pow):
        return _power(left, right)
    if isinstance(node.op, ast.MatMult):  # n choose k, and n! as `n @ 0`
        n, k = int(left), int(right)
        if n > 170 or n != left or k != right:
            raise ValueError("too large")
        return Fraction(math.comb(n, k) if k else math.factorial(n))
    if isinstance(node.op, ast.Mult | ast.Div):
        return left * right if isinstance(node.op, ast.Mult) else left / right
    return left + right if isinstance(node.op, ast.Add) else left - right


def _power(base: Fraction, power: Fraction) -> Fraction:
    """A power with an exact value; ValueError for others, and for large ones."""
    if power == Fraction(1, 2) and base >= 0:
        root = Fraction(math.isqrt(base.numerator), math.isqrt(base.denominator))
        if root * root == base:
            return root
    digits = len(str(base.numerator)) + len(str(base.denominator))
    if power.denominator > 1 or abs(power) * digits > MAX_CHARACTERS:
        raise ValueError("not a plain power")
    return base ** int(power)


def name_of(side: str) -> str:
    """A symbol, as `x` or `\\theta`, that an equation's side is; "" if it is words."""
    name = bare(side).replace(" ", "").replace("{", "").replace("}", "")
    letters = re.sub(r"[_(|'].*", "", name)
    return name if len(letters) == 1 or letters.startswith("\\") else ""


def _unit(money: str, rest: str) -> str:
    """The known units that stand around a number, as `W m^-2`; "" if one is not known."""
    text = re.sub(r"\\(?:text|mbox|mathrm|operatorname)(?![a-z])", " ", money + rest)
    text = re.sub(rf"\\frac ?\{{({_INNER})\}} ?\{{({_INNER})\}}", r"\1/\2", text)
    units: list[tuple[str, int]] = []
    power = 1
    for part in re.findall(r"/|[%$€£]|-?\d|[^\W\d_]+", text):
        if part == "/":
            power = -1
        elif part.lower() in ("square", "sq", "cubic", "cu"):
            power *= 2 if part[0] in "sS" else 3
        elif part[-1].isdigit():
            units[-1:] = [(name, raised * int(part)) for name, raised in units[-1:]]
        else:
            names = (part, part.lower().removesuffix("s"), part.lower())
            found = next((_UNITS[name] for name in names if name in _UNITS), "")
            if not found:
                return ""
            units.append((found, power))
            power = 1
    if len(units) > 1 and all(raised > 0 for _, raised in units):
        return ""  # a noun and a unit, perhaps; those of a rate are sure
    return " ".join(sorted(name if raised == 1 else f"{name}^{raised}" for name, raised in units))


def same_name(gold: str, stated: str) -> bool:
    """Whether the name or unit of what was stated may be the gold answer's: one may have none."""
    return not gold or not stated or gold == stated


def _value(found: re.Match[str], evaluated: bool) -> Fraction | None:
    """What a numeral is worth; None if it is not a value yet, or out of bounds."""
    if found["base"]:
        power = found["power"] or found["digit"]
        if evaluated or len(power) > 4 or len(found["base"]) * int(power) > MAX_CHARACTERS:
            return None
        return Fraction(int(found["base"]) ** int(power))
    if found["over"]:
        over = [
            int(one) for one in re.findall(r"-?\d+", re.sub(r"[, ](?=\d{3})", "", found["over"]))
        ]
        if len(over) == 1:  # \frac12
            over = [int(one) for one in str(over[0])]
        if len(over) != 2 or over[1] == 0:
            return None
        value = Fraction(*over)
        if found["mixed"]:
            whole = int(re.sub(r"\D", "", found["mixed"]))
            return whole + value if 0 < value < 1 else None  # `2024 5/2` are two numbers
        return None if evaluated and value.denominator == 1 < over[1] else value
    value = Fraction(re.sub("[, ]", "", found["decimal"]))
    exponent = found["exponent"] or found["ten"] or found["bare"]
    if exponent is None:
        return value
    if len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    return value * Fraction(10) ** int(exponent)


def only_units(rest: str, letters: bool = True) -> bool:
    """Whether what follows a number is units or nouns, and nothing that makes it another value."""
    at = 0
    rest = re.sub(r"\\(?:Omega|ohm)(?![a-z])", "Ω", rest).replace(r"\mu", "µ")
    while at < len(rest):
        found = _UNIT.match(rest, at)
        if found is None:
            return False
        groups = found["text"], found["top"], found["bottom"]
        if not all(only_units(" " + re.sub(r"[()]", " ", g)) for g in groups if g is not None):
            return False
        if word := found["word"]:
            apart = at > 0 or found.start("word") > at
            other = word.lower() in _NO_UNITS or _SCALED.fullmatch(word.lower())
            if (other and not (apart and word == "K")) or not _noun(word, apart, letters):
                return False
        at = found.end()
    return True


def _noun(word: str, apart: bool, letters: bool) -> bool:
    """Whether a word may be a unit: any that is apart from the number, else a known unit."""
    if (letters and word in _LETTERS) or word in _ATTACHED:
        return True
    if not word.isascii():
        return _CHANGED.search(word[:4]) is None
    return apart and (len(word) > 2 or word.lower() in ("a", "of", "in", "an", "at", "by", "on"))
