"""A small local server of the chat completions protocol, with faults to order."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT = 60.0
"""Seconds after which a test that hangs fails."""


@dataclass(frozen=True)
class Fault:
    """What the server does instead of answering well.

    `status` comes with `error`. `cut` sends half of the body and hangs up, `drop` hangs up at once,
    `slow` waits until the server is let go. `body` replaces the whole body, `text` the model's
    text, `message` and `choice` parts of the answer, `usage` the reported tokens (None: nothing).
    """

    status: int = 200
    error: Any = None
    cut: bool = False
    drop: bool = False
    slow: bool = False
    body: str | None = None
    text: str | None = None
    message: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)
    usage: Any = "true"


@dataclass
class Asked:
    """A request as it came; `billed` are the tokens in and out that its sender owes."""

    name: str
    body: dict[str, Any]
    headers: dict[str, str]
    billed: tuple[int, int] = (0, 0)

    @property
    def material(self) -> dict[str, Any]:
        """What is to be judged."""
        found: dict[str, Any] = json.loads(self.body["messages"][-1]["content"])
        return found


Verdict = Callable[[Asked], str]


def score(asked: Asked) -> str:
    """The judge that gives an answer its length."""
    return json.dumps({"reason": "counted", "score": len(asked.material["answer"])})


def longer(asked: Asked) -> str:
    """The judge that prefers the longer answer."""
    first, second = (len(asked.material[place]) for place in ("first", "second"))
    verdict = "tie" if first == second else "first" if first > second else "second"
    return json.dumps({"reason": "length", "verdict": verdict})


def always(place: str) -> Verdict:
    """The judge that looks at the place alone."""
    return lambda asked: json.dumps({"reason": place, "verdict": place})


class JudgeServer(ThreadingHTTPServer):
    """Serves on loopback until it is closed. `log` has every request, in order of arrival.

    Faults come in the order of arrival, or from `fault_of`. `holds` says which requests wait until
    `let_go` (by their number from 0).
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, verdict: Verdict = score, faults: Sequence[Fault | None] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.verdict = verdict
        self.faults = list(faults)
        self.fault_of: Callable[[Asked], Fault | None] = lambda asked: None
        self.holds: Callable[[int], bool] = lambda number: False
        self.log: list[Asked] = []
        self.active = self.peak = 0
        self.changed = threading.Condition()
        self.let_go = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    @property
    def names(self) -> list[str]:
        return [asked.name for asked in self.log]

    @property
    def billed(self) -> tuple[int, int]:
        """Tokens in and out that were worked for, whether the answer arrived or not."""
        return sum(a.billed[0] for a in self.log), sum(a.billed[1] for a in self.log)

    @property
    def billed_once(self) -> tuple[int, int]:
        """The same by a server that repeats its answer to a request of a name that it knows."""
        once = {a.name: a.billed for a in self.log}.values()
        return sum(a for a, _ in once), sum(b for _, b in once)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something is so on the server's side."""
        with self.changed:
            assert self.changed.wait_for(condition, WAIT), "the server never saw it"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up or are killed are what this server is for."""

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JudgeServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(headers.get("idempotency-key", ""), body, headers)
        with server.changed:
            number = len(server.log)
            server.log.append(asked)
            server.active += 1
            server.peak = max(server.peak, server.active)
            fault = server.faults.pop(0) if server.faults else server.fault_of(asked)
            server.changed.notify_all()
        fault = fault or Fault()
        if fault.slow or server.holds(number):
            server.let_go.wait(WAIT)
        with server.changed:
            server.active -= 1
            server.changed.notify_all()
        reply = self.reply(asked, fault).encode()
        if not fault.drop:
            self.send_response(fault.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            if fault.status != 200:  # the client's own wait would be half a second
                self.send_header("Retry-After-Ms", "1")
            self.end_headers()
            self.wfile.write(reply[: len(reply) // 2] if fault.cut else reply)
            self.wfile.flush()
        if fault.cut or fault.drop:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def reply(self, asked: Asked, fault: Fault) -> str:
        """The body; the model worked for it unless the status is an error's."""
        if fault.status != 200:
            return json.dumps({"error": fault.error or {"message": "no", "code": None}})
        text = self.server.verdict(asked) if fault.text is None else fault.text
        tokens_in = sum(len(m["content"].encode()) for m in asked.body["messages"]) // 4 + 9
        # No model writes more than it may, whatever the test made it say.
        limit = asked.body.get("max_tokens", asked.body.get("max_completion_tokens"))
        asked.billed = (tokens_in, min(len(text), limit))
        usage = dict(zip(("prompt_tokens", "completion_tokens"), asked.billed, strict=True))
        message = {"role": "assistant", "content": text, **fault.message}
        choice = {"index": 0, "message": message, "finish_reason": "stop", **fault.choice}
        whole = {
            **{"id": "chatcmpl-1", "object": "chat.completion", "created": 0},
            **{"model": asked.body["model"], "choices": [choice]},
            "usage": usage if fault.usage == "true" else fault.usage,
        }
        return json.dumps(whole) if fault.body is None else fault.body
