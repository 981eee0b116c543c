"""An OpenAI-compatible endpoint in front of an engine, which records what programs sample.

It listens on the loopback interface, at a free port. A `Session` turns the requests of one program
into tokens: recorded ones are reused, only new messages are encoded.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from keel.engines.turns import Conversation
from keel.models.chat import ChatEncoder
from keel.platform.time_limit import Hung
from keel.types import Completion, KeelError, Prompt, text_of

MODEL = "policy"
"""The policy's name in requests; another name is accepted as well."""
TOO_LONG = "context_length_exceeded"
MAX_DEPTH = 100
"""Levels of nesting in JSON: what reads it later (chat templates, comparisons) is recursive."""
MAX_BODY = 64 << 20
"""Bytes of the largest request."""
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
}
"""Keys that would change the distribution: refused unless they change nothing."""


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
class ChatRequest:
    """What is read of a request; `messages` in the form that a chat template gets."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Any = None
    max_tokens: int | None = None
    stream: bool = False

    @property
    def characters(self) -> int:
        """The length of all texts."""
        return sum(len(str(message.get("content") or "")) for message in self.messages)


def read_request(body: bytes) -> ChatRequest:
    """A request from its JSON; settings of sampling are the recipe's. Raises RefusedRequest."""
    try:
        data = _read_json(body)
    except ValueError as error:
        raise RefusedRequest(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        raise RefusedRequest("messages: give a list of messages")
    for key, neutral in _NEUTRAL.items():
        value = data.get(key)
        if value is not None and value not in neutral:
            raise RefusedRequest(f"{key} = {value!r}: set it in the recipe, or leave it out")
    limits = (data.get("max_completion_tokens"), data.get("max_tokens"))
    limit = next((one for one in limits if one is not None), None)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RefusedRequest(f"max_tokens = {limit!r}: give a number of at least 1")
    messages = tuple(_message(one, at) for at, one in enumerate(data["messages"]))
    if not messages or messages[-1]["role"] == "assistant":
        raise RefusedRequest("messages: end them with a message of the user or a tool")
    choice, tools = data.get("tool_choice"), data.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedRequest("tools: give a list of objects")
    given = () if choice == "none" else tuple(tools)
    return ChatRequest(messages, given, choice, limit, bool(data.get("stream")))


def _read_json(text: str | bytes) -> Any:
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
    return {"id": data.get("id"), "type": "function", "function": _function(data["function"])}


def _function(data: Mapping[str, Any]) -> dict[str, Any]:
    """A called function with its arguments as an object, which is what chat templates expect."""
    arguments = data.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = _read_json(arguments)
    return {"name": data["name"], "arguments": arguments}


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


def assistant_message(text: str, turn: int, tools: bool) -> dict[str, Any]:
    """The policy's words as a message, its calls `<tool_call>{json}</tool_call>` read if the
    request had tools.

    Anything but a call of a name with an object of arguments, both valid Unicode, stays text: a
    client could not repeat it, or a chat template not render it.
    """
    calls: list[dict[str, Any]] = []

    def take(found: re.Match[str]) -> str:
        try:
            function = _function(_read_json(found[1]))
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


def response(message: Mapping[str, Any], finish: str, prompt: int, made: int) -> dict[str, Any]:
    """The body of an answer; `prompt` and `made` are numbers of tokens."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"])}}
        for call in message.get("tool_calls", ())
    ]
    shown = {"role": "assistant", "content": message["content"] or None, "refusal": None}
    if calls:
        shown["tool_calls"] = calls
    reason = "length" if finish == "length" else "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": shown, "finish_reason": reason, "logprobs": None}
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    head = {"id": "chatcmpl-keel", "object": "chat.completion", "created": 0, "model": MODEL}
    return {**head, "choices": [choice], "usage": usage}


def _text(function: Mapping[str, Any]) -> str:
    return json.dumps(function["arguments"], ensure_ascii=False)


def stream_events(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A finished answer as the chunks of a stream."""
    choice = body["choices"][0]
    delta = dict(choice["message"])
    calls = delta.get("tool_calls")
    if calls:
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
    head = {**body, "object": "chat.completion.chunk", "usage": None}
    yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    reason = choice["finish_reason"]
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    yield {**head, "choices": [], "usage": body["usage"]}


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


Submit = Callable[[str, ChatRequest], "Future[dict[str, Any]]"]
"""Takes over a request and the key that came with it."""


class Endpoint(ThreadingHTTPServer):
    """Serves `/v1/chat/completions` and `/v1/models` while the block lasts."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, submit: Submit) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.submit = submit
        self._open: set[Any] = set()

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> Endpoint:
        serve = threading.Thread(
            target=self.serve_forever, args=(0.05,), name="keel-endpoint", daemon=True
        )
        serve.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Keep the connection, to close it at the end."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may go away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Endpoint

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: programs report what fails."""

    def do_GET(self) -> None:
        """The list of models."""
        if self.path == "/v1/models":
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "keel"}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._send(404, RefusedRequest(f"there is no {self.path}", "not_found").body())

    def do_POST(self) -> None:
        """Answer a chat request once the engine has."""
        try:
            body = self._body()
            if self.path != "/v1/chat/completions":
                raise RefusedRequest("only /v1/chat/completions is served", "not_found", 404)
            bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
            key = self.headers.get("X-Api-Key") or bearer
            request = read_request(body)
            answer = self.server.submit(key, request).result()
        except RefusedRequest as error:
            self._send(error.status, error.body())
            return
        if request.stream:
            events = [json.dumps(one) for one in stream_events(answer)]
            text = "".join(f"data: {one}\n\n" for one in (*events, "[DONE]"))
            self._write(200, text.encode(), "text/event-stream")
        else:
            self._send(200, answer)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > MAX_BODY:
            self.close_connection = True
            raise RefusedRequest(f"Content-Length: give at most {MAX_BODY} bytes", status=413)
        return self.rfile.read(int(length))

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._write(status, json.dumps(body).encode(), "application/json")

    def _write(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
