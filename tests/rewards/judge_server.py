"""A real local server of the chat completions protocol, with faults to order."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT = 60.0
"""Seconds after which a test that hangs fails."""


@dataclass(frozen=True)
class Fault:
    """What the server does instead of answering well.

    `status` with `headers` and `error` answers so. `cut` sends a part of the body and hangs up,
    `drop` hangs up at once, `slow` waits until the server is let go. `body` replaces the whole
    body, `text` what the model wrote, `message` and `choice` parts of the answer, `usage` what it
    says was used (None: nothing).
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    error: Any = None
    cut: bool = False
    drop: bool = False
    slow: bool = False
    body: str | None = None
    text: str | None = None
    message: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)
    usage: Any = "true"

    @property
    def billed(self) -> bool:
        """Whether the model worked."""
        return self.status == 200


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


class JudgeServer:
    """Serves on loopback until it is closed. `log` has every request, in order of arrival.

    Faults come in the order of arrival, or from `fault_of`. `holds` says which requests wait until
    `let_go` (by their number from 0).
    """

    def __init__(self, verdict: Verdict = score, faults: Sequence[Fault | None] = ()) -> None:
        self.verdict = verdict
        self.faults = list(faults)
        self.fault_of: Callable[[Asked], Fault | None] = lambda asked: None
        self.holds: Callable[[int], bool] = lambda number: False
        self.log: list[Asked] = []
        self.active = self.peak = 0
        self.changed = threading.Condition()
        self.let_go = threading.Event()
        self._http = _Http(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

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

    def close(self) -> None:
        self.let_go.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> JudgeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up or are killed are what this server is for."""


def _handler(server: JudgeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = self.headers.get("Idempotency-Key", "")
            asked = Asked(name, body, {k.lower(): v for k, v in self.headers.items()})
            with server.changed:
                number = len(server.log)
                server.log.append(asked)
                server.active += 1
                server.peak = max(server.peak, server.active)
                fault = server.faults.pop(0) if server.faults else server.fault_of(asked)
                server.changed.notify_all()
            fault = fault or Fault()
            try:
                if fault.slow or server.holds(number):
                    server.let_go.wait(WAIT)
            finally:
                with server.changed:
                    server.active -= 1
                    server.changed.notify_all()
            self.answer(asked, fault)

        def answer(self, asked: Asked, fault: Fault) -> None:
            if fault.status != 200:
                error = {"error": fault.error or {"message": "no", "code": None}}
                # The client's own wait would be half a second.
                soon = replace(fault, headers=fault.headers or {"Retry-After-Ms": "1"})
                self.send(json.dumps(error).encode(), soon)
                return
            text = server.verdict(asked) if fault.text is None else fault.text
            reported = sum(len(m["content"].encode()) for m in asked.body["messages"]) // 4 + 9
            # No model writes more than it may, whatever the test made it say.
            limit = asked.body.get("max_tokens", asked.body.get("max_completion_tokens"))
            asked.billed = (reported, min(len(text), limit))
            printed: dict[str, Any] = {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 0,
                "model": asked.body["model"],
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text, **fault.message},
                        "finish_reason": "stop",
                        **fault.choice,
                    }
                ],
            }
            if fault.usage == "true":
                spent = dict(zip(("prompt_tokens", "completion_tokens"), asked.billed, strict=True))
                printed["usage"] = spent | {"total_tokens": sum(asked.billed)}
            elif fault.usage is not None:
                printed["usage"] = fault.usage
            if fault.drop:
                self.hang_up()
                return
            whole = json.dumps(printed).encode() if fault.body is None else fault.body.encode()
            self.send(whole, fault)

        def send(self, body: bytes, fault: Fault) -> None:
            self.send_response(fault.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, value in fault.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if fault.cut else body)
            if fault.cut:
                self.wfile.flush()
                self.hang_up()

        def hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    return Handler
