"""The option of a multiple-choice question that a text settles on.

A label (`D`, `(D)`, `D) 14`) counts if a statement leads to it and nothing but the option's
text, a reason or `is correct` follows. All else is not a choice: two labels, a denied one, a list.
"""

from __future__ import annotations

import re

from keel.graders.answers import LONGEST, WITHDRAWN, final_answer, stated_part
from keel.graders.prose import sentences
from keel.graders.reading.notation import plain

LABELS = 40
"""Labels in a sentence, at the most."""

_DRESS = re.compile(
    r"\\(?:text(?:bf|rm|it)?|math(?:bf|rm|sf)|mbox|bm|boldsymbol|left|right|quad|qquad)(?![a-z])"
    r"|\\[()\[\],;:!]|[$*`~{}\"“”✅✓☑✔]|(?<![A-Za-z])_|_(?![A-Za-z])|^[ \t]*(?:[-•>]|#+)[ \t]+",
    re.MULTILINE,
)
_LABEL = re.compile(
    r"(?<![A-Za-z0-9'’^+])(?:[(\[【「]{1,3}\s?([A-Za-z])\s?[)\]】」]{1,3}|([A-Za-z])(?![A-Za-z0-9'’=^+]))"
)
_NOUN = (
    r"(?:answer|ans|option|choice|letter|solution|statement|ответ|вариант|alternativa|letra|antwort|lösung|réponse|respuesta|opción|opcion"
    r"|risposta|resposta|答案?|正确的|选项|選項|选择|答え|正解|解答|選択肢|정답|답은?|ตอบ(?:ที่ถูกต้อง)?|ข้อ)"
)
_ADVERB = (
    r"(?:(?:therefore|thus|hence|clearly|indeed|actually|definitely|obviously|donc|quindi),? )"
)
_LEADS = re.compile(
    rf"(?:{_NOUN}(?: (?:correct[ea]|correcta|corr?ett?a|richtige|here|to this question))?\s*"
    r"(?:(?:is|(?:would|must|should|will|has to) be|lautet|ist|est|es|sería|[èé]|คือ"
    r"|[是为為は은는=:–—-])\s*)*"
    rf"{_ADVERB}?(?:(?:(?:the|la|el|die|a|correct|right|best|that) |l['’])*(?:{_NOUN}\s*)?:?\s*)?"
    r"|\b(?:choose|pick|select|go with|chose|elijo|wähle|choisis)\s+(?:the )?"
    r"|[→⇒]\s*|=>\s*|\b(?:also|somit|daher|damit) ist\s+|(?<!不)[选選][择擇]?\s*:?\s*"
    r"|\b(?:it|this|that|which|correct|right|richtig|correcta?)"
    rf"(?:['’]s| is| must be| ist| es| est)\s*{_ADVERB}?(?:(?:the )?{_NOUN}\s*)?"
    r"|^(?:final|correct|result)\s*[:–—-]\s*"
    r"|(?:^|(?P<clause>[,;]) )"
    rf"(?P<so>(?:so|thus|therefore|hence|{_ADVERB}|only|also|and|,|\s)*))\Z",
    re.IGNORECASE,
)
"""What leads to the label that is chosen: a statement, or the start of a sentence."""
_SETTLES = re.compile(
    r"answer|antwort|lösung|réponse|respuesta|risposta|resposta|[答解选選답]|ตอบ|choose|pick|select|go",
    re.IGNORECASE,
)
_LISTED = re.compile(r"\W*[A-Z][).:]+ *\w")
_REASON = re.compile(
    r",? ?\b(?:because|since|as|for|given|denn|weil|da|car|puisque|porque|ya que|pues|although"
    r"|though|while|whereas)\b|,? ?(?:因为|因為|なぜなら)",
    re.IGNORECASE,
)
_RIGHT = re.compile(
    r"(?:is|are|ist|est|es|can be|must be)? ?(?:the |la |le |die |only |one |best |single )*"
    r"(?:correcta?|right|true|only|best|richtige?|correcte|answer|option|choice|one|here|bonne|works"
    r"|fits|respuesta|réponse|antwort)\b|です|でした|だ|である|が正解|が正しい|입|이다|[이가] 정답"
    r"|选项|正确|是正确|是对的|是正確|ครับ|ค่ะ",
    re.IGNORECASE,
)
_UNSURE = re.compile(
    r"\b(?:if|most(?! likely)|many|some(?:one)?|students|people|tempt\w*|mistake|almost|going to"
    r"|might|may|could|never|cannot|avoid|rejects?|do(?:es)? not|would not|should not|did not)\b"
    r"|n['’]t\b|[不别勿][能要]?[选選]",
    re.IGNORECASE,
)
"""What makes a choice that it stands before none."""
_DENIES = re.compile(
    r"\b(?:not|wrong|incorrect|false|mistaken?|worst|least|if|too)\b|n['’]t\b|错|誤|不|아니",
    re.IGNORECASE,
)
_RIVAL = re.compile(
    r"\b[A-Z]\)? (?:is|are|could|might|may)(?: be| also| the| even| only)* ?"
    r"(?:correct|right|possible|better|best|true)\b|\b(?:maybe|else|perhaps|good as|no:) \(?[A-Z]\b"
)
_NOT_OTHER = re.compile(
    r",? ?\(?\b(?:(?:and )?not|rather than|instead of) (?:option )?\(?[A-Z]\b\)*"
)
_VALUE = re.compile(r"\s*\((?![^()]*\b(?:not|but|maybe|or|if|[A-Z])\b)[^()]*\)\W*\Z")
_ANOTHER = re.compile(r"(?<![\w'’^+\\])(?:[B-HJ-Z]|A(?! [a-z]))(?![\w'’=^+])")
_VERB = re.compile(
    r"\W*(?:is|are|was|were|can|cannot|can['’]t|could|do|does|did|has|have|had|would|may|might|must"
    r"|will|should|isn['’]t|aren['’]t|not|nor|or|and|but|wrong|incorrect|false|falsch|ist|est|es"
    r"|nicht|o|y|ou|oder|und|et|vs|through|to)\b"
    r"|\s*(?:[+*^<>/&或和か與与到不]|でな|では|가 아|이 아)",
    re.IGNORECASE,
)
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
