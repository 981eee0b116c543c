"""The HTTP server of the endpoint: who may ask, how requests are read, and answers sent."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from keel.engines.endpoint.requests import (
    MAX_BODY,
    MODEL,
    ChatRequest,
    RefusedRequest,
    read_request,
)
from keel.engines.endpoint.responses import stream_events
from keel.platform.calls import POLL
from keel.platform.listen import fits, wrong_host

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY_SECONDS = 60.0
"""Without a byte of a request's body, after which its connection is closed."""


class PendingResponse(Future[dict[str, Any]]):
    """The body of an answer, once there is one."""

    def parts(self, stream: bool) -> Iterator[dict[str, Any] | None]:
        """The body, or the chunks of a stream; None whenever there was none for a while.

        Raises RefusedRequest.
        """
        while not self.done():
            with suppress(TimeoutError):
                self.exception(POLL)
            yield None
        yield from stream_events(self.result()) if stream else [self.result()]

    def leave(self) -> None:
        """Called if the client has gone."""


Submit = Callable[[str, ChatRequest], PendingResponse]
"""Takes over a request and the key that came with it."""


class Endpoint(ThreadingHTTPServer):
    """Serves `/v1/chat/completions` and `/v1/models` while the block lasts.

    At a free port of the loopback interface, unless it gets what listens. With `served`, settings
    of sampling are read from requests, and `/v1/completions` is answered as well; requests need the
    `token`, and must name this machine by one of `hosts`, unless they are None.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        submit: Submit,
        listener: socket.socket | None = None,
        *,
        model: str = MODEL,
        served: bool = False,
        token: str | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        listener = listener or socket.create_server(("127.0.0.1", 0))
        listener.listen(512)
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.submit, self.model, self.served = submit, model, served
        self.token, self.hosts = token, hosts
        self._open: set[Any] = set()

    @property
    def url(self) -> str:
        """The base URL on the loopback interface."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

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
        """The list of models, or the one there is."""
        name = self.server.model
        model: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "keel"}
        models = {"object": "list", "data": [model]}
        known = {"/v1/models": models, f"/v1/models/{name}": model}
        try:
            self._key()
            if (path := unquote(self.path)) not in known:
                raise RefusedRequest(f"there is no {path}", "not_found", 404)
            self._send(200, known[path])
        except RefusedRequest as error:
            self._send(error.status, error.body())

    def do_POST(self) -> None:
        """Answer a request once the engine has, or as it does."""
        self._streams = False
        answer: PendingResponse | None = None
        try:
            try:
                key = self._key()
            except RefusedRequest:
                self.close_connection = True  # the body is not read
                raise
            body, served = self._body(), self.server.served
            paths = (CHAT, TEXT) if served else (CHAT,)
            if self.path not in paths:
                raise RefusedRequest(f"only {' and '.join(paths)} is served", "not_found", 404)
            request = read_request(body, served=served, chat=self.path == CHAT)
            answer = self.server.submit(key, request)
            for part in answer.parts(request.stream):
                if part is None:
                    self._check_client()
                elif request.stream:
                    self._event(part)
                else:
                    self._send(200, part)
            if request.stream:
                self._event("[DONE]")
        except RefusedRequest as error:
            if self._streams:
                self._event(error.body())
            else:
                self._send(error.status, error.body())
        except OSError:
            if answer is not None:
                answer.leave()
            raise

    def _key(self) -> str:
        """The key that came with the request. Raises RefusedRequest if it may not ask."""
        wrong = None
        if self.server.served:
            headers = {name.lower(): value for name, value in self.headers.items()}
            wrong = wrong_host(headers, self.server.hosts)
        if wrong is not None:
            raise RefusedRequest(wrong, "forbidden", 403)
        bearer = re.sub("^bearer +", "", self.headers.get("Authorization", ""), flags=re.IGNORECASE)
        key = self.headers.get("X-Api-Key") or bearer
        if not fits(key, self.server.token):
            raise RefusedRequest(
                "api_key: give the server's token, of KEEL_TOKEN or as the command printed it",
                "invalid_api_key",
                401,
            )
        return key

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > MAX_BODY:
            self.close_connection = True
            raise RefusedRequest(f"Content-Length: give at most {MAX_BODY} bytes", status=413)
        self.connection.settimeout(BODY_SECONDS)
        body = self.rfile.read(int(length))
        self.connection.settimeout(None)
        return body

    def _check_client(self) -> None:
        """Raise ConnectionError if the client has gone."""
        with suppress(BlockingIOError):
            if not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise ConnectionError

    def _event(self, data: Any) -> None:
        """An event of a stream, which ends with the connection."""
        if not self._streams:
            self._streams = self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
