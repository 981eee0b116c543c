r"""The final answer of a text that works towards one, or the option that it settles on.

An answer is, in order: the last mark (`\boxed{…}` or a line `#### …`), else the last statement
("the answer is …", "Answer: …"), else what the last sentence concludes. The end of a text alone is
read, and no pattern takes more than some tenths of a second for it, whatever it holds.

An option's label (`D`, `(D)`, `D) 14`) counts if a statement leads to it and nothing but the
option's text, a reason or `is correct` follows: not two labels, a denied one, a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from keel.graders.formats import ANSWER_NAME, tag_content
from keel.graders.notation import bare, closing, pattern, plain, spaced, word_set
from keel.graders.numbers import Number, calculated, comes_to, only_units, read_number
from keel.graders.prose import (
    BETWEEN,
    END,
    LABEL,
    SYMBOL,
    WORD,
    bare_symbols,
    follows,
    leads,
    may_be_equated,
    number_of,
    sentences,
    shortened,
)

TAIL = 16_384
"""Characters at the end of a text in which its answer stands; what is before them is not read."""
LONGEST = 4000
"""Characters of a statement, or of the last sentence, that are looked at."""
WITHDRAWN = pattern("withdrawn")
"""What takes back the answer before it."""

_BOX = re.compile(r"\\(?:boxed|fbox) ?(?=\S)")
_TAG = re.compile(
    rf"(?:<\|?|\[(?=(?-i:[A-Z_ -]+)\]))(?:begin_of_|start_)?({ANSWER_NAME}) ?\|?[>\]]"
    r"((?:(?![<\[]\|?\1).)*?)(?:[<\[](?:\|?/|\|end_(?:of_)?) ?\1 ?\|?[>\]]|(\Z))",
    re.IGNORECASE | re.DOTALL,
)
_JSON = re.compile(
    r'(?<![^\n`])\s*\{\s*"(?:final_)?answer"\s*:\s*"?([^"{}\n]*)"?\s*\}(?=[\s`]*\Z)',
    re.IGNORECASE,
)
_FENCE = re.compile(r"\s*```(?:(?:text|json|latex|tex|math)?\n)?([^`\n]*)\n?```\s*")
_OPTION = re.compile(r"(?:\\[a-z]+ ?)?[{(]*[A-Z][)}]*")
_AFTER_TAG = re.compile(
    r"\d|[.!^]\S|[A-Za-z](?![A-Za-z])|[ \t]*[-−+*/^×÷][ \t]*[\d$(\\]"
    r"|\W*(?:is|was) (?:not|wrong|incorrect|false)\b"
)
"""What changes or denies the answer in a recipe's own tag."""
_FORMATTING = re.compile(
    r"\[asy\].*?(?:\[/asy\]|\Z)|</?(?:b|i|em|strong|u|p|span|center|div|br) ?/?>|~~[^~\n]*~~",
    re.DOTALL,
)
_END_OF_TEXT = re.compile(
    r"(?:</s>|<eos>|<end_of_turn>|\[/?INST]|<\|[\w ]{1,40}\|>|#{3,}|\n(?:Q|Question|User|Human):"
    r"|[✅✓])\Z"
)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_TITLE = re.compile(r"^[ \t]*+#++([^\n]*+)$", re.MULTILINE)
_NUMBERED = pattern("numbered")
_HEADING = pattern("heading")
_SAYS = pattern("says", re.IGNORECASE | re.MULTILINE)
_LEADS_TO_ANSWER = word_set("leads to answer")
_CHANGED_ANSWER = pattern("changed answer")
_ASKS = pattern("asks")
_POLITE = pattern("polite", re.IGNORECASE | re.DOTALL)
_REMARK = pattern("remark")
_CONCLUDES = pattern("concludes")
_TURNS = pattern("turns")
_ABOVE = re.compile(r"(?<!\s)[^\S\n]*+\n\s*+(?=\\\[|\$\$)")
_AROUND = re.compile(r"[\s*_]*+")
_CALCULATION = re.compile(r"<<[^<>]*>>")
_DISPLAY = re.compile(r"(?:[*_\s]|\$(?=\$))*+(?:\\\[.*?\\\]|\$\$.*?\$\$)", re.DOTALL)
_LAST_DISPLAY = re.compile(r"(?:\\\[|\$\$)((?:(?!\\\[|\$\$).)*)(?:\\\]|\$\$)[.\s]*\Z", re.DOTALL)
_NOT_ANOTHER = re.compile(r", (?:and )?(?:not|rather than|instead of)\b[^,]*\Z")
_LISTED = re.compile(r"[,;](?: +\d| *(?![A-Za-z]{2})[^\s\d]| *\w+\W*\Z)(?!\d{3}\b)")
_ASIDE = re.compile(r"\([A-Z][^()]*\)")
_ALONE = re.compile(r"[^\w(\\]*(?:\s|(?:[^\W\d]+[^\w\\]+){1,2})[\d.,]+\W*")
_PARAGRAPH = re.compile(r"[^\w(\\]*(\d(?:[\d.,]*\d)?)\W*")
_DIGITS = re.compile(r"\d(?:[\d.,]*\d)?")
_RESULT = re.compile(r":[^:A-Za-z=\\]*=[^A-Za-z]*\d")


class _Mark(NamedTuple):
    """A mark: where it starts and ends, and what it holds."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a text ends on, and how it is set off: by a mark, a statement, or not at all."""

    text: str
    how: Literal["marked", "stated", "last"]


def final_answer(text: str, *, words: bool = False, trusted: bool = False) -> Answer | None:
    """The answer that a text ends on; None if it ends on none, or names several in turn.

    A last sentence without numbers or formulas is passed over, unless the answer is `words`. If
    the text is `trusted`, as a worked solution is, what stands around a mark is not looked at.
    """
    text = plain(text[-TAIL:]) if trusted else stated_part(text)
    mark = max(
        filter(None, map(_in_a_row, (text, text), (_boxed(text), _hashed(text)))), default=None
    )
    if mark is not None:
        kept = trusted or (
            not taken_back(text, mark.end, mark.text)
            and (
                text[mark.start] == "#"
                or (_apart(text, mark, box=True) and may_be_equated(text[: mark.start], mark.text))
            )
        )
        return Answer(mark.text, "marked") if mark.text and kept else None
    stated = _stated(text, words)
    if stated is not None:
        start, end, answer = stated
        if not answer or WITHDRAWN.search(text, start) or taken_back(text, end, answer):
            return None
        if SYMBOL.search(answer) or len(answer.split()) < 6:
            return Answer(answer, "stated")
    last = _last(text, words)
    return Answer(last, "last") if last else None


def stated_number(text: str, *, evaluated: bool = True) -> Number | None:
    """The number that a text ends on; None if its answer, as a whole, is not a number.

    What is marked is read as a whole; of a sentence, the one number that it comes to.
    """
    answer = final_answer(text)
    if answer is None:
        return None
    whole = read_number(answer.text, evaluated=evaluated)
    if whole is not None or answer.how == "marked":
        return whole
    sentence = _CALCULATION.sub("", answer.text)
    if answer.how == "stated" or WORD.search(sentence):
        sentence = sentence.rstrip("*_ ").removesuffix("!")
    sentence = _NOT_ANOTHER.sub("", sentence)
    if answer.how == "stated" and _LISTED.search(sentence):
        return None  # a list: `Evelyn, 5`
    return number_of(sentence, evaluated=evaluated)


def stated_part(text: str) -> str:
    """The end of a text, plain, or what is in the tag that states its answer (see `tagged`)."""
    text = _FORMATTING.sub(" ", plain(text[-TAIL:])).rstrip()
    while ending := _END_OF_TEXT.search(text[-60:]):
        text = text[: len(text) - len(ending[0])].rstrip()
    if len(re.findall(r'answer"\s*:', text)) == 1:
        text = _JSON.sub(r"<answer>\1</answer>", text)
    if fence := _FENCE.fullmatch(text):
        text = fence[1]
    for _ in range(3):  # tags in tags
        inside = tagged(text)
        if inside is None:
            break
        text = inside
    return text.removesuffix("</answer>")


def tagged(text: str) -> str | None:
    """What is in the last `<answer>…</answer>` or such, which the end of the text may close.

    None without one, and "" if what stands around it takes it back or makes it an operand.
    """
    mark = _in_a_row(
        text,
        (
            _Mark(one.start(), one.end(), one[2])
            for one in reversed(list(_TAG.finditer(text)))
            # In quotes, a tag that is not closed or is empty is mentioned, not used.
            if text[max(one.start() - 1, 0)] not in "`\"'" or (one[3] is None and one[2].strip())
        ),
    )
    if mark is None:
        return None
    return mark.text if _apart(text, mark) and not taken_back(text, mark.end, mark.text) else ""


def in_tag(text: str, tag: str) -> str | None:
    """What is in the last `<tag>…</tag>`; None without one, if it is an operand or taken back."""
    inside = tag_content(text, tag)
    if inside is None:
        return None
    before, _, rest = text.rpartition(f"</{tag}>")
    led = leads(plain(before.rpartition(f"<{tag}>")[0]), marked=True)
    return inside if led and not _AFTER_TAG.match(rest) and not WITHDRAWN.search(rest) else None


def taken_back(text: str, end: int, answer: str) -> bool:
    """Whether what follows an answer withdraws it, or states or concludes another number."""
    if WITHDRAWN.search(text, end):
        return True
    known = set(_DIGITS.findall(spaced(answer)))
    for at, (sentence, _) in enumerate(sentences(_ASIDE.sub(" ", text[end:]))):
        numbers = _DIGITS.findall(sentence)
        if known.issuperset(numbers) or is_heading(sentence.strip("# "), below=False):
            continue
        alone = (at > 0 or text[end - 1] in ".\n") and _ALONE.fullmatch(sentence)
        other = known.isdisjoint(numbers) and (alone or _CONCLUDES.search(sentence))
        if (other or _TURNS.search(sentence)) and not re.search(r"\b(?:than|if)\b", sentence):
            return True
    _, parted, paragraph = text[end:].rstrip().rpartition("\n\n")
    last = _PARAGRAPH.fullmatch(paragraph) if parted else None
    return last is not None and last[1] not in known


def only_repeats(text: str, question: str) -> bool:
    """Whether a text of four words or more says nothing but sentences of the question."""
    asked = " ".join(question.casefold().split())
    said = [" ".join(one.split()) for one in END.split(text.casefold())]
    words = sum(len(one.split()) for one in said)
    return words >= 4 and all(one in asked for one in said)


def _apart(text: str, mark: _Mark, *, box: bool = False) -> bool:
    """Whether a mark is neither an operand nor denied by what stands around it."""
    # The formula of an option may follow a box with its letter.
    option = box and _OPTION.fullmatch(mark.text) and not WORD.match(text[mark.end :].lstrip(" $"))
    if not leads(text[: mark.start], marked=True):
        return False
    equal = _EQUAL.match(text, mark.end) if box else None
    if equal is not None and _agree(mark.text, equal["side"], equal["sign"] != "="):
        return follows(text, equal.end(), marked=True)
    return bool(option) or follows(text, mark.end, marked=True)


def _agree(answer: str, side: str, about: bool) -> bool:
    """Whether the other side of an equation that a box begins is the same number, or one that the
    answer is rounded to: `2.5` of `\\frac{5}{2}`; `about` one that cannot be compared too."""
    if not all(only_units(f" {one}") for one in _TEXT.findall(side)):
        return False
    other, own = read_number(side), read_number(answer)
    found = [] if other is None else [comes_to(answer, other.value)]
    if own is not None and about:
        found.append(comes_to(side, own.value))
    elif own is not None:
        with suppress(ZeroDivisionError):
            found.append(calculated(side) == own.value)
    return True in found or (about and False not in found)


_EQUAL = re.compile(
    r"\s*(?P<sign>=|\\approx)\s*(?P<side>[^$=\n]{1,60}?)(?=\s*(?:\$|\\[\])]|\.\s|\n|\.?\Z))"
)
"""What a box is said to equal, to the end of the formula."""
_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")


def _in_a_row(text: str, marks: Iterable[_Mark]) -> _Mark | None:
    """The last mark, what is in it without blanks; marks in a row are a list."""
    found: list[_Mark] = []
    for mark in marks:
        if found and not BETWEEN.fullmatch(text, mark.end, found[-1].start):
            break
        found.append(mark)
    if not found:
        return None
    parts = dict.fromkeys(mark.text.strip() for mark in reversed(found))
    return found[0]._replace(text=", ".join(parts))


def _boxed(text: str) -> Iterator[_Mark]:
    """The boxes that hold something, the last first; one that does not close holds no answer."""
    for opening in reversed(list(_BOX.finditer(text))):
        start, at = opening.span()
        if text[at] != "{":  # the next word
            word = re.compile(r"[^\s$]+").match(text, at)
            end, inner = (word.end(), word[0].rstrip(".,;")) if word else (len(text), "")
        else:
            end = closing(text, at + 1)
            end, inner = (end, text[at + 1 : end - 1]) if end > 0 else (len(text), "")
        if end == len(text) or bare(inner):
            yield _Mark(start, end, inner)


def _hashed(text: str) -> Iterator[_Mark]:
    """The lines `#### …` that are answers, not the headings of what follows, the last first."""
    for found in reversed(list(_HASHES.finditer(text))):
        line = found[1].strip().strip("#").strip()
        if is_heading(line, below=found.end() < len(text)):
            continue
        label = LABEL.fullmatch(line)
        match = _SAYS.match(line) or (_SAYS.search(line) if label is None else None)
        answer = line[match.end() :] if match else label[2] if label else line
        yield _Mark(found.start(), found.end(), answer.strip(" *_"))


def is_heading(line: str, below: bool) -> bool:
    """Whether a line after `####` is a heading; `below` says that text follows it.

    `Step 1: …` and `2. Compute …` always are. If text follows, prose is, and a word such as
    `Conclusion`; a number with its units is not.
    """
    content = bare(line)
    if not content or _NUMBERED.match(content):
        return True
    if not below:
        return False
    if content[0].isdigit() or content[0] in "-$\\":
        return not content.islower() and len(WORD.findall(content)) > 1
    match = _SAYS.search(content)
    if match and content[match.end() :].strip():
        return False
    return len(WORD.findall(content)) > 1 or bool(_HEADING.fullmatch(content))


def _stated(text: str, words: bool) -> _Mark | None:
    """The last statement of an answer; what it says is "" if it is not of the answer itself.

    A question states nothing.
    """
    for found in list(_SAYS.finditer(text))[:-20:-1]:
        at = found.end()
        line = text.rfind("\n", 0, found.start()) + 1
        if _ASKS.search(text[max(line, found.start() - 200) : found.start()].rpartition(". ")[2]):
            continue
        if not leads(text[line:at], marked=True) or not _of_the_answer(
            text[line : found.start()], found[0]
        ):
            return _Mark(at, at, "")
        if display := _DISPLAY.match(text, at):
            return _Mark(at, display.end(), display[0].strip("*_ \n"))
        at = _AROUND.match(text, at).end()  # type: ignore[union-attr]
        ending = END.search(text, at)
        end = ending.end() if ending else len(text)
        answer = text[at:end].strip().strip("*_ ")
        if len(answer) > LONGEST:
            return _Mark(at, end, "")
        remark = not words and not SYMBOL.search(shortened(answer))
        if not answer.endswith("?") and not (remark and _REMARK.match(answer)):
            return _Mark(at, end, answer)
    return None


def _of_the_answer(before: str, says: str) -> bool:
    """Whether a statement is of the answer itself: not of twice it, nor of the answer plus 2."""
    if re.match(r"answers?\b", says, re.IGNORECASE) is None:
        return True
    clause = re.split(r"[^\w\s'’*#-]", before)[-1]
    words = re.findall(r"[a-z]+", clause.lower())
    return _CHANGED_ANSWER.search(says) is None and _LEADS_TO_ANSWER.issuperset(words)


def _last(text: str, words: bool) -> str | None:
    """The last sentence that holds more than words, unless something is asked in it or after it.

    A question that is repeated is not an answer, whatever numbers are in it.
    """
    text = _ABOVE.sub(" ", text.strip())
    if len(text) > LONGEST:
        text = text[-LONGEST:].partition(" ")[2]
    if display := _LAST_DISPLAY.search(text):
        return None if _ASKS.search(text[: display.start()].rpartition(". ")[2]) else display[1]
    for sentence, end in reversed(sentences(text)):
        start, sentence = end - len(sentence), sentence.strip().strip("*_# ")
        title = _TITLE.match(text, text.rfind("\n", 0, start) + 1)
        if (title and is_heading(title[1], below=False)) or _POLITE.search(sentence):
            continue
        asks = _ASKS.search(sentence)
        if asks and ("?" in sentence or not _RESULT.search(sentence, asks.end())):
            return None
        if sentence and (words or SYMBOL.search(sentence) or not WORD.search(sentence)):
            above = text[:start].rstrip()
            listed = bare_symbols(sentence) and bare_symbols(above[above.rfind("\n") + 1 :])
            return None if listed or WITHDRAWN.search(text, max(end - 1, 0)) else sentence
    return None


LABELS = 40
"""Labels in a sentence, at the most."""

_DRESS = re.compile(
    r"\\(?:text(?:bf|rm|it)?|math(?:bf|rm|sf)|mbox|bm|boldsymbol|left|right|quad|qquad)(?![a-z])"
    r"|\\[()\[\],;:!]|[$*`~{}\"“”✅✓☑✔]|(?<!\w)'|'(?!\w)"
    r"|(?<![A-Za-z])_|_(?![A-Za-z])|^[ \t]*(?:[-•>]|#+)[ \t]+",
    re.MULTILINE,
)
_LABEL = re.compile(
    r"(?<![A-Za-z0-9'’^+])(?:[(\[【「]{1,3}\s?([A-Za-z])\s?[)\]】」]{1,3}|([A-Za-z])(?![A-Za-z0-9'’=^+]))"
)
_LEADS = pattern("choosing", around=r"(?:{})\Z")
_SETTLES, _REASON, _RIGHT = pattern("settles"), pattern("reason"), pattern("right")
_UNSURE, _DENIES, _VERB = pattern("unsure"), pattern("denies"), pattern("verb")
_OPTION_LIST = re.compile(r"\W*[A-Z][).:]+ *\w")
_RIVAL = re.compile(
    r"\b[A-Z]\)? (?:is|are|could|might|may)(?: be| also| the| even| only)* ?"
    r"(?:correct|right|possible|better|best|true)\b|\b(?:maybe|else|perhaps|good as|no:) \(?[A-Z]\b"
)
_NOT_OTHER = re.compile(
    r",? ?\(?\b(?:(?:and )?not|rather than|instead of) (?:option )?\(?[A-Z]\b\)*"
)
_VALUE = re.compile(r"\s*\((?![^()]*\b(?:not|but|maybe|or|if|[A-Z])\b)[^()]*\)\W*\Z")
_ANOTHER = re.compile(r"(?<![\w'’^+\\])(?:[B-HJ-Z]|A(?! [a-z]))(?![\w'’=^+])")
_OTHER = re.compile(
    r"\A\W*[,;]\s*+(?![A-Za-z]{2,}\W+\w)"
    r"|[(\[][A-Z][)\]]|\b[A-Z]\)|(?:\b(?:or|and|oder|ou|und|et|o|y)\b|[,/&]) ?\(?[A-Z]\b"
)


def label_of(text: str) -> str:
    """The letter that a gold answer is or begins with: `D`, `(D)`, `D) 14`; "" without one."""
    bare = _DRESS.sub("", plain(text)).strip()
    found = re.fullmatch(r"\(?([A-Za-z])\)?\.?|\(([A-Za-z])\).*|([A-Z])[).:] .*", bare, re.DOTALL)
    return next((letter.upper() for letter in found.groups() if letter), "") if found else ""


def chosen(text: str, question: str = "") -> str | None:
    """The letter of the option that a text settles on; None without one, or with several.

    A bare value behind the label has to be the option's in the `question`.
    """
    text = stated_part(text)
    marked = final_answer(text, words=True)
    if marked is not None and marked.how == "marked":
        letter = _in(marked.text, question, whole=True)
        rest = text[text.rfind(marked.text) + len(marked.text) :]
        return letter if letter and not _turned(_DRESS.sub("", rest), letter) else None
    if re.search(r"\\(?:boxed|fbox) ?\{", text):
        return None
    text = re.sub(r"^([^\w\n]{0,16}[A-Z])\. ", r"\1) ", _DRESS.sub("", text), flags=re.MULTILINE)
    said = [(sentence, end) for sentence, end in sentences(text) if sentence.strip()]
    listed = [_OPTION_LIST.match(sentence) is not None for sentence, _ in said]
    for some in ((False,), (False, True)):  # options that are repeated choose if all else fails
        for at, (sentence, end) in reversed(list(enumerate(said))):
            letter = _in(sentence, question) if listed[at] in some else None
            if letter is None:
                continue
            before = _in(said[at - 1][0], question) if at else None
            turned = re.match(
                r"\W*(?:but|however|wait|no|actually|so|thus|therefore)\b", sentence, re.I
            )
            several = before not in (None, "", letter) and not turned
            deny, label = r"(?:\bnot\b|n['’]t|wrong|false)", rf"\b{letter}\b"
            denied = rf"{label}[^.\n]*{deny}|{deny}[^.\n]*{label}"
            back = WITHDRAWN.search(text, max(end - 1, 0)) or re.search(denied, text[end:])
            turned_down = several or back or _turned(text[end:], letter)
            return letter if letter and not turned_down else None
    return None


def _turned(rest: str, letter: str) -> bool:
    """Whether what follows a choice names another option, and does not deny it."""
    for sentence, _ in sentences(rest):
        named = set(_ANOTHER.findall(sentence)) - {letter}
        if named and not _DENIES.search(sentence) and not _OPTION_LIST.match(sentence):
            return True
    return False


def _in(sentence: str, question: str, *, whole: bool = False) -> str | None:
    """The letter that a sentence settles on; "" for several or none of those named, None for none.

    A mark is a statement as a `whole`.
    """
    sentence = _NOT_OTHER.sub("", _DRESS.sub("", sentence).strip()).rstrip(".!。 ")
    negated = _DENIES.search(question) is not None  # "Which of these is not …?"
    found: set[str] = set()
    named = False
    labels = list(_LABEL.finditer(sentence))
    if len(labels) > LABELS or len(sentence) > LONGEST:
        return ""
    for label in labels:
        tail = sentence[label.end() :]
        led = _LEADS.search(sentence, max(0, label.start() - 160), label.start())
        if led is None or (whole and led.start() > 0):
            continue
        named = named or _SETTLES.search(led[0]) is not None or whole
        if led["clause"] and not (led["so"].strip() or _RIGHT.match(tail.lstrip())):
            continue
        clause = re.split(r"[,;:] ", sentence[: label.start()].removesuffix(": "))[-1]
        if _UNSURE.search(clause) or not (negated or whole or _DENIES.search(clause) is None):
            named = True
            continue
        letter = (label[1] or label[2]).upper()
        value = re.escape(tail.strip(" .,;:)"))
        own = value and re.search(rf"\b{letter}\W{{1,4}}{value}(?!\w)", _DRESS.sub("", question))
        if own or _follows(tail, bracketed=label[1] is not None, small=label[0].islower()):
            found.add(letter)
    if len(found) == 1:
        return found.pop()
    return "" if found or named else None


def _follows(tail: str, *, bracketed: bool, small: bool) -> bool:
    """Whether the label before this is chosen, not denied, and the only one."""
    if not tail.strip(" .,;:!)'\"」】") or _VALUE.match(tail):
        return True
    head = re.split(rf"[;.]|, (?=[A-Z]\b)|{_REASON.pattern}", tail, maxsplit=1, flags=re.I)[0]
    if _RIVAL.search(tail) or _DENIES.search(head) or re.fullmatch(r"\W*[A-Z]\W*", tail):
        return False
    if small and not bracketed and tail[0] != ")":
        return False
    if _REASON.match(tail) or _RIGHT.match(tail.lstrip()):
        return True
    head = _REASON.split(tail, maxsplit=1)[0]
    if _VERB.match(tail) or _OTHER.search(head):
        return False
    return bracketed or re.match(r"[).:,;–—]|\s+[-–—]\s", tail) is not None
