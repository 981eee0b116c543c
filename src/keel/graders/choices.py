"""The option of a multiple-choice question that a text settles on.

A label (`D`, `(D)`, `D) 14`) counts if a statement leads to it and nothing but the option's
text, a reason or `is correct` follows. All else is not a choice: two labels, a denied one, a list.
"""

from __future__ import annotations

import re

from keel.graders.answers import LONGEST, WITHDRAWN, final_answer, stated_part
from keel.graders.notation import pattern, plain
from keel.graders.prose import sentences

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
_LISTED = re.compile(r"\W*[A-Z][).:]+ *\w")
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
    listed = [_LISTED.match(sentence) is not None for sentence, _ in said]
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
        if named and not _DENIES.search(sentence) and not _LISTED.match(sentence):
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
