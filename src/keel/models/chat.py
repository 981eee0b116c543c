"""Conversations as tokens, by the tokenizer's chat template.

What is trained is what is served: a prompt ends as `apply_chat_template` ends it for generation, an
answer closes with the template's end of turn, and an environment's reply is a turn of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from keel.graders.formats import begun_tag
from keel.models.text import (
    QUESTIONS,
    common_prefix,
    control_tokens,
    encode_text,
    joins,
    render,
    special_tokens,
)
from keel.models.tokenizer_round_trip import Served, apart, differing
from keel.platform.time_limit import Hung
from keel.types import Content, Group, KeelError, Message, Prompt, Tools, text_of

PROBE = "An answer to close"
"""An answer that no template changes, to find what a template writes around one."""
_MARK = "\U000f8000answer\U000f8000"
"""Stands for words of the assistant's, to find what follows them: no message says it."""
_MASK = 0xF0000
"""First of the private characters that stand for control tokens spelled out in a message."""
_TAG = re.compile(r"[<\[]\w[\w-]*[>\]]")
"""What opens a thought, such as `<think>`."""
_OPEN_AT_END = re.compile(rf"({_TAG.pattern})\s*\Z")


@dataclass(frozen=True, slots=True)
class EncodedAnswer:
    """A prompt and its answer in tokens.

    `prompt` ends where the policy's words begin. The last `closing` tokens of `answer` are what the
    template, or the tokenizer, closes it with; `text` is what stands before them.
    """

    prompt: list[int]
    answer: list[int]
    closing: int
    text: str

    def fit(self, context: int | None) -> list[int]:
        """All tokens, without those of the closing that do not fit the context."""
        tokens = self.prompt + self.answer
        fits = context is not None and len(tokens) - self.closing <= context
        return tokens[:context] if fits else tokens


class ChatEncoder:
    """Messages as tokens.

    With `mask` a special or control token spelled out in a message is ordinary characters; in an
    answer, whose text is the policy's, only a control token is. Methods raise KeelError, with the
    `name` of the example, for what the template or the tokenizer does not take.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        control = control_tokens(tokenizer)
        spelled = sorted({*special_tokens(tokenizer), *control}, key=len, reverse=True)
        self._masks = {text: chr(_MASK + at) for at, text in enumerate(spelled)}
        self._special, self._control = _any_of(self._masks), _any_of(control)
        self._control_ids = frozenset(control.values())

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        name: str,
        tools: Tools = (),
        *,
        mask: bool = False,
        keywords: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The conversation up to where the assistant begins."""
        text = self._render(messages, name, tools, generate=True, mask=mask, keywords=keywords)
        return self._encode(text, name)

    def answered(
        self,
        messages: Sequence[Message],
        answer: str,
        name: str,
        tools: Tools = (),
        *,
        mask: bool = True,
    ) -> EncodedAnswer:
        """The answer after the prompt that the policy is given, up to the end of its turn.

        The tokens are those of `apply_chat_template` for the conversation with the answer, less
        what follows the end of the turn. If the prompt opens a thought, and the answer begins with
        it or closes it, they are the prompt's and the rest of the answer's: templates drop the
        thoughts of a turn that is over.
        """
        asked = self._render(messages, name, tools, generate=True)
        parts = self._around(messages, name, tools)
        head, tail = parts or ("", "")
        ending, rest = self._ending(tail), self._continuation(answer)
        if parts is None or rest is not None:
            return self._continued(asked, answer if rest is None else rest, ending, name, mask)
        text = self._whole(messages, answer, name, tools, mask).removesuffix(tail)
        start = text[: common_prefix(text, head)] if self.opening else asked
        start = asked if text.startswith(asked) else start
        own = self._unmasked(text[len(start) :]) if text.startswith(start) else answer
        if ending and text.startswith(start):
            prompt, tokens = self._encode(start, name), self._encode(text + ending, name)
            if tokens[: len(prompt)] == prompt:  # else a token is of both
                answer_tokens, closing = tokens[len(prompt) :], self._encode(ending, name, True)
                return EncodedAnswer(prompt, answer_tokens, len(closing), own)
        return self._continued(start, own, ending, name, mask)

    def whole(
        self, messages: Sequence[Message], answer: str, name: str, tools: Tools = ()
    ) -> EncodedAnswer | None:
        """The conversation with its answer, as `apply_chat_template` writes it.

        None if the template is of prompts only: it does not show the assistant's turn.
        """
        parts = self._around(messages, name, tools)
        if parts is None:
            return None
        tokens = self._encode(self._whole(messages, answer, name, tools, True), name)
        start = min(len(self.prompt(messages, name, tools)), len(tokens) - 1)
        closing = len(self._encode(parts[1], name)) if parts[1] else 0
        return EncodedAnswer(tokens[:start], tokens[start:], closing, answer)

    def after(
        self,
        messages: Sequence[Mapping[str, Any]],
        known: int,
        last: int,
        name: str,
        tools: Tools = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens between the assistant's message `known - 1` and its next.

        They are the end of its turn (unless `last`, the last token that it wrote, is that) and the
        messages from `known` on, masked, with the header of the assistant's turn.
        """

        def tail(several: Sequence[Mapping[str, Any]], generate: bool) -> str:
            text = self._render(
                several, name, tools, generate=generate, mask=True, keywords=keywords
            )
            head, _, found = text.rpartition(_MARK)
            if not head:
                raise KeelError(f"{name}: the chat template omits the assistant: set another")
            return found

        before = messages[: known - 1]
        closing = tail([*before, Message(role="assistant", content=_MARK)], False)
        probe = {**messages[known - 1], "content": _MARK}
        try:
            start = tail([*before, probe], False)
        except Hung:
            raise
        except KeelError:  # some templates write the calls of a message alone
            probe = _probed_call(probe)
            start = tail([*before, probe], False)
        whole = tail([*before, probe, *messages[known:]], True)
        ends: set[int] = set()
        if not whole.startswith(start):
            # The last turn of all is closed differently: close this one as within a conversation.
            ends = {*self._encode(closing, name)[:1], self.tokenizer.eos_token_id}
            shared = list(self._control.finditer(whole[: common_prefix(whole, start)]))
            found = shared[-1] if shared else self._control.search(whole)
            if found is None:
                raise KeelError(f"{name}: the chat template does not append messages: set another")
            closing, start = whole[found.start() :], whole
        tokens = self._encode(closing + whole[len(start) :], name, True)
        ending = self._ending(closing)
        end = self._encode(ending, name, True) if ending else tokens[:1]
        written = last in {*end[-1:]} | ends and (closing or last in self._control_ids)
        return tokens[len(end) :] if written else tokens

    @property
    def opening(self) -> str:
        """What the template puts at the beginning of the assistant's own words, such as `<think>`;
        empty if it opens nothing."""
        return "" if self._turn is None else _opened(*self._turn[:2])

    @property
    def closing(self) -> tuple[str, int | None]:
        """What the template writes after the assistant's words, up to the first control token, and
        the id of that; all of it and None if there is none."""
        tail = "" if self._turn is None else self._turn[2]
        found = self._control.search(tail)
        if found is None:
            return tail, None
        return self._ending(tail), int(self.tokenizer.convert_tokens_to_ids(found[0]))

    @cached_property
    def _turn(self) -> tuple[str, str, str] | None:
        """A prompt as the template writes it, and what it writes before an answer to it and after;
        None if it shows none, or fails."""
        for turns in QUESTIONS:
            try:
                asked = self._render(turns, "a probe", (), generate=True)
                parts = self._around(turns, "a probe", ())
            except Hung:
                raise
            except KeelError:  # some templates need a system message
                continue
            return None if parts is None else (asked, *parts)
        return None

    def _continuation(self, answer: str) -> str | None:
        """The rest of an answer that begins with the opening, or goes on from it; else None."""
        tag = _TAG.search(self.opening)
        if tag is None:
            return None
        start = self.opening.strip()
        if answer.lstrip().startswith(start):
            after = self.opening[len(self.opening.rstrip()) :]
            return answer.lstrip().removeprefix(start).removeprefix(after)
        closes = f"{tag[0][0]}/{tag[0][1:]}"
        return answer if closes in answer or closes in start else None

    def _around(
        self, messages: Sequence[Message], name: str, tools: Tools
    ) -> tuple[str, str] | None:
        """What the template writes before an answer and after it; None if it shows none."""
        text = self._whole(messages, PROBE, name, tools, False)
        head, probe, tail = text.rpartition(PROBE)
        return (head, tail) if probe else None

    def _ending(self, tail: str) -> str:
        """What closes a turn: up to the first control token; empty if there is none."""
        found = self._control.search(tail)
        return "" if found is None else tail[: found.end()]

    def _whole(
        self, messages: Sequence[Message], answer: str, name: str, tools: Tools, mask: bool
    ) -> str:
        content = self._masked(answer, self._control) if mask else answer
        turns = [*messages, Message(role="assistant", content=content)]
        return self._render(turns, name, tools, generate=False)

    def _continued(
        self, start: str, answer: str, ending: str, name: str, mask: bool
    ) -> EncodedAnswer:
        """The answer's own tokens after those of the text before it, closed."""
        what = f"the answer of {name}"
        own = encode_text(answer, what, self.tokenizer, literal=mask, continues=True)
        end = self._encode(ending, name, True) if ending else end_of_sequence(self.tokenizer)
        return EncodedAnswer(self._encode(start, name), [*own, *end], len(end), answer)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        name: str,
        tools: Tools,
        *,
        generate: bool,
        mask: bool = False,
        keywords: Mapping[str, Any] | None = None,
    ) -> str:
        return render(
            self.tokenizer,
            self._masked(list(messages), self._special) if mask else messages,
            name,
            generate=generate,
            tools=tools,
            template_kwargs={**self.template_kwargs, **(keywords or {})},
        )

    def _masked(self, value: Any, spelled: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return spelled.sub(lambda found: self._masks[found[0]], value)
        if isinstance(value, Mapping):
            return {key: self._masked(inner, spelled) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked(inner, spelled) for inner in value]
        return value

    def _unmasked(self, text: str) -> str:
        return text.translate({ord(mask): spelled for spelled, mask in self._masks.items()})

    def _encode(self, text: str, name: str, continues: bool = False) -> list[int]:
        """The tokens of a rendered text, in which masks are ordinary characters; with `continues`
        it goes on from another."""
        if not any(mask in text for mask in self._masks.values()):
            return encode_text(text, name, self.tokenizer, continues=continues)
        tokens: list[int] = []
        pieces = self._special.split(text)
        for at, piece in enumerate(pieces):
            if at % 2:
                tokens.append(int(self.tokenizer.convert_tokens_to_ids(piece)))
                continue
            before, after = pieces[max(at - 1, 0)], pieces[min(at + 1, len(pieces) - 1)]
            piece = piece.lstrip() if at and before in self._strips[1] else piece
            piece = piece.rstrip() if at + 1 < len(pieces) and after in self._strips[0] else piece
            if piece:
                joined = joins(before, self.tokenizer) if at else continues
                words = self._unmasked(piece)
                tokens += encode_text(words, name, self.tokenizer, literal="all", continues=joined)
        return tokens

    @cached_property
    def _strips(self) -> tuple[set[str], set[str]]:
        """The tokens that take the blanks on their left, and on their right."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        return {str(t) for t in added if t.lstrip}, {str(t) for t in added if t.rstrip}


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")


def _probed_call(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the probe as the last argument of its last call."""
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    if calls:
        called = dict(calls[-1].get("function") or {})
        given = called.get("arguments")
        called["arguments"] = {**(given if isinstance(given, Mapping) else {}), "probe": _MARK}
        calls[-1]["function"] = called
    return {**message, "tool_calls": calls}


def _opened(asked: str, head: str) -> str:
    """What a prompt ends with that is not the header of the turn: what a finished turn has not
    before its answer (`head`), or has and closes there."""
    opened = asked[common_prefix(asked, head) :]
    if _TAG.search(opened):
        return opened
    tag = _OPEN_AT_END.search(asked)
    closed = tag and head.startswith(asked) and f"{tag[1][0]}/{tag[1][1:]}" in head[len(asked) :]
    return asked[tag.start() :] if tag and closed else ""


def end_of_sequence(tokenizer: Any) -> list[int]:
    """The tokenizer's end of sequence, if it has one."""
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def encode(
    prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any], *, raw: bool = False
) -> Prompt:
    """The prompt with its tokens; see `encode_prompt`."""
    return encode_prompt(prompt, ChatEncoder(tokenizer, template_kwargs), raw=raw)


def encode_prompt(prompt: Prompt, chat: ChatEncoder, *, raw: bool = False) -> Prompt:
    """The prompt with its tokens, and the tag that the template, or the text, ends on.

    Messages get the chat template with the header of the assistant's turn. Plain text is the user's
    turn of such a conversation (and so is the returned prompt's content) if the tokenizer has a
    chat template; with `raw`, or without a template, it gets what the tokenizer puts in front (a
    BOS if it has one) but never an EOS after it. Raises KeelError, naming the prompt, for what
    cannot be encoded.
    """
    content, opening = as_turns(prompt.content, chat.tokenizer, raw), ""
    if isinstance(content, str):
        tokens = _text(content, prompt.id, chat.tokenizer)
        opening = begun_tag(content)
    else:
        tokens = _messages(prompt.id, content, prompt.tools, chat)
        opening = chat.opening
    if not tokens:
        raise KeelError(f"prompt {prompt.id!r} has no tokens: leave the empty prompt out")
    ids = tuple(int(t) for t in tokens)
    return dataclasses.replace(prompt, content=content, tokens=ids, opening=opening)


def teacher_groups(
    groups: Sequence[Group], template: str, chat: ChatEncoder, longest: int | None
) -> Iterator[Group]:
    """The completions in order, after what `template` makes of the columns of prompt and completion
    in the place of the prompt's text, or that of its last message.

    A completion without a column that others have, as after a failure, has it empty. Raises
    KeelError for a column that is not there, if a program wrote the first request, and if the
    tokens are more than `longest`.
    """
    missing = {name: "" for group in groups for one in group.completions for name in one.columns}
    for group in groups:
        prompt, turns, answers = group.prompt, group.prompt.content, group.completions
        plain = isinstance(turns, str)
        if encode_prompt(prompt, chat, raw=plain).tokens != prompt.tokens:
            raise KeelError(
                f"teacher.prompt: prompt {prompt.id!r} was written by rollout.program, not by the "
                "task: leave teacher.prompt out, or let the task write the prompt",
                key="teacher.prompt",
            )
        text = turns if isinstance(turns, str) else text_of(turns[-1])
        own = any(one.columns for one in answers)
        for part in [(one,) for one in answers] if own else [answers]:
            given = {**missing, **prompt.columns, **part[0].columns, "prompt": text}
            try:
                content: Any = template.format_map(given)
            except (KeyError, IndexError, ValueError) as error:
                raise KeelError(
                    f"teacher.prompt: prompt {prompt.id!r} has no {error}: there are "
                    f"{', '.join(given)}",
                    key="teacher.prompt",
                ) from error
            if not isinstance(turns, str):
                content = (*turns[:-1], {**turns[-1], "content": content})
            made = encode_prompt(dataclasses.replace(prompt, content=content), chat, raw=plain)
            size = len(made.tokens) + max(map(len, part))
            if longest is not None and size > longest:
                raise KeelError(
                    f"teacher.prompt: prompt {prompt.id!r} and its completion are {size} tokens, "
                    f"more than the model's {longest}: shorten it",
                    key="teacher.prompt",
                )
            yield Group(made, part)


def as_turns(content: Content, tokenizer: Any, raw: bool) -> Content:
    """Plain text as the user's turn if the tokenizer has a chat template, unless `raw`."""
    if raw or not isinstance(content, str) or not getattr(tokenizer, "chat_template", None):
        return content
    return (Message(role="user", content=content),)


def encode_answer(
    content: Content,
    answer: str,
    name: str,
    chat: ChatEncoder,
    tools: Tools = (),
    *,
    raw: bool = False,
    mask: bool = True,
) -> EncodedAnswer:
    """A prompt and its answer, as the policy is asked and as it would have answered.

    An answer to plain text closes with the tokenizer's end of sequence.
    """
    turns = as_turns(content, chat.tokenizer, raw)
    if not isinstance(turns, str):
        return chat.answered(turns, answer, name, tools, mask=mask)
    prompt = encode_prompt(Prompt(name, turns), chat, raw=raw)
    what = f"the answer of {name}"
    tokens = encode_text(answer, what, chat.tokenizer, literal=mask, continues=True)
    end = end_of_sequence(chat.tokenizer)
    return EncodedAnswer(list(prompt.tokens), [*tokens, *end], len(end), answer)


class Encoder:
    """Encodes prompts and leaves out those longer than `max_tokens`; for PromptStream's `prepare`.

    A prompt that cannot be encoded raises, unless its task is in `forgiven`: then it is left out.
    The first prompt left out of a task is reported to `note`, except for tasks in `known`. Plain
    prompts of tasks in `raw` go without the chat template. A prompt that the saved tokenizer of
    `served` encodes differently raises; one that only the source's tokenizer.json encodes
    differently is reported once.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        forgiven: Collection[str] = (),
        note: Callable[[str], None] | None = None,
        raw: Collection[str] = (),
        served: Served | None = None,
    ) -> None:
        self.chat = ChatEncoder(tokenizer, template_kwargs)
        self.max_tokens = max_tokens
        self.forgiven = frozenset(forgiven)
        self.note = note
        self.known: set[str] = set()
        self.raw = frozenset(raw)
        self.served = served or Served()
        self._others = {
            id(other): ChatEncoder(other, template_kwargs)
            for other in (self.served.saved, self.served.written)
            if other is not None
        }
        self.differs: str | None = None
        """How tokenizer.json and AutoTokenizer first differed on a prompt."""

    def __call__(self, prompt: Prompt) -> Prompt | None:
        """The prompt with its tokens; None where it is left out."""
        encoded = self._attempt(prompt, self.chat)
        if isinstance(encoded, KeelError):
            if prompt.task not in self.forgiven:
                raise encoded
            self._leave_out(prompt, str(encoded))
            return None
        self._compare(prompt, encoded)
        long = self.too_long(encoded)
        if long is None:
            return encoded
        self._leave_out(prompt, long)
        return None

    def too_long(self, encoded: Prompt) -> str | None:
        """The message for a prompt with too many tokens; None for others."""
        n = len(encoded.tokens)
        if self.max_tokens is None or n <= self.max_tokens:
            return None
        return f"prompt {encoded.id!r} is {n} tokens long, more than the {self.max_tokens} allowed"

    def wrong(self, prompt: Prompt) -> tuple[str, Literal["bad", "long"]] | None:
        """Why a prompt cannot be used: it cannot be encoded (bad), or is too long."""
        encoded = self._attempt(prompt, self.chat)
        if isinstance(encoded, KeelError):
            return str(encoded), "bad"
        long = self.too_long(encoded)
        return None if long is None else (long, "long")

    def _attempt(self, prompt: Prompt, chat: ChatEncoder) -> Prompt | KeelError:
        """The encoded prompt, or why it cannot be encoded. A template that hangs raises."""
        try:
            return encode_prompt(prompt, chat, raw=prompt.task in self.raw)
        except Hung:
            raise
        except KeelError as error:
            return error

    def _compare(self, prompt: Prompt, encoded: Prompt) -> None:
        """Raise KeelError where the saved tokenizer encodes the prompt differently."""
        saved, written = self.served.saved, self.served.written
        if saved is not None and (other := self._other(prompt, saved)) != encoded.tokens:
            where = apart(_shown(prompt), list(encoded.tokens), list(other))
            raise KeelError(differing(prompt.id, where))
        if written is None or self.differs is not None:
            return
        if (other := self._other(prompt, written)) != encoded.tokens:
            self.differs = apart(_shown(prompt), list(other), list(encoded.tokens))
            if self.note is not None:
                self.note(
                    f"the model's tokenizer.json and AutoTokenizer read prompt {prompt.id!r} "
                    f"differently ({self.differs}): the run uses what AutoTokenizer loads, as "
                    "wherever the model is served"
                )

    def _other(self, prompt: Prompt, tokenizer: Any) -> tuple[int, ...]:
        encoded = self._attempt(prompt, self._others[id(tokenizer)])
        return () if isinstance(encoded, KeelError) else encoded.tokens

    def _leave_out(self, prompt: Prompt, why: str) -> None:
        if self.note is not None and prompt.task not in self.known:
            self.known.add(prompt.task)
            self.note(f"prompt left out, others of {prompt.task!r} like it are counted only: {why}")


def _shown(prompt: Prompt) -> str:
    content = prompt.content
    return content if isinstance(content, str) else text_of(content[-1])


def _text(text: str, name: str, tokenizer: Any) -> list[int]:
    bare = encode_text(text, f"prompt {name!r}", tokenizer)
    tokens: list[int] = list(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
    # Some tokenizers close every text with an EOS; nothing would follow it. One that the text
    # itself ends with stays.
    eos = tokenizer.eos_token_id
    own = bool(bare) and bare[-1] == eos
    if tokens and tokens[-1] == eos and (not own or tokens[-len(bare) - 1 : -1] == bare):
        tokens.pop()
    return tokens


def _messages(id: str, turns: Sequence[Message], tools: Tools, chat: ChatEncoder) -> list[int]:
    if not turns:
        raise KeelError(f"prompt {id!r} has no messages: leave the empty prompt out")
    if turns[-1]["role"] == "assistant":
        raise KeelError(
            f"prompt {id!r} ends with the assistant's turn, which is the answer: end it "
            "with the user's"
        )
    return chat.prompt(turns, f"prompt {id!r}", tools)
