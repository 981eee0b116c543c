"""One program's conversation as tokens: recorded ones are reused, only new messages are encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keel.engines.endpoint.server import (
    TOO_LONG,
    ChatRequest,
    RefusedRequest,
    assistant_message,
    first_difference,
    response,
)
from keel.engines.turns import Conversation
from keel.models.chat import ChatEncoder
from keel.platform.time_limit import Hung
from keel.types import Completion, KeelError, Prompt, text_of


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
            self.first = self._encoded(request)
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
        return self._encoded(request, len(self._messages))

    def _encoded(self, request: ChatRequest, known: int = 0) -> list[int]:
        """The tokens of a request's messages from `known` on; special tokens in them are text."""
        messages, tools = request.messages, request.tools
        keywords = {} if request.tool_choice is None else {"tool_choice": request.tool_choice}
        try:
            if not known:
                return self.chat.prompt(messages, "a request", tools, mask=True, **keywords)
            last = self.tokens[-1]
            return self.chat.after(messages, known, last, "a request", tools, **keywords)
        except Hung:
            raise
        except KeelError as error:
            raise RefusedRequest(str(error)) from None

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
        self.response = response(message, completion.finish, before, made)
        return self.response

    def whole(self, prefix: int, columns: Mapping[str, Any]) -> Completion:
        """All turns as one completion, after the first `prefix` tokens of the first request."""
        finish = "length" if self.full else self.finish
        return self.completion(self.first[prefix:], finish=finish, columns=columns)
