"""The HTTP server of the endpoint, on the loopback interface at a free port."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from keel.engines.endpoint.protocol import (
    MODEL,
    ChatRequest,
    RefusedRequest,
    read_request,
    stream_events,
)

MAX_BODY = 64 << 20
"""Bytes of the largest request."""

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
