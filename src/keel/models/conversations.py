"""Whole conversations as tokens: which of them the assistant itself wrote, in each of its turns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from keel.models.chat import ChatEncoder
from keel.models.text import QUESTIONS
from keel.platform.time_limit import Hung
from keel.types import KeelError, Message, Tools, text_of

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
"""The tags of a template around what the assistant itself writes, as transformers reads them."""
_BEGIN, _END = "\U000f8001", "\U000f8002"
"""Stand for those tags in what a template writes."""
_NUMBERED = re.compile("\U000f8000([0-9]+)\U000f8000")
"""Stands for the words of a message by its number."""


class ConversationEncoder(ChatEncoder):
    """A `ChatEncoder` that finds the turns of the assistant in a conversation."""

    def turns(
        self, messages: Sequence[Message], name: str, tools: Tools = ()
    ) -> list[tuple[list[int], bool]]:
        """The conversation as the template writes it, in segments of tokens; those that the
        assistant itself wrote, one a turn, are true.

        A turn is what stands between `{% generation %}` and `{% endgeneration %}`. In a template
        without them, it is what follows the header that a prompt ends with, up to the control token
        that closes it. Every segment has its own tokens, as in a conversation that is sampled turn
        by turn. Raises KeelError if the turns cannot be separated from the rest.
        """
        masked = [
            self._masked(turn, self._control if turn["role"] == "assistant" else self._special)
            for turn in messages
        ]
        pieces = self._tagged(masked, name, tools) or self._cut(masked, name, tools)
        _check_calls(messages, pieces[1::2], name)
        segments = list[tuple[list[int], bool]]()
        stripping = tuple(self._strips[1])
        for at, piece in enumerate(pieces):
            if at and pieces[at - 1].endswith(stripping):
                piece = piece.lstrip()
            if piece:
                tokens = self._encode(piece, name, continues=bool(segments))
                segments.append((tokens, at % 2 == 1))
        return segments

    def _tagged(
        self, messages: Sequence[Mapping[str, Any]], name: str, tools: Tools
    ) -> list[str] | None:
        """What the template writes, cut at its tags: every second piece is the assistant's. None if
        it has no tags."""
        template = self.template_kwargs.get("chat_template")
        if template is None and getattr(self.tokenizer, "chat_template", None):
            template = self.tokenizer.get_chat_template(tools=list(tools) or None)
        if _GENERATION.search(str(template)) is None:
            return None

        def marked(tag: re.Match[str]) -> str:
            mark = _END if tag[2] else _BEGIN
            # As a block, so that blanks around it go where they go around the tag itself.
            return f'{{%{tag[1]} if true %}}{{{{ "{mark}" }}}}{{% endif {tag[3]}%}}'

        own: dict[str, Any] = {"chat_template": _GENERATION.sub(marked, str(template))}
        text = self._render(messages, name, tools, generate=False, keywords=own)
        return re.split(f"[{_BEGIN}{_END}]", text)

    def _cut(self, messages: Sequence[Mapping[str, Any]], name: str, tools: Tools) -> list[str]:
        """What the template writes, cut where turns of the assistant begin and end."""
        text = self._render(messages, name, tools, generate=False)
        others = [
            {**turn, "content": f"\U000f8000{at}\U000f8000"}
            if turn["role"] != "assistant" and text_of(turn)
            else turn
            for at, turn in enumerate(messages)
        ]
        frame = _NUMBERED.split(self._render(others, name, tools, generate=False))
        pieces, known = self._own_words(frame[0]), len(frame[0])
        for number, between in zip(frame[1::2], frame[2::2], strict=True):
            words = _as_shown(text, known, text_of(messages[int(number)]), between)
            first, *found = self._own_words(between)
            pieces = [*pieces[:-1], pieces[-1] + words + first, *found]
            known += len(words) + len(between)
        turns = sum(turn["role"] == "assistant" for turn in messages)
        if "".join(pieces) != text or len(pieces) != 2 * turns + 1:
            raise KeelError(
                f"{name}: what the assistant writes cannot be separated from the rest of the chat "
                "template: set model.chat_template to one with {% generation %} around it, or "
                'loss_on = "all"'
            )
        return pieces

    def _own_words(self, text: str) -> list[str]:
        """A part of a conversation without words of others, cut where the assistant's begin and
        end."""
        pieces, place = list[str](), 0
        while self._header and (start := text.find(self._header, place)) >= 0:
            start += len(self._header)
            if self.opening and text.startswith(self.opening, start):
                start += len(self.opening)
            end = self._control.search(text, start)
            if end is None:
                break
            pieces += [text[place:start], text[start : end.end()]]
            place = end.end()
        return [*pieces, text[place:]]

    @cached_property
    def _header(self) -> str:
        """What the template writes before the assistant's words: what it adds for generation, or
        else all that follows a question; empty if it shows neither."""
        for turns in QUESTIONS:
            try:
                without = self._render(turns, "a probe", (), generate=False)
                asked = self._render(turns, "a probe", (), generate=True)
            except Hung:
                raise
            except KeelError:  # some templates need a system message
                continue
            asked = asked.removesuffix(self.opening)
            added = asked[len(without) :] if asked.startswith(without) else ""
            return added or asked.rpartition(text_of(turns[-1]))[2]
        return ""


def _check_calls(messages: Sequence[Message], own: Sequence[str], name: str) -> None:
    """Raise KeelError if the template writes a turn of the assistant without its tool calls."""
    turns = [turn for turn in messages if turn["role"] == "assistant"]
    for turn, text in zip(turns, own, strict=False):
        for call in turn.get("tool_calls") or ():
            called = str(call.get("function", call).get("name", ""))
            if called not in text and json.dumps(called)[1:-1] not in text:
                raise KeelError(
                    f"{name}: the chat template does not write tool_calls ({called[:60]}): set "
                    "model.chat_template to one that does, or write the calls into the content"
                )


def _as_shown(text: str, start: int, words: str, after: str) -> str:
    """The words of a message as a template shows them: as they are, without blanks at the ends, or
    as JSON; empty if they are not followed by `after`."""
    forms = (words, words.strip(), words.rstrip(), words.lstrip(), json.dumps(words)[1:-1])
    also = json.dumps(words, ensure_ascii=False)[1:-1]
    shown = (one for one in (*forms, also) if text.startswith(one + after, start))
    return next(shown, "")
