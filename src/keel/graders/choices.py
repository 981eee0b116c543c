"""The option of a multiple-choice question that a text settles on.

A label (`D`, `(D)`, `D) 14`) counts if a statement leads to it and nothing but the option's
text, a reason or `is correct` follows. All else is not a choice: two labels, a denied one, a list.
"""

from __future__ import annotations

import re

from keel.graders.answers import LONGEST, WITHDRAWN, final_answer, sentences, stated_part
from keel.graders.numbers import plain

LABELS = 40
"""Labels in a sentence, at the most."""

_DRESS = re.compile(
    r"\\(?:text(?:bf|rm|it)?|math(?:bf|rm|sf)|mbox|bm|boldsymbol|left|right|quad|qquad)(?![a-z])"
    r"|\\[()\[\],;:!]|[$*`~{}\"“”]|(?<![A-Za-z])_|_(?![A-Za-z])|^[ \t]*(?:[-•>]|#+)[ \t]+",
    re.MULTILINE,
)
_LABEL = re.compile(
    r"(?<![A-Za-z0-9'’^+])(?:[(\[【「]{1,3}\s?([A-Za-z])\s?[)\]】」]{1,3}|([A-Za-z])(?![A-Za-z0-9'’=^+]))"
)
_NOUN = (
    r"(?:answer|option|choice|letter|solution|statement|antwort|lösung|réponse|respuesta|opción|opcion"
    r"|risposta|resposta|答案?|选项|選項|选择|答え|正解|解答|選択肢|정답|답은?|ตอบ(?:ที่ถูกต้อง)?|ข้อ)"
)
_LEADS = re.compile(
    rf"(?:{_NOUN}(?: (?:correcte|correcta|richtige|here|to this question))?\s*"
    r"(?:(?:is|(?:would|must|should|will|has to) be|lautet|ist|est|es|sería|[èé]|คือ"
    r"|[是为為は은는=:–—-])\s*)*"
    rf"(?:(?:(?:the|la|el|die|correct|right|best) |l['’])*(?:{_NOUN}\s*)?:?\s*)?"
    r"|\b(?:choose|pick|select|go with|chose|elijo|wähle|choisis)\s+(?:the )?"
    r"|[→⇒]\s*|\b(?:also|somit|daher|damit) ist\s+|(?<!不)[选選][择擇]?\s*:?\s*"
    r"|\b(?:it|this|that|which|correct|right|richtig|correcta?)"
    rf"(?:['’]s| is| must be| ist| es| est)\s*(?:(?:the )?{_NOUN}\s*)?"
    r"|(?:^|(?P<clause>,) )(?:so|thus|therefore|hence|only|also|and|,|\s)*)\Z",
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
    r"|fits)\b|です|でした|だ|である|が正解|が正しい|입|이다|选项|正确|是正确|是对的|是正確|ครับ|ค่ะ",
    re.IGNORECASE,
)
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
        return _in(marked.text, question, whole=True) or None
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
            return None if not letter or several or back else letter
    return None


def _in(sentence: str, question: str, *, whole: bool = False) -> str | None:
    """The letter that a sentence settles on; "" for several or none of those named, None for none.

    A mark is a statement as a `whole`.
    """
    sentence = _DRESS.sub("", sentence).strip().rstrip(".!。 ")
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
        if led["clause"] and not _RIGHT.match(tail.lstrip()):
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
    if not tail.strip(" .,;:!)'\"」】"):
        return True
    if small and not bracketed and tail[0] != ")":
        return False
    if _REASON.match(tail) or _RIGHT.match(tail.lstrip()):
        return True
    head = _REASON.split(tail, maxsplit=1)[0]
    if _VERB.match(tail) or _OTHER.search(head):
        return False
    return bracketed or re.match(r"[).:,;–—]|\s+[-–—]\s", tail) is not None
