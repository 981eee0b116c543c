"""The conversation that a program leads by requests: recorded tokens are reused, only new messages
are encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from keel.engines.endpoint.requests import TOO_LONG, ChatRequest, RefusedRequest
from keel.engines.endpoint.responses import (
    ResponseHead,
    assistant_message,
    chat_choice,
    usage_of,
)
from keel.engines.turns import Conversation
from keel.models.chat import ChatEncoder
from keel.platform.time_limit import Hung
from keel.types import Completion, KeelError, Prompt, text_of


def first_difference(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> int | None:
    """The first message of `before` that is not in its place in `now`; blanks around the
    assistant's text do not count."""
    for at, message in enumerate(before):
        if at >= len(now) or _compared(message) != _compared(now[at]):
            return at
    return None


def _compared(message: Mapping[str, Any]) -> dict[str, Any]:
    stripped = message["role"] == "assistant"
    return {**message, "content": message["content"].strip()} if stripped else dict(message)


def encode_request(
    chat: ChatEncoder, request: ChatRequest, known: int = 0, last: int = -1
) -> list[int]:
    """The tokens of a request's messages from `known` on, after the token `last`; special tokens in
    them are text. Raises RefusedRequest."""
    messages, tools = request.messages, request.tools
    choice = {} if request.tool_choice is None else {"tool_choice": request.tool_choice}
    keywords = {**request.template, **choice}
    try:
        if not known:
            return chat.prompt(messages, "a request", tools, mask=True, keywords=keywords)
        return chat.after(messages, known, last, "a request", tools, keywords=keywords)
    except Hung:
        raise
    except KeelError as error:
        raise RefusedRequest(str(error)) from None


def check_length(characters: int, room: int | None, tokenizer: Any, left: str = "") -> None:
    """Refuse what has more characters than `room` tokens can hold: megabytes would be encoded for
    seconds, while all others wait. `left` says what limits it. Raises RefusedRequest."""
    if room is not None and characters > room * _longest_token(tokenizer):
        line = f"no token is left for an answer to {characters:,} characters{left}"
        raise RefusedRequest(line, TOO_LONG)


@lru_cache(maxsize=1)
def _longest_token(tokenizer: Any) -> int:
    """The most characters of a token."""
    return max(map(len, tokenizer.get_vocab()))


class Session(Conversation):
    """The conversation of one completion, which a program leads by requests.

    `first` are the tokens of its first request. A later request must repeat the messages before it
    and the answers to them; their tokens are those recorded. What a request adds is recorded with
    its answer, so one without an answer leaves nothing.
    """

    def __init__(
        self, prompt: Prompt, name: str, chat: ChatEncoder, limit: int, context: int | None
    ) -> None:
        super().__init__(prompt, name, limit, context)
        self.chat = chat
        self.request: ChatRequest | None = None
        self.response: dict[str, Any] = {}
        self.full = False
        """Whether a request found no budget left, and none was accepted after it."""
        self._new: list[int] = []
        self._messages: tuple[dict[str, Any], ...] = ()

    def prepare(self, request: ChatRequest) -> int:
        """Take the messages of a request over; returns how many tokens may answer it.

        Raises RefusedRequest, and then nothing changes but `full`.
        """
        known = len(self._messages)
        new = self._continued(request) if known else []
        before = self.first
        if not known:
            self.first = encode_request(self.chat, request)
        left = self.left - len(new)
        self.full = left <= 0 and known > 0
        if left <= 0:
            self.first = before
            raise RefusedRequest(
                f"no token is left for an answer (rollout.max_tokens = {self.limit})", TOO_LONG
            )
        self.request, self._new = request, new
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
        return encode_request(self.chat, request, len(self._messages), self.tokens[-1])

    def next_turn(self) -> Prompt:
        """The conversation with the request that waits, as a prompt."""
        return self.asked(self._new)

    def add(self, completion: Completion) -> dict[str, Any]:
        """Record the policy's turn; returns the response."""
        assert self.request is not None
        request, made, text = self.request, len(completion), completion.text
        before, left = len(self.first) + len(self.tokens) + len(self._new), self.left
        message = assistant_message(text, self.count, bool(request.tools))
        added = request.messages[len(self._messages) :] if self._messages else ()
        self.add_context(self._new, *map(text_of, added))
        self.add_answer(completion)
        self._messages = (*request.messages, message)
        capped = made == request.max_tokens and made < left - len(self._new)
        if completion.finish == "length" and capped:
            self.finish = "stop"
        choices = [chat_choice(message, completion.finish)]
        self.response = ResponseHead().body(choices, usage_of(before, made))
        return self.response

    def whole(self, prefix: int, columns: Mapping[str, Any]) -> Completion:
        """All turns as one completion, after the first `prefix` tokens of the first request."""
        finish = "length" if self.full else self.finish
        return self.completion(self.first[prefix:], finish=finish, columns=columns)
