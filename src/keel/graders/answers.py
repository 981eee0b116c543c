r"""The final answer of a text that works towards one.

In order: the last mark (`\boxed{…}` or a line `#### …`), else the last statement ("the answer is
…", "Answer: …"), else what the last sentence concludes. The end of a text alone is read, and no
pattern takes more than some tenths of a second for it, whatever it holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from keel.graders.equations import last_formula, may_be_equated, stands_for
from keel.graders.formats import tag_content
from keel.graders.numbers import (
    FORMULA,
    Number,
    bare,
    closing,
    continues,
    name_of,
    number_in_prose,
    plain,
    read_number,
    side_fits,
    spaced,
    word_set,
)
from keel.graders.stated import ANSWER_NAME
from keel.graders.surroundings import DOUBTED, UNBROKEN, WORD, leads, may_follow, may_precede

TAIL = 16_384
"""Characters at the end of a text in which its answer stands; what is before them is not read."""
LONGEST = 4000
"""Characters of a statement, or of the last sentence, that are looked at."""

_BOX = re.compile(r"\\(?:boxed|fbox) ?(?=\S)")
_BETWEEN = re.compile(
    r"(?:[\s$,;.*&|/-]|^[^\w\n]{0,16}\d{1,3}[.)]|\\[\[\]() ,;:]|\\(?:text|quad|qquad|\\)|[{}~]"
    r"|\b(?:and|or|either|maybe|perhaps|possibly|also|alternatively|else|otherwise)\b)*+",
    re.MULTILINE,
)
_TAG = re.compile(
    rf"(?:<\|?|\[(?=(?-i:[A-Z_ -]+)\]))(?:begin_of_|start_)?({ANSWER_NAME}) ?\|?[>\]]"
    r"((?:(?![<\[]\|?\1).)*?)(?:[<\[](?:\|?/|\|end_(?:of_)?) ?\1 ?\|?[>\]]|(\Z))",
    re.IGNORECASE | re.DOTALL,
)
_REFUSED = re.compile(
    r"[ \t]*[-−+*/^×÷][ \t]*[\d$(\\]|\W*(?:is|was) (?:not|wrong|incorrect|false)\b"
)
_FORMATTING = re.compile(
    r"\[asy\].*?(?:\[/asy\]|\Z)|</?(?:b|i|em|strong|u|p|span|center|div|br) ?/?>", re.DOTALL
)
_END_OF_TEXT = re.compile(
    r"(?:</s>|<eos>|<end_of_turn>|\[/?INST]|<\|[\w ]{1,40}\|>|#{3,}|\n(?:Q|Question|User|Human):)\Z"
)
_JOINED = re.compile(r"\d|[.!^]\S|[A-Za-z](?![A-Za-z])")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_TITLE = re.compile(r"^[ \t]*+#++([^\n]*+)$", re.MULTILINE)
_NUMBERED = re.compile(
    r"\W*(?:step|part|case|section|question|problem|example|method|approach|phase|stage|exercise"
    r"|task|option|iteration|attempt|day|chapter)\b[^\n]{0,12}(?:\d|\b[IVXA-D]+\b|\()"
    r"|\(?(?:\d+|[ivxIVX]+|[a-zA-Z])[.):] ?\s*\S*[A-Za-z]{2}",
    re.IGNORECASE,
)
_HEADING = re.compile(
    r"(?:[a-z]+ ){0,3}(?:answers?|solutions?|results?|conclusion|final|summary|check|verification"
    r"|explanation|introduction|calculations?|analysis|reasoning|given|note|notes|recap|overview)"
    r"(?: [a-z]+){0,2}",
    re.IGNORECASE,
)
_LABEL = re.compile(r"(?=[^:\n]{0,60}[A-Za-z]{2})([^:\n\\$={}]{1,60}):(?!\d)(.*)", re.DOTALL)
_SAYS = re.compile(
    r"\banswers?\b[^\n.?!:=]{0,80}?"
    r"(?:\s*[:=]\s*|\s(?:is|are|was|be|equals|becomes)\b\s*:?\s*)"
    r"|^[ \t>*_#-]*(?:the )?(?:final )?answers?[ \t*_]*$"
    r"|^[ \t*_]*A:[ \t*_]*"
    r"|\b(?:antwort|ergebnis|lösung|réponse|respuesta|risposta|resposta)\b[^\n.?!:=]{0,40}?"
    r"(?:\s*[:=]\s*|\s(?:ist|lautet|est|es|è|é)\b\s*:?\s*)"
    r"|(?:答案?|答え|正解|정답|답|ตอบ(?:ที่ถูกต้อง)?)[^\n.?!:=]{0,4}?(?:[:=】\]是为為は은는]|คือ)\s*,?\s*",
    re.IGNORECASE | re.MULTILINE,
)
_LEADS_TO_ANSWER = word_set(
    "so thus hence therefore then now and the my our this your final correct right exact it to "
    "numerical actual overall complete required desired simplified short we i you get have find in "
    "found conclude see know that which gives give means is are as finally can say write here "
    "follows let box believe think with arrive at reach obtain makes answer question problem"
)
"""Words before "answer" that leave the statement as it is."""
_CHANGED_ANSWER = re.compile(
    r"(?<!question )(?<!problem )(?<!part )\d|\b(?:plus|minus|times|divided|multiplied|squared"
    r"|cubed|doubled|tripled|halved|mod|modulo|without|before|different|first|given)\b",
    re.IGNORECASE,
)
_END = re.compile(r"(?<!\\)[.!?]['\"”)*_]*(?=\s(?! *=)|\Z)|\n")
_ABOVE = re.compile(r"(?<!\s)[^\S\n]*+\n\s*+(?=\\\[|\$\$)")
_AROUND = re.compile(r"[\s*_]*+")
_SYMBOL = re.compile(r"[\d$\\]")
_CALCULATION = re.compile(r"<<[^<>]*>>")
_DELIMITERS = re.compile(r"\\[()\[\]]|\*\*|__")
_COMMAND = re.compile(r"\\(?:text|mbox|mathrm) ?\{[^{}]*\}|\\[A-Za-z]+(?:\{[a-z]*matrix\})?")
_BEING = re.compile(
    r"\b(?:is|are|was|were|be|equals?|gets?|has|have|makes?|earns?|pays?|needs?|costs?|takes?)\b"
)
_VAGUE = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|either|neither|between|alternatively|not|than|at least"
    r"|at most|except|without|unless|whose|anything|no longer|coprime)\b|n't\b"
    r"|[<>]|\\[lg]eq?\b|\\ne\b|\\pm\b",
    re.IGNORECASE,
)
_START = re.compile(r"(?<!\^)(?<!\^\{)[-+]?(?:\b(?:US|CA|AU))?\\?[$€£¥₹]?-?(?:\.?\d|\\[dt]?frac)")
_DISPLAY = re.compile(r"(?:[*_\s]|\$(?=\$))*+(?:\\\[.*?\\\]|\$\$.*?\$\$)", re.DOTALL)
_EXPLAINS = re.compile(
    r",? (?:because|since|given|as (?!of)|where)\b[^,]*\Z|,? because\b.*|\s\((?!or\b)[^()]*\)\W*\Z",
    re.DOTALL | re.IGNORECASE,
)
_NOT_ANOTHER = re.compile(r", (?:and )?not\b[^,]*\Z")
_CLAUSE = re.compile(
    rf"[,;](?=[\s{UNBROKEN}])|\s(?=(?:so|thus|hence|therefore|which|making|giving|leaving|meaning)\b)",
    re.IGNORECASE,
)
_LISTED = re.compile(r"[,;](?: +\d| *(?![A-Za-z]{2})[^\s\d]| *\w+\W*\Z)(?!\d{3}\b)")
_RELATIVE = re.compile(r"\b(?:who|that|which)(?: \w+)? ?(?:not\b|n['’]t)", re.IGNORECASE)
_CONTRAST = re.compile(
    r"(?:\b(?:is|are|was|were)|['’]s)(?:n['’]t| not) [^,;.]{1,30} but (?:rather )?"
)
_POLITE = re.compile(
    r"\b(?:let me know|feel free|would you like|do you (?:want|need)|hope (?:this|that|it)"
    r"|if you (?:have|need|want)|happy to help)\b|^note\b(?!.*\d)",
    re.IGNORECASE | re.DOTALL,
)
_STRUCK = re.compile(r"~~[^~\n]*~~")
WITHDRAWN = re.compile(
    r"\bwait\b ?[,.!:-]|\b(?:hold on|scratch that|correction|oops|sorry|on second thought"
    r"|on reflection|actually,? (?:no|let me)|let me re(?:comput|calculat|consider|count|do)\w*"
    r"|i (?:made an?|forgot|was wrong|miscalc\w+|misread)|my mistake"
    r"|(?:it|that|this|answer|result|total|value) should (?:be|have been)"
    r"|(?:it|that|this|which|answer|result)(?: is| was|['’]s) (?:wrong|incorrect)"
    r"|(?:it|that|this)(?: is| was|['’]s) not (?:right|correct)"
    r"|(?:can['’]t|cannot|can not) be (?:right|correct)|i disagree|stimmt nicht|falsch|неверно"
    r"|(?:which|but (?:it|that)) (?:is (?:impossible|a mistake|too \w+)|contradicts|fails)"
    r"|(?:that|it) is too \w+|they (?:are|would be) mistaken"
    r"|nein|verrechnet|attendez|trompée?|perdón|equivoqué)\b"
    r"|(?:^|[.!?\n]\s*)no(?:pe)?[,:.]|算错|错了|不对|等等|間違|いや|違い|실수|ผิด",
    re.IGNORECASE,
)
"""What takes back the answer before it."""
_CONCLUDES = re.compile(
    r"(?:^\W*|[,;] |\band )(?:so|thus|hence|therefore)\b|\b(?:which gives|final answer|answer is)\b"
    r"|^\W*answer\W",
    re.IGNORECASE,
)
_TURNS = re.compile(
    r"^\W*(?:and )?(?:or|alternatively|maybe|perhaps|possibly|otherwise"
    r"|however|but|hmm+|actually|edit|update|instead|rather|also|on second"
    r"|recheck\w*|double[- ]check\w*|i meant?|不|否|いえ|아니)"
    r"|\d\W* (?:is|are) (?:also |the |even )?(?:better|correct|right|possible|answer)\b",
    re.IGNORECASE,
)
_ASIDE = re.compile(r"\([A-Z][^()]*\)")
_ALONE = re.compile(r"[^\w(\\]*(?:\s|(?:[^\W\d]+[^\w\\]+){1,2})[\d.,]+\W*")
_PARAGRAPH = re.compile(r"[^\w(\\]*(\d(?:[\d.,]*\d)?)\W*")
_DIGITS = re.compile(r"\d(?:[\d.,]*\d)?")
_ASKS = re.compile(
    r"[?？]|(?:^|[,;:.(}\]]) ?(?:(?:then|and|please|so|now|you) )*"
    r"(?:find|calculate|compute|determine|evaluate|express|simplify|solve|write|enter|round|convert"
    r"|factor|expand|give|state|assume|suppose|let|prove|show|list|define|consider|note|given|if"
    r"|graph|identify|estimate|describe)\b"
    r"|^(?:how|what|which|who|use|name)\b"
    r"|\b(?:how (?:many|much|long|far|old|tall|fast)|what (?:is|was|will|are)|your answer"
    r"|need to (?:find|compute))\b",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"(?:indeed |also |therefore )?(?:correct|right|reasonable|valid|verified|confirmed|sensible"
    r"|clear|exact|as expected|consistent)\b",
    re.IGNORECASE,
)
_CONSEQUENCE = re.compile(
    r"\b(?:so|thus|hence|therefore|giv(?:es?|ing)|means|get|obtain)\b", re.IGNORECASE
)
_RESULT = re.compile(r":[^:A-Za-z=\\]*=[^A-Za-z]*\d")


_Mark = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a text ends on, and how it is set off: by a mark, a statement, or not at all."""

    text: str
    how: Literal["marked", "stated", "last"]


def final_answer(text: str, *, words: bool = False, trusted: bool = False) -> Answer | None:
    """The answer that a text ends on; None if it ends on none, or names several in turn.

    A last sentence without numbers or formulas is passed over, unless the answer is `words`. Where
    the text is `trusted`, as a worked solution is, what stands around a mark is not looked at.
    """
    text = plain(text[-TAIL:]) if trusted else stated_part(text)
    mark = max(
        filter(None, (_in_a_row(text, one(text)) for one in (_boxed, _hashed))), default=None
    )
    if mark is not None:
        start, end, answer = mark
        apart = trusted or not (
            _taken_back(text, end, answer)
            or (
                text[start] == "\\"
                and not (
                    may_precede(text[:start])
                    and may_follow(text, end, answer)
                    and may_be_equated(text[:start], answer)
                )
            )
        )
        return Answer(answer, "marked") if answer and apart else None
    stated = _stated(text, words)
    if stated is not None:
        start, end, answer = stated
        if not answer or WITHDRAWN.search(text, start) or _taken_back(text, end, answer):
            return None
        if _SYMBOL.search(answer) or len(answer.split()) < 6:
            return Answer(answer, "stated")
    last = _last(text, words)
    return Answer(last, "last") if last else None


def stated_part(text: str) -> str:
    """The end of a text, plain, or what is in the tag that states its answer (see `tagged`)."""
    text = _FORMATTING.sub(" ", _STRUCK.sub(" ", plain(text[-TAIL:]))).rstrip()
    while ending := _END_OF_TEXT.search(text[-60:]):
        text = text[: len(text) - len(ending[0])].rstrip()
    for _ in range(3):  # tags in tags
        inside = tagged(text)
        if inside is None:
            break
        text = inside
    return text


def tagged(text: str) -> str | None:
    """What is in the last `<answer>…</answer>` or such, which the end of the text may close.

    None without one, and "" if what stands around it takes it back or makes it an operand.
    """
    every = reversed(list(_TAG.finditer(text)))
    # In quotes, a tag that is not closed or is empty is mentioned, not used.
    found = (
        one
        for one in every
        if text[max(one.start() - 1, 0)] not in "`\"'" or (one[3] is None and one[2].strip())
    )
    mark = _in_a_row(text, ((one.start(), one.end(), one[2]) for one in found))
    if mark is None:
        return None
    start, end, inside = mark
    changed = (
        _JOINED.match(text, end)
        or continues(text[end:], marked=True)
        or not may_precede(text[:start])
    )
    return "" if changed or _taken_back(text, end, inside) else inside


def in_tag(text: str, tag: str) -> str | None:
    """What is in the last `<tag>…</tag>`; None without one, or if it is an operand."""
    inside = tag_content(text, tag)
    before, _, rest = text.rpartition(f"</{tag}>")
    before = before.rpartition(f"<{tag}>")[0]
    changed = _JOINED.match(rest) or _REFUSED.match(rest) or not may_precede(before)
    return None if changed else inside


def _taken_back(text: str, end: int, answer: str) -> bool:
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
    return _concluded(sentence, evaluated)


def shortened(answer: str) -> str:
    """A statement less the clause after its number that explains it: `18, because 9 + 9 is`."""
    found = _EXPLAINS.search(answer)
    return answer[: found.start()] if found and _SYMBOL.search(answer[: found.start()]) else answer


def _concluded(sentence: str, evaluated: bool) -> Number | None:
    """The number that a sentence comes to.

    It is in the last clause with a number, after its last `=` or else verb of being. Candidates in
    turn (`4 or 3`; `4, 3`) are not an answer.
    """
    sentence = _CONTRAST.sub("is ", sentence)
    sentence = shortened(_DELIMITERS.sub("", spaced(sentence).replace("\\approx ", "= ")))
    before, equals, after = sentence.rpartition("=")
    if not equals:
        return _in_last_clause(sentence, evaluated)
    first, *others = re.split("=", _CONSEQUENCE.split(before)[-1])
    found = _in_last_clause(after, evaluated)
    if (
        found is None
        or DOUBTED.search(re.split("[,;] ", first)[-1])
        or re.search(r"\b(?:or|not|either|n't)\b|[<>]", before, re.IGNORECASE)
    ):
        return None
    if not all(side_fits(one, found, 1) for one in others):
        return None  # x = 4, y = 3
    side = last_formula(first)
    if not stands_for(side, found):
        return None
    words = side.replace("$", " ").split()
    return replace(found, name=name_of(words[-1]) if words else "")


def _in_last_clause(words: str, evaluated: bool) -> Number | None:
    clauses = _CLAUSE.split(words)
    numbered = [at for at, clause in enumerate(clauses) if re.search(r"\d", clause)]
    if not numbered:
        return None
    clause = clauses[numbered[-1]]
    earlier = "".join(clauses[: numbered[-1]])
    if re.match(r"[\s$]*(?:(?:and|or|also) )?[$(-]*[\d.]", clause) and _SYMBOL.search(earlier):
        return None  # a list: 4, 3
    if re.match(r"\s*which\b", clause) and (number := _in_last_clause(earlier, evaluated)):
        said = _in_last_clause(clause.replace("which", "that", 1), evaluated)
        return said or number
    found: list[tuple[int, int, Number | None]] = []
    at = 0
    while start := _START.search(clause, at):
        at, number = number_in_prose(clause, start.start(), evaluated=evaluated)
        ahead = clause[: start.start()]
        if ahead and not (re.search(rf"[ $(:{{~{UNBROKEN}]\Z", ahead) and leads(ahead)):
            number = None
        found.append((start.start(), at, number))
    if not found or _VAGUE.search(_RELATIVE.sub(" ", clause[: found[-1][0]])):
        return None
    numbers = found
    for verb in reversed(list(_BEING.finditer(clause))):
        if numbers := [one for one in found if one[0] >= verb.end()]:
            break
    numbers = numbers or found
    first, last = numbers[0], numbers[-1]
    if "\\" in clause[: first[0]]:
        return None
    direct = numbers is not found or not clause[: first[0]].strip(" $({")
    if not direct and first is not last:
        return None  # `$18 a day for 5 days`: which of them is not stated
    return first[2]


def _in_a_row(text: str, marks: Iterable[_Mark]) -> _Mark | None:
    """The last mark: where it starts, where it ends, what is in it. Marks in a row are a list."""
    found: list[_Mark] = []
    for start, end, content in marks:
        if found and not _BETWEEN.fullmatch(text, end, found[-1][0]):
            break
        found.append((start, end, content.strip()))
    if not found:
        return None
    return *found[0][:2], ", ".join(dict.fromkeys(content for *_, content in reversed(found)))


def _boxed(text: str) -> Iterator[_Mark]:
    """The boxes that hold something, the last first; one that does not close holds no answer."""
    for opening in reversed(list(_BOX.finditer(text))):
        inner = _braced(text, opening.end())
        if inner is None or bare(inner[1]):
            yield opening.start(), *(inner or (len(text), ""))


def only_repeats(text: str, question: str) -> bool:
    """Whether a text of four words or more says nothing but sentences of the question."""
    asked = " ".join(question.casefold().split())
    sentences = [" ".join(one.split()) for one in _END.split(text.casefold())]
    words = sum(len(one.split()) for one in sentences)
    return words >= 4 and all(one in asked for one in sentences)


def _braced(text: str, start: int) -> tuple[int, str] | None:
    """Where braces close, and what is between them; without braces, the next word."""
    if text[start] != "{":
        word = re.compile(r"[^\s$]+").match(text, start)
        return (word.end(), word[0].rstrip(".,;")) if word else None
    end = closing(text, start + 1)
    return None if end < 0 else (end, text[start + 1 : end - 1])


def _hashed(text: str) -> Iterator[_Mark]:
    """The lines `#### …` that are answers, not the headings of what follows, the last first."""
    for found in reversed(list(_HASHES.finditer(text))):
        line = found[1].strip().strip("#").strip()
        if is_heading(line, below=found.end() < len(text)):
            continue
        label = _LABEL.fullmatch(line)
        match = _SAYS.match(line) or (_SAYS.search(line) if label is None else None)
        answer = line[match.end() :] if match else label[2] if label else line
        yield found.start(), found.end(), answer.strip(" *_")


def is_heading(line: str, below: bool) -> bool:
    """Whether a line after `####` is a heading; `below` says that text follows it.

    `Step 1: …` and `2. Compute …` always are. Where text follows, prose is, and a word such as
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


def _stated(text: str, words: bool) -> tuple[int, int, str] | None:
    """Where the last statement of an answer starts and ends, and what it says.

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
            return at, at, ""
        if display := _DISPLAY.match(text, at):
            return at, display.end(), display[0].strip("*_ \n")
        at = _AROUND.match(text, at).end()  # type: ignore[union-attr]
        ending = _END.search(text, at)
        end = ending.end() if ending else len(text)
        answer = text[at:end].strip().strip("*_ ")
        if len(answer) > LONGEST:
            return at, end, ""
        remark = not words and not _SYMBOL.search(shortened(answer))
        if not answer.endswith("?") and not (remark and _REMARK.match(answer)):
            return at, end, answer
    return None


def _of_the_answer(before: str, says: str) -> bool:
    """Whether a statement is of the answer itself: not of twice it, nor of the answer plus 2."""
    noun = re.match(r"answers?\b", says, re.IGNORECASE)
    if noun is None:
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
    if display := re.search(
        r"(?:\\\[|\$\$)((?:(?!\\\[|\$\$).)*)(?:\\\]|\$\$)[.\s]*\Z", text, re.DOTALL
    ):
        return None if _ASKS.search(text[: display.start()].rpartition(". ")[2]) else display[1]
    for sentence, end in reversed(sentences(text)):
        start, sentence = end - len(sentence), sentence.strip().strip("*_# ")
        title = _TITLE.match(text, text.rfind("\n", 0, start) + 1)
        if title and is_heading(title[1], below=False):
            continue
        if _POLITE.search(sentence):
            continue
        asks = _ASKS.search(sentence)
        if asks and ("?" in sentence or not _RESULT.search(sentence, asks.end())):
            return None
        if sentence and (words or _SYMBOL.search(sentence) or not WORD.search(sentence)):
            above = text[:start].rstrip()
            listed = _bare_symbols(sentence) and _bare_symbols(above[above.rfind("\n") + 1 :])
            return None if listed or WITHDRAWN.search(text, max(end - 1, 0)) else sentence
    return None


def sentences(text: str) -> list[tuple[str, int]]:
    """The sentences and lines of a text, and where each ends."""
    ends = [*(found.end() for found in _END.finditer(text)), len(text)]
    return [(text[a:b], b) for a, b in zip([0, *ends], ends, strict=False)]


def formula_of(sentence: str, *, words: bool) -> str | None:
    """The formula, or with `words` the words, that a sentence without a number comes to."""
    sentence = sentence.strip()
    if label := _LABEL.fullmatch(sentence):
        sentence = label[2].strip(" *_")
    if not WORD.search(_COMMAND.sub(" ", sentence)):
        return sentence
    formulas = list(FORMULA.finditer(sentence))
    if not formulas:
        verbs = list(_BEING.finditer(sentence))
        if verbs and not leads(sentence[: verbs[-1].end()]):
            return None
        return shortened(sentence[verbs[-1].end() :].strip()) if verbs else sentence
    outside = FORMULA.sub(" ", sentence)
    last = formulas[-1]
    joined = [last]
    for one in reversed(formulas[:-1]):
        if not _BETWEEN.fullmatch(sentence, one.end(), joined[0].start()):
            break
        joined.insert(0, one)
    if len(joined) == 1 and _VAGUE.search(outside):
        return None
    if not leads(sentence[: joined[0].start()]) or continues(sentence[last.end() :]):
        return None
    lead = sentence[: joined[0].start()].rstrip(" :,")
    if len(joined) < len(formulas) and not re.search(r"(?:\b[a-z]+|=)\Z", lead):
        return None
    after = sentence[last.end() :] if len(joined) == 1 else ""
    return ", ".join(next(g for g in one.groups() if g is not None) for one in joined) + (
        after if words else ""
    )


def _bare_symbols(line: str) -> bool:
    """Whether a line is a number or formula and nothing else: several such lines are a list."""
    return (
        bool(_SYMBOL.search(line)) and "=" not in line and not WORD.search(_COMMAND.sub(" ", line))
    )
