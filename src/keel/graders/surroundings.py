"""What may stand around an answer: before it, articles, currency, names, `=`; after it, units.

All else makes a number an operand, a bound or another number, or denies it.
"""

from __future__ import annotations

import re

from keel.graders.numbers import continues, only_units, word_set

UNBROKEN = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Characters of scripts without blanks between words, for a pattern."""
WORD = re.compile(rf"(?<![\\{{A-Za-z])[A-Za-z]{{2,}}(?![A-Za-z}}])|[{UNBROKEN}]")
_LINKS = word_set(
    "a an the be being been is are was were it that this equal equals to only just now exactly "
    "simply precisely about approximately roughly around really actually necessarily es est "
    "ist son sind è é são sont sono"
)
"""Words between which and an answer nothing changes it."""
_DENIES = word_set(
    "not never no nor neither without cannot hardly unless if maybe perhaps possibly might may "
    "could either nicht pas"
)
_SHIFTS = word_set(
    "negative except than least most below above under over beyond less fewer between among minus "
    "plus times twice thrice half double triple quarter third per from within until before nearly "
    "almost near against divided multiplied step page question problem part chapter line "
    "equation figure section example close next prior exceed exceeds exceeding als que unter"
)
"""Words after which a number is an operand, a bound, a label, or denied."""
_MEASURED = re.compile(
    r"\b(?:(?:total|value|answer|result|sum|thinking|maximum|minimum|average|mean) (?:of|de|von|di)"
    r"|(?:an?|une?|una|eine?r?)(?: [\w-]+)?? (?!half|third|quarter|fourth|fifth|tenth|part|fraction"
    r"|multiple|factor|divisor|power|percentage|share|portion|square|cube|root|function|mitad|moiti)"
    r"[a-z]+ (?:of|de|von|di)"
    r"|(?:increas|decreas|reduc|chang|grew|fell|rose|dropp|risen|fallen|rais|los|w[io]n)\w* by"
    r"|\b(?:up|down) by|\b(?:est|es|è|é)(?: donc| quindi)? d[ei])\Z",
    re.IGNORECASE,
)
"""What `of` and `by` follow if they lead to an answer: a total of 5, decreased by 5."""
DOUBTED = re.compile(
    r"^\W*(?:if|unless|suppose|assum\w+|whether)\b|\b(?:no(?:body| one)|none of)\b"
    r"|\b(?:between|either)\b[^,;]*\b(?:and|or)\Z|(?<!round )(?<!rounds )\bup to\W*\Z"
    r"|\b(?:non?|não) (?:es|[èé])\b|\b(?:discard|reject|exclude|try|guess|say|imagine|might|may)\b"
    r"|\banswers? (?!is\b|comes|works|turns|as\b|to\b|for\b|of\b|in\b|will|would|must|should)"
    r"[a-z]+(?: |\Z)"
    r"|\b(?:wrong|incorrect|false|untrue|not true|not the case|doubt|unlikely)\b",
    re.IGNORECASE,
)
_AT_MOST = re.compile(r"\b(?:ha(?:s|ve|d)|needs?|makes?|gets?) at \w+\Z")
_UNBROKEN_BEFORE = re.compile(
    r"(?:[不没沒非未](?:[是为為会會能有等到]|等[于於])?|(?<!等)[于於]|[超过過乘除加减減离離差比第约近]|至[少多]|最多|の|より|から"
    r"|ไม่(?:ใช่|เท่ากับ|คือ)?|กว่า|ถึง)\Z"
)
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textrm|mathrm|operatorname) ?\{([^{}]*)\}")
_OPENS = re.compile(
    r"(?:[\s*_`\"'“(\[&~$€£¥₹]|\\[,;:! \[(\\$]|(?<![\w}^_\s])\{"
    r"|\\(?:text|textbf|mathbf|mathrm|bm|boldsymbol|underline)? ?\{"
    r"|\\(?:quad|qquad|displaystyle|bf|large|Large|LARGE|huge|Huge|left|therefore)"
    r"|\\(?:color|textcolor) ?\{\w+\} ?\{?|\\begin ?\{[a-z]+\*?\})\Z"
)
_TURNS = re.compile(
    r"(?:(?<![<>])(?<!\s!)=|[≈→⇒⟹#]|\\(?:approx|equiv|in|implies|to|(?:[Ll]ong)?[Rr]ightarrow|simeq|cong))\Z"
)
_LETTER = re.compile(r"(?:\\[a-z]+ ?)?[{(]*[A-Z][)}]*")
_BULLET = re.compile(r"(?:^|\n)[ \t]*(?:[-+*>•]|\d{1,3}[.)])\Z")
_CLOSES = re.compile(
    r"(?:[\s~*_`\"'”)\]&}$%✓✅☑]|\\[,;:! \])\\%$]"
    r"|\\(?:quad|qquad|right|hfill|degree|checkmark|square|blacksquare)(?![a-z])"
    r"|\\end ?\{[a-z]+\*?\}|\\(?:pmod|tag) ?\{[^{}]*\}|\\pmod ?\d"
    r"|\^ ?(?:\{ ?\\circ ?\}|\\circ))*+"
)


def may_precede(text: str) -> bool:
    """Whether a box after this text is the answer, not part of a formula, an operand or denied."""
    before = _TEXT.sub(r" \1 ", text[-300:])
    rest = before
    while found := _OPENS.search(rest):
        rest = rest[: found.start()]
    skipped = before[len(rest) :]
    if not rest or _TURNS.search(rest) or (skipped[:1].isspace() and _BULLET.search(rest)):
        return True
    if re.search(r"\\[A-Za-z]+\Z", rest):
        return False
    if rest[-1] == ":":
        return re.search(r"\b(?:not|never|cannot)\W*\Z|n['’]t\W*\Z", rest) is None
    if rest[-1].isalpha():
        return leads(rest, marked=True)
    apart = "$" if rest[-1] in ")]" else ""
    return (
        "\n" in skipped
        or _symbol(rest[-1])
        or (rest[-1] in ",;|)].!?" and skipped != "" and apart in skipped)
    )


def may_follow(text: str, end: int, answer: str | None) -> bool:
    """Whether a box that ends there is left as it is by what comes after it."""
    after = _TEXT.sub(r" \1 ", text[end : end + 300])
    skipped = _CLOSES.match(after)[0]  # type: ignore[index]
    rest = after[len(skipped) :]
    if (
        not rest
        or "\n" in skipped
        or _symbol(rest[0])
        or re.match(r"[.,;:?|](?!\d)|\\\\ldots|[-–—]+ ?[A-Za-z]{2}", rest)
    ):
        return True
    word = re.match(r"[^\W\d_]+", rest)
    if word is None:
        if answer and _LETTER.fullmatch(answer):
            return True  # an option, whose formula follows
        prose = skipped != "" or WORD.search(text[max(0, end - 100) : end]) is not None
        allowed = {"(": skipped != "", "!": prose}
        return allowed.get(rest[0], re.match(r"= ?[A-Za-z](?![A-Za-z])", rest) is not None)
    if (skipped == "" or len(word[0]) == 1) and not only_units(word[0]):
        return False
    return not continues(rest, marked=True) and not ("%" in skipped and re.match(r"of \d", rest))


def leads(before: str, *, marked: bool = False) -> bool:
    """Whether an answer may follow these words: not as an operand, a bound, or denied.

    Articles, verbs of being and adverbs may stand between; `at least` only before a mark.
    """
    before = before[-200:].rstrip(" \n*_$(")
    clause = re.split(r"[;.!?,](?=[\s$])|\n|\bno ?[:,]", before, flags=re.IGNORECASE)[-1].rstrip(
        ": "
    )
    if DOUBTED.search(clause):
        return False
    if re.search(rf"[{UNBROKEN}]\Z", clause):
        return _UNBROKEN_BEFORE.search(clause) is None
    verb, rest = False, ""
    words = list(re.finditer(r"[^\W\d_]+(?:['’][^\W\d_]+)?|[^\s*_$({\[\"~]", clause))
    for found in reversed(words):
        word = found[0].lower()
        if word not in _LINKS:
            rest = clause[: found.end()]
            break
        verb = verb or word in ("is", "are", "was", "were", "be", "equals", "equal", "è", "é")
    if not rest:
        return True
    if word.endswith(("n't", "n’t")) or word in _DENIES:
        return False
    if word in _SHIFTS and not verb:
        return marked and _AT_MOST.search(rest) is not None
    if word in ("of", "by", "de", "von", "di"):
        return _MEASURED.search(rest) is not None
    if len(word) > 1:
        return True
    if word.isalnum():
        return verb
    return _symbol(word) or word in "=:)]}|>%'!?," or rest.strip() == word


def _symbol(character: str) -> bool:
    """Whether it is an arrow, a tick, an emoji or such."""
    return not (character.isascii() or character.isalnum())
