"""The form of a completion: its thoughts and tags, the part that states its answer, its shape."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import regex

THOUGHTS = frozenset(
    {"think", "thinking", "thought", "thoughts", "reason", "reasoning", "scratchpad", "seed:think"}
)
"""Names of tags around thoughts: `<think>`, `[THINK]`, `<|begin_of_thought|>`. A tag that the chat
template opens is one as well, unless it is named after an answer."""
ANSWER_NAME = (
    r"(?:(?:my|the|final|correct)[ _-]?)?(?:answer|ans|result|solution|output|response)s?|final"
)
"""Names of tags around an answer, for a pattern that ignores case."""
_ANSWER = re.compile(rf"{ANSWER_NAME}|code|python", re.IGNORECASE)
_TAG = re.compile(
    # In quotes or backticks a tag is mentioned, not used.
    r"(?<![\w`])[rbfRBF]?([\"'`])[^\n\"'`<[]{0,20}[<[]/?[\w:.-]+[]>][^\n\"'`]{0,60}\1(?![\w`])"
    r"|[<[]\|?(/ ?|(?:begin|start|end)_(?:of_)?)?([\w:.-]+?) ?\|?[]>]",
    re.IGNORECASE,
)
# gpt-oss writes its thoughts and its answer on two channels.
_CHANNEL = re.compile(r"<\|channel\|>(final)?[^<>]*(?:<\|constrain\|>\w*)?(?:<\|message\|>)?")
# Kimi and MedGemma write tags of their own around thoughts.
_OWN = re.compile(r"◁(/)?think▷|<unused9(?:4>thought\b|(5)>)")
_BARE_CHANNEL = re.compile(r"\s*analysis(?:.*assistant(final)|(?=[A-Z]).*)", re.DOTALL)
_OPENS = {"}": "{", "]": "[", ")": "("}


def opened(opening: str) -> str:
    """The text that a chat template puts before a completion, if it leaves a tag open; else ""."""
    return opening if _tags(opening)[1] else ""


def begun_tag(text: str) -> str:
    """The tag around thoughts or an answer that a text ends on, as a prompt of plain text may."""
    found = re.search(r"<([\w:.-]+)>\s*\Z", text[-80:])
    known = found and (found[1].lower() in THOUGHTS or _ANSWER.fullmatch(found[1]))
    return found[0] if found and known else ""


def answer_part(text: str, opening: str = "") -> str | None:
    """What follows the last thought of a completion; None if one is open at its end.

    `opening` is the text that the chat template put before it (`Prompt.opening`).
    """
    begun = opened(opening)
    whole = _on_tags(text if text.startswith(begun) else begun + text)
    names = THOUGHTS | {name for name in _tags(begun)[1] if not _ANSWER.fullmatch(name)}
    end, unclosed = _tags(whole, names)
    return None if unclosed else whole[end:]


def _on_tags(text: str) -> str:
    """The tags and channels of some models as `<think>`, also if gpt-oss's special tokens were
    dropped from the text."""
    text = _OWN.sub(lambda m: "</think>" if any(m.groups()) else "<think>", text)
    text = _CHANNEL.sub(lambda m: "</think>" if m[1] else "<think>", text)
    bare = _BARE_CHANNEL.match(text)
    return text if bare is None else f"<{'/' * bool(bare[1])}think>{text[bare.end() :]}"


def _tags(text: str, names: frozenset[str] | None = None) -> tuple[int, dict[str, str]]:
    """Where the last closing tag ends, of these names or any, and the tags that are left open.

    A model may repeat the tag that its template opened, so that a name is open only once.
    """
    end = 0
    found: dict[str, str] = {}
    for tag in _TAG.finditer(_on_tags(text) if names is None else text):
        name = (tag[3] or "").lower()
        before = (tag[2] or "").lower()
        if not name or (tag[0][0] == "[" and not tag[3].isupper()) or name not in (names or [name]):
            continue
        if tag[0][1] == "|" and name not in THOUGHTS and not before.endswith("of_"):
            continue  # a special token, as <|im_start|>
        if not before.startswith(("/", "end")):
            found.setdefault(name, tag[0])
        elif name in found or not found:
            end = tag.end()
            while found and name in found:
                found.popitem()
    return end, found


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop strings in it.

    One that closes a tag or bracket of the text is part of it: with `stop = ["</answer>"]`, the
    text `<answer>25</answer>` is whole.
    """
    found = [(at, -len(one)) for one in stop if one and (at := text.find(one)) >= 0]
    if not found:
        return text
    at, size = min(found)
    before, first = text[:at], text[at : at - size]
    closing = first.strip()
    opens = _OPENS.get(closing) or (f"<{closing[2:]}" if closing.startswith("</") else "")
    part = opens and before.count(opens) > before.count(closing)
    return before + first if part else before


SECONDS = 5
"""Of computing, that a search of one text may take; one that may backtrack takes far longer."""


_BLANKS = "\u2800\u3164\u115f\u1160\uffa0\u034f"
"""Characters that show nothing and are not spaces."""


def matches(pattern: str, texts: Sequence[str]) -> list[bool | None]:
    """Whether a regular expression is found in each text, less the blanks around it.

    `^` and `$` are the ends of the text, and `.` matches newlines too. None of a text for which the
    search takes more than SECONDS. Raises re.error for a pattern that is not valid.
    """
    re.compile(pattern, re.DOTALL)
    try:
        search = regex.compile(pattern, regex.DOTALL).search
    except regex.error as error:
        raise re.error(str(error)) from None
    found: list[bool | None] = []
    for text in texts:
        try:
            found.append(search(text.strip(), timeout=SECONDS) is not None)
        except TimeoutError:
            found.append(None)
    return found


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Whether the text is `<a>…</a><b>…</b>…`: each tag once, in order, with something in each and
    nothing but blanks between.

    So `tags = ("think", "answer")` asks for `<think>…</think> <answer>…</answer>`.
    """
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
            return False
        content, found, rest = rest.removeprefix(opening).partition(closing)
        if not found or not any(c.isprintable() and c not in _BLANKS for c in content if c.strip()):
            return False
        rest = rest.lstrip()
    return not rest


def tag_content(text: str, tag: str) -> str | None:
    """What stands in the last complete `<tag>…</tag>`, less the blanks around it; None without."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    if end < 0 or start < 0:
        return None
    return text[start + len(tag) + 2 : end].strip()


def normalise(text: str) -> str:
    """Case folded, composed (NFKC), runs of blanks as one, without full stops at the end.

    Characters whose place is a meaning (`²`, `½`, `①`, `㎡`) stay: `3²` is not `32`.
    """
    return " ".join(_composed(_composed(text).casefold()).split()).rstrip(" .")


_PLACED = re.compile("<(?:super|sub|fraction|circle|square)>")


def _composed(text: str) -> str:
    def form(c: str) -> str:
        placed = _PLACED.match(unicodedata.decomposition(c))
        return c if placed else unicodedata.normalize("NFKC", c)

    return unicodedata.normalize("NFC", "".join(map(form, text)))


def same_text(a: str, b: str, *, normalised: bool = False) -> bool:
    """Whether two texts are equal: less the blanks around them, or `normalised`."""
    return normalise(a) == normalise(b) if normalised else a.strip() == b.strip()


# Scripts that put no blanks between words: each character of theirs is a unit.
_UNBROKEN = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNIT = re.compile(f"[{_UNBROKEN}\U00020000-\U0003ffff]|[^\\s{_UNBROKEN}\U00020000-\U0003ffff]+")


_RUN = re.compile(r"(\S{1,32}?)\1{2,}")
_PLAIN_RUN = 64
"""Characters of a run of digits or signs, as in a number or the border of a table, that is one."""


def units(text: str) -> list[str]:
    """The words of a text, case folded: what blanks part; in scripts without them, characters.

    A run without blanks (`hahaha`) is as many words as it has repetitions.
    """
    return _UNIT.findall(_RUN.sub(_spread, text.casefold()))


def _spread(run: re.Match[str]) -> str:
    unit = run[1]
    plain = unit.isascii() and not any(map(str.isalpha, unit)) and len(run[0]) <= _PLAIN_RUN
    return run[0] if plain else f" {unit}" * (len(run[0]) // len(unit)) + " "


def repeated_share(text: str, n: int) -> float:
    """1 − (distinct n-grams) / (n-grams) of a text's words, in [0, 1); 0 if it has none.

    The measure of the repetition penalty in arXiv 2502.03373, as a share.
    """
    words = units(text)
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
