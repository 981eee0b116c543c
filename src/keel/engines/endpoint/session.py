"""One program's conversation as tokens: recorded ones are reused, only new messages are encoded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from keel.engines.endpoint.protocol import (
    TOO_LONG,
    ChatRequest,
    RefusedRequest,
    assistant_message,
    first_difference,
    response,
)
from keel.models.chat import decode, encode_text, limited_template, special_texts
from keel.runs.watchdog import Hung
from keel.types import Completion, KeelError, Message, Prompt

_PROBE = "\U000f8000answer\U000f8000"
"""Stands for the assistant's last message, to find what the template writes after it."""
_MASK = 0xF0000
"""First of the private characters that stand for special tokens spelled out in a message."""


class ChatEncoder:
    """Messages as tokens by the chat template.

    A special token spelled out in a message is ordinary characters. Raises RefusedRequest for
    messages that the template or the tokenizer does not take.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)
        self._specials = special_texts(tokenizer)
        self._masks = {text: chr(_MASK + at) for at, text in enumerate(self._specials)}
        spelled = "|".join(map(re.escape, self._specials)) or r"(?!)"
        self._pattern = re.compile(f"({spelled})")

    def first(self, request: ChatRequest) -> list[int]:
        """The tokens of a whole request."""
        return self._encode(self._render(request, request.messages, True))

    def after(self, request: ChatRequest, known: int, last: int) -> list[int]:
        """The tokens between the assistant's message `known - 1` and its next: the end of its turn
        (unless `last`, the last token it wrote, is that), and the messages from `known` on."""
        messages = request.messages
        plain = {"role": "assistant", "content": _PROBE}
        before = messages[: known - 1]
        closing = self._tail(self._render(request, (*before, plain), False))
        probe = {**messages[known - 1], "content": _PROBE}
        start = self._tail(self._render(request, (*before, probe), False))
        whole = self._tail(self._render(request, (*before, probe, *messages[known:]), True))
        if not whole.startswith(start):
            raise RefusedRequest("the chat template does not append messages: set another")
        tokens = self._encode(closing + whole[len(start) :])
        return tokens[1:] if closing and tokens[:1] == [last] else tokens

    def _tail(self, text: str) -> str:
        head, _, tail = text.rpartition(_PROBE)
        if not head:
            raise RefusedRequest("the chat template omits the assistant: set another")
        return tail

    def _render(
        self, request: ChatRequest, messages: Sequence[Mapping[str, Any]], generate: bool
    ) -> str:
        given = dict(self._kwargs)
        if request.tool_choice is not None:
            given["tool_choice"] = request.tool_choice
        try:
            with limited_template("a request"):
                text = self.tokenizer.apply_chat_template(
                    [self._masked(message) for message in messages],
                    tools=list(request.tools) or None,
                    tokenize=False,
                    add_generation_prompt=generate,
                    **given,
                )
            return str(text)
        except Hung:
            raise
        except Exception as error:  # a template raises what it likes
            line = " ".join(f"{type(error).__name__}: {error}".split())
            raise RefusedRequest(f"the chat template fails: {line}") from None

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._masks[found[0]], value)
        if isinstance(value, Mapping):
            return {key: self._masked(inner) for key, inner in value.items()}
        return [self._masked(inner) for inner in value] if isinstance(value, list) else value

    def _encode(self, text: str) -> list[int]:
        masks = {mask: spelled for spelled, mask in self._masks.items() if mask in text}
        try:
            if not masks:
                return encode_text(text, "a message", self.tokenizer)
            tokens: list[int] = []
            for piece in filter(None, self._pattern.split(text)):
                if piece in self._masks:
                    tokens.append(int(self.tokenizer.convert_tokens_to_ids(piece)))
                    continue
                for mask, spelled in masks.items():
                    piece = piece.replace(mask, spelled)
                tokens += encode_text(piece, "a message", self.tokenizer, split_special_tokens=True)
            return tokens
        except KeelError as error:
            raise RefusedRequest(str(error)) from None


class Session:
    """The conversation of one completion.

    `first` are the tokens of its first request. A later request must repeat the messages before it
    and the answers to them; their tokens are those recorded. What a request adds is recorded with
    its answer, so one without an answer leaves nothing.
    """

    def __init__(
        self, prompt: Prompt, name: str, encoder: ChatEncoder, limit: int, context: int | None
    ) -> None:
        self.prompt, self.name, self.encoder = prompt, name, encoder
        self.limit, self.context = limit, context
        self.first: list[int] = []
        self.request: ChatRequest | None = None
        self.response: dict[str, Any] = {}
        self.full = False
        """Whether a request found no budget left, and none was accepted after it."""
        self.count = 0
        self._new: list[int] = []
        self._left = 0
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._written: list[bool] = []
        self._turns: list[Message] = []
        self._messages: tuple[dict[str, Any], ...] = ()
        self._last: Completion | None = None
        self._version = 0

    def prepare(self, request: ChatRequest) -> int:
        """Take the messages of a request over; returns how many tokens may answer it.

        Raises RefusedRequest, and then nothing changes but `full`.
        """
        if self._last is None:
            first, new = self.encoder.first(request), []
        else:
            first, new = self.first, self._continued(request)
        left = self.limit
        if self.context is not None:
            left = min(left, self.context - len(first))
        left -= len(self._tokens) + len(new)
        self.full = left <= 0 and self._last is not None
        if left <= 0:
            raise RefusedRequest(
                f"no token is left for an answer (rollout.max_tokens = {self.limit})", TOO_LONG
            )
        self.first, self.request, self._new, self._left = first, request, new, left
        return left if request.max_tokens is None else min(left, request.max_tokens)

    def _continued(self, request: ChatRequest) -> list[int]:
        assert self.request is not None
        at = first_difference(self._messages, request.messages)
        if at is not None:
            raise RefusedRequest(
                f"messages[{at}] differs from the conversation so far: a completion is one "
                "conversation, so repeat what was sent and answered, and append to it"
            )
        if len(request.messages) == len(self._messages):
            raise RefusedRequest("messages: append a message to the conversation")
        if request.tools != self.request.tools:
            raise RefusedRequest("tools differ from those of the first request: send the same")
        return self.encoder.after(request, len(self._messages), self._tokens[-1])

    @property
    def asked(self) -> Prompt:
        """The conversation so far as a prompt, whose id names the turn."""
        tokens = (*self.first, *self._tokens, *self._new)
        return replace(self.prompt, id=f"{self.name}/{self.count}", tokens=tokens)

    def add(self, completion: Completion) -> dict[str, Any]:
        """Record the policy's turn; returns the response."""
        assert self.request is not None
        new, made = self._new, completion.tokens.tolist()
        before = len(self.first) + len(self._tokens) + len(new)
        text = decode(self.encoder.tokenizer, [made])[0]
        message = assistant_message(text, self.count, bool(self.request.tools))
        self._tokens += [*new, *made]
        self._log_probs += [*[0.0] * len(new), *completion.log_probs.tolist()]
        self._written += [*[False] * len(new), *completion.written.tolist()]
        for added in self.request.messages[len(self._messages) :] if self._messages else ():
            self._turns.append(Message(role="environment", content=added["content"]))
        self._turns.append(Message(role="assistant", content=text))
        self._messages = (*self.request.messages, message)
        if self._last is None:
            self._version = completion.weight_version
        capped = len(made) == self.request.max_tokens and len(made) < self._left
        finish = "stop" if capped and completion.finish == "length" else completion.finish
        self._last = replace(completion, finish=finish)
        self.count += 1
        self.response = response(message, completion.finish, before, len(made))
        return self.response

    def completion(self, prefix: int, columns: Mapping[str, Any]) -> Completion:
        """All turns as one completion, after the first `prefix` tokens of the first request."""
        assert self._last is not None
        context = self.first[prefix:]
        tokens = np.array([*context, *self._tokens], dtype=np.int64)
        written = np.array([False] * len(context) + self._written, dtype=np.bool_)
        return replace(
            self._last,
            tokens=tokens,
            log_probs=np.array([0.0] * len(context) + self._log_probs, dtype=np.float32),
            written=written,
            finish="length" if self.full else self._last.finish,
            text=decode(self.encoder.tokenizer, [tokens[written].tolist()])[0],
            turns=tuple(self._turns),
            weight_version=self._version,
            columns=columns,
        )
