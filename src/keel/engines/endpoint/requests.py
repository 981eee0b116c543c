"""What is read of a request to the endpoint, in OpenAI's format, and how it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from keel.models.text import check_keywords
from keel.types import KeelError

MODEL = "policy"
"""The policy's name in requests; another name is accepted as well."""
TOO_LONG = "context_length_exceeded"
MAX_DEPTH = 100
"""Levels of nesting in JSON: what reads it later (chat templates, comparisons) is recursive."""
MAX_BODY = 64 << 20
"""Bytes of the largest request."""
MAX_NUMBER = 2**63 - 1
MAX_CHOICES = 1024
"""Choices of a request."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
}
"""Keys that would change the distribution: refused unless they change nothing."""
_OF_TRAINING: Mapping[str, tuple[Any, ...]] = {"n": (1,), "stop": ([],)}
_OF_SERVING: Mapping[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
}


class RefusedRequest(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a served request is answered; `sampling` are its changes of the server's settings."""

    sampling: Mapping[str, Any]
    n: int = 1
    seed: int | None = None
    log_probs: bool = False
    usage: bool = False
    """Whether a stream ends with the numbers of tokens."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is read of a request; `messages` in the form that a chat template gets."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Any = None
    max_tokens: int | None = None
    stream: bool = False
    options: RequestOptions | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the chat template, over those of the server."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Of `/v1/completions`: text or tokens to go on from, in place of messages."""

    @property
    def characters(self) -> int:
        """The length of the longest text that is encoded: all messages, or one of the prompts."""
        texts = [str(message.get("content") or "") for message in self.messages]
        return max(sum(map(len, texts)), *map(len, self.prompts), 0)


def read_request(body: bytes, *, served: bool = False, chat: bool = True) -> ChatRequest:
    """A request from its JSON, of `/v1/completions` unless `chat`. Raises RefusedRequest.

    Settings of sampling are the recipe's, unless the request is `served`: then its own.
    """
    try:
        data = read_json(body)
    except ValueError as error:
        raise RefusedRequest(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict) or (chat and not isinstance(data.get("messages"), list)):
        raise RefusedRequest("messages: give a list of messages" if chat else "prompt: give one")
    for key, neutral in {**_NEUTRAL, **(_OF_SERVING if served else _OF_TRAINING)}.items():
        value = data.get(key)
        if value is not None and value not in neutral:
            why = "it is not supported" if served else "set it in the recipe"
            raise RefusedRequest(f"{key} = {value!r}: {why}, leave it out")
    limits = (data.get("max_completion_tokens"), data.get("max_tokens"))
    limit = next((one for one in limits if one is not None), None)
    if limit is not None and (not isinstance(limit, int) or limit is True or limit < 1):
        raise RefusedRequest(f"max_tokens = {limit!r}: give a number of at least 1")
    stream, options = bool(data.get("stream")), _options(data, chat) if served else None
    if not chat:
        prompts = _prompts(data.get("prompt"))
        return ChatRequest((), (), None, limit, stream, options, prompts=prompts)
    messages = tuple(_message(one, at) for at, one in enumerate(data["messages"]))
    if not messages or messages[-1]["role"] == "assistant":
        raise RefusedRequest("messages: end them with a message of the user or a tool")
    choice, tools = data.get("tool_choice"), data.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedRequest("tools: give a list of objects")
    given = () if choice == "none" else tuple(tools)
    keywords = data.get("chat_template_kwargs") or {}
    if keywords and not served:
        raise RefusedRequest("chat_template_kwargs: set prompts.chat_template in the recipe")
    try:
        check_keywords(keywords)
    except KeelError as error:
        raise RefusedRequest(f"chat_template_kwargs: {error}") from None
    return ChatRequest(messages, given, choice, limit, stream, options, keywords)


def _options(data: Mapping[str, Any], chat: bool) -> RequestOptions:
    stop, log_probs = data.get("stop"), data.get("logprobs")
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise RefusedRequest("stop: give a string that is not empty, or a list of them")
    if not chat and log_probs not in (None, False, 0):
        raise RefusedRequest(f"logprobs = {log_probs!r}: give 0, for those of the tokens sampled")
    changes = {key: _number(data, key) for key in ("temperature", "top_p", "min_p")}
    n, seed, top_k = (_number(data, key, whole=True) for key in ("n", "seed", "top_k"))
    n = 1 if n is None else n
    if not 1 <= n <= MAX_CHOICES:
        raise RefusedRequest(f"n = {n}: give 1 to {MAX_CHOICES}")
    changes["top_k"] = 0 if top_k == -1 else top_k  # as other servers call off
    given = {key: value for key, value in changes.items() if value is not None}
    usage = data.get("stream_options") or {}
    return RequestOptions(
        sampling={**given, "stop": tuple(stop)} if stop else given,
        n=int(n),
        seed=None if seed is None else int(seed),
        log_probs=bool(log_probs) if chat else log_probs is not None and log_probs is not False,
        usage=isinstance(usage, dict) and bool(usage.get("include_usage")),
    )


def _number(data: Mapping[str, Any], key: str, whole: bool = False) -> float | None:
    value = data.get(key)
    known = isinstance(value, int) or (isinstance(value, float) and not whole)
    if value is not None and (not known or isinstance(value, bool)):
        raise RefusedRequest(f"{key} = {value!r:.40}: give a {'whole ' * whole}number")
    if value is not None and abs(value) > MAX_NUMBER:
        raise RefusedRequest(f"{key}: give a number of at most {MAX_NUMBER:,}")
    return value


def _prompts(data: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, a list of texts, a list of tokens, or a list of lists of tokens."""
    several = data if isinstance(data, list) and not all(_is_token(one) for one in data) else [data]
    read = [tuple(one) if isinstance(one, list) else one for one in several]
    good = [isinstance(one, str) or (one and all(map(_is_token, one))) for one in read if one]
    if len(good) < len(read) or not all(good) or not 1 <= len(read) <= MAX_CHOICES:
        raise RefusedRequest("prompt: give text, a list of texts, or tokens, none of them empty")
    return tuple(read)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_json(text: str | bytes) -> Any:
    """A value of at most `MAX_DEPTH` levels. Raises ValueError."""
    try:
        value = json.loads(text)
        deep = _is_deep(value, MAX_DEPTH)
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return value


def _is_deep(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deep(one, levels - 1) for one in inner)


def _message(data: Any, at: int) -> dict[str, Any]:
    if not isinstance(data, dict) or not isinstance(data.get("role"), str):
        raise RefusedRequest(f"messages[{at}]: give a role and a content")
    content = data.get("content") or ""
    if isinstance(content, list):
        parts = [one.get("text") if isinstance(one, dict) else None for one in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise RefusedRequest(f"messages[{at}].content: only text is supported")
    message: dict[str, Any] = {"role": data["role"], "content": content}
    for key in ("name", "tool_call_id"):
        if data.get(key) is not None:
            message[key] = data[key]
    if data.get("tool_calls"):
        try:
            message["tool_calls"] = [_tool_call(one) for one in data["tool_calls"]]
        except (KeyError, TypeError, AttributeError):
            raise RefusedRequest(f"messages[{at}].tool_calls: give a list of calls") from None
    return message


def _tool_call(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": data.get("id"), "type": "function", "function": read_function(data["function"])}


def read_function(data: Mapping[str, Any]) -> dict[str, Any]:
    """A called function with its arguments as an object, which is what chat templates expect."""
    arguments = data.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = read_json(arguments)
    return {"name": data["name"], "arguments": arguments}
