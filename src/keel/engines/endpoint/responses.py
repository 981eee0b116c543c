"""Answers of the endpoint in OpenAI's format, whole and as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.engines.endpoint.requests import MODEL, read_function, read_json

CALL_TAG = "<tool_call>"
_CALL = re.compile(rf"{CALL_TAG}\s*(\{{.*?\}})\s*</tool_call>", re.DOTALL)


def assistant_message(text: str, turn: int | str, tools: bool) -> dict[str, Any]:
    """The policy's words as a message, its calls `<tool_call>{json}</tool_call>` read if the
    request had tools.

    Anything but a call of a name with an object of arguments, both valid Unicode, stays text: a
    client could not repeat it, or a chat template not render it.
    """
    calls: list[dict[str, Any]] = []

    def take(found: re.Match[str]) -> str:
        try:
            function = read_function(read_json(found[1]))
            json.dumps(function, ensure_ascii=False).encode()
        except (ValueError, KeyError):
            return found[0]
        if not isinstance(function["name"], str) or not isinstance(function["arguments"], dict):
            return found[0]
        identifier = f"call_{turn}_{len(calls)}"
        calls.append({"id": identifier, "type": "function", "function": function})
        return ""

    content = _CALL.sub(take, text) if tools else text
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": calls} if calls else message


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every body and chunk of one response begins with; not `chat`: of `/v1/completions`."""

    id: str = "chatcmpl-keel"
    created: int = 0
    model: str = MODEL
    chat: bool = True

    def body(
        self, choices: Sequence[Mapping[str, Any]], usage: Any = None, *, chunk: bool = False
    ) -> dict[str, Any]:
        """The response, or a chunk of it."""
        kind = f"chat.completion{'.chunk' * chunk}" if self.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": list(choices), "usage": usage}


def usage_of(prompt: int, made: int) -> dict[str, int]:
    """Numbers of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def chat_choice(
    message: Mapping[str, Any], finish: str, index: int = 0, log_probs: Any = None
) -> dict[str, Any]:
    """A choice from the policy's message."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"])}}
        for call in message.get("tool_calls", ())
    ]
    shown = {"role": "assistant", "content": message["content"] or None, "refusal": None}
    if calls:
        shown["tool_calls"] = calls
    reason = "length" if finish == "length" else "tool_calls" if calls else "stop"
    return {"index": index, "message": shown, "finish_reason": reason, "logprobs": log_probs}


def _text(function: Mapping[str, Any]) -> str:
    return json.dumps(function["arguments"], ensure_ascii=False)


def delta_of(message: Mapping[str, Any], sent: int = 0) -> dict[str, Any]:
    """The message of a choice as the last change of a stream, in which the first `sent` characters
    were sent already."""
    delta = {**message, "content": (message["content"] or "")[sent:] or None}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
    return delta


def stream_events(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A finished answer as the chunks of a stream."""
    choice = body["choices"][0]
    head = {**body, "object": "chat.completion.chunk", "usage": None}
    delta, reason = delta_of(choice["message"]), choice["finish_reason"]
    yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    yield {**head, "choices": [], "usage": body["usage"]}
