"""The part of a completion that states its answer: without thoughts and the tags around it."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
