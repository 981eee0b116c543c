"""One program's conversation as tokens: recorded ones are reused, only new messages are encoded."""

from __future__ import annotations

from collections.abc import Mapping
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
from keel.models.chat import ChatEncoder
from keel.platform.time_limit import Hung
from keel.types import Completion, KeelError, Message, Prompt, text_of


class Session:
    """The conversation of one completion.

    `first` are the tokens of its first request. A later request must repeat the messages before it
    and the answers to them; their tokens are those recorded. What a request adds is recorded with
    its answer, so one without an answer leaves nothing.
    """

    def __init__(
        self, prompt: Prompt, name: str, chat: ChatEncoder, limit: int, context: int | None
    ) -> None:
        self.prompt, self.name, self.chat = prompt, name, chat
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

    def prepare(self, request: ChatRequest) -> int:
        """Take the messages of a request over; returns how many tokens may answer it.

        Raises RefusedRequest, and then nothing changes but `full`.
        """
        if self._last is None:
            first, new = self._encoded(request), []
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
        return self._encoded(request, len(self._messages))

    def _encoded(self, request: ChatRequest, known: int = 0) -> list[int]:
        """The tokens of a request's messages from `known` on; special tokens in them are text."""
        messages, tools = request.messages, request.tools
        keywords = {} if request.tool_choice is None else {"tool_choice": request.tool_choice}
        try:
            if not known:
                return self.chat.prompt(messages, "a request", tools, mask=True, **keywords)
            last = self._tokens[-1]
            return self.chat.after(messages, known, last, "a request", tools, **keywords)
        except Hung:
            raise
        except KeelError as error:
            raise RefusedRequest(str(error)) from None

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
        text = completion.text
        message = assistant_message(text, self.count, bool(self.request.tools))
        self._tokens += [*new, *made]
        self._log_probs += [*[0.0] * len(new), *completion.log_probs.tolist()]
        self._written += [*[False] * len(new), *completion.written.tolist()]
        for added in self.request.messages[len(self._messages) :] if self._messages else ():
            self._turns.append(Message(role="environment", content=text_of(added)))
        self._turns.append(Message(role="assistant", content=text))
        self._messages = (*self.request.messages, message)
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
            text="".join(text_of(turn) for turn in self._turns if turn["role"] == "assistant"),
            turns=tuple(self._turns),
            columns=columns,
        )
