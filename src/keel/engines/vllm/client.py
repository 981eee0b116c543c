"""vLLM's HTTP API: completions in token ids, health, and its weight transfer endpoints."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from keel.types import KeelError

SHOWN = 300
"""Characters of a server's message that an error repeats."""


class ServerFailure(Exception):
    """The server gave no usable reply; another server may."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the server sampled for one request, and vLLM's reason for its end."""

    tokens: list[int]
    log_probs: list[float]
    finish: str


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connections_to(url: str) -> Callable[[float], http.client.HTTPConnection]:
    """What opens a connection to http://HOST:PORT or unix:PATH, with a timeout in seconds.

    Raises KeelError where `url` is neither.
    """
    kind, _, path = url.partition(":")
    if kind == "unix" and path and "\0" not in path:
        return lambda timeout: _UnixConnection(path, timeout)
    with suppress(ValueError, http.client.InvalidURL):
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
        if parts.scheme == "http" and host and parts.path in ("", "/"):
            http.client.HTTPConnection(host, port)  # checks the name
            return lambda timeout: http.client.HTTPConnection(host, port, timeout=timeout)
    raise KeelError(
        f"rollout.vllm.url = {url!r} is no address: write http://HOST:PORT or unix:PATH"
    )


class VllmClient:
    """Sends requests, each on a connection of its own; `timeout` seconds limit each.

    Methods may be called from several threads. `close` ends all requests that are under way.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._connection = connections_to(url)
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def complete(self, model: str, prompt: list[int], settings: Mapping[str, Any]) -> Sampled:
        """Sample one completion of a prompt in token ids."""
        body = {
            "model": model,
            "prompt": prompt,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,  # they are text, as in the native engine
            **settings,
        }
        found = self.request("POST", "/v1/completions", body)
        try:
            choice = found["choices"][0]
            tokens = [int(number) for number in choice["token_ids"]]
            scores = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            finish = str(choice["finish_reason"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise KeelError(
                f"the server at {self.url} returns no token ids with log-probs "
                f"({type(error).__name__}: {error}): it needs vLLM 0.32"
            ) from None
        if finish not in ("stop", "length") or len(tokens) != len(scores) or not tokens:
            raise ServerFailure(f"a completion ended with finish reason {finish!r}")
        return Sampled(tokens, scores, finish)

    def healthy(self) -> bool:
        """Whether the server answers and its engine runs."""
        try:
            self.request("GET", "/health", timeout=5.0)
        except (ServerFailure, KeelError):
            return False
        return True

    def model(self) -> str:
        """The name of the model that the server has. Raises KeelError where it lists none."""
        found = self.request("GET", "/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise KeelError(
                f"rollout.vllm.url = {self.url!r}: the server there lists no model in /v1/models; "
                "give the address of a vLLM server"
            ) from None

    def prepare_updates(self, info: Mapping[str, Any]) -> None:
        """Set the weight transfer up. Raises KeelError where the server was started without it."""
        self.request("POST", "/init_weight_transfer_engine", {"init_info": info})

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """One update of the weights, within the block; generation is paused, then without cache."""
        self.request("POST", "/pause?mode=wait")
        try:
            self.request("POST", "/start_weight_update")
            yield
            self.request("POST", "/finish_weight_update", {"weight_version": str(version)})
            self.request("POST", "/reset_prefix_cache")
        finally:
            self.request("POST", "/resume")

    def update_weights(self, info: Mapping[str, Any]) -> None:
        """Let the server take weights in, as its backend reads `info`; only within `updating`."""
        self.request("POST", "/update_weights", {"update_info": info})

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = 0.0
    ) -> Any:
        """The JSON of a reply, None where it has no content.

        Raises ServerFailure where the connection fails, the deadline passes or the server reports
        an error of its own, KeelError where it refuses the request.
        """
        limit = timeout or self.timeout
        connection = self._connection(limit)
        with self._lock:
            self._open.add(connection)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            raise ServerFailure(
                f"{path} of {self.url} gives no answer within {limit:g} s (rollout.timeout)"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerFailure(
                f"the connection to {self.url} failed in {path} ({type(error).__name__})"
            ) from None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if response.status >= 500:
            raise ServerFailure(f"{path} of {self.url}: HTTP {response.status}: {_shown(content)}")
        if response.status >= 300:
            raise KeelError(
                f"the server at {self.url} refuses {path} (HTTP {response.status}: "
                f"{_shown(content)}): see docs/howto/vllm.md for how it has to be started"
            )
        try:
            return json.loads(content) if content.strip() else None
        except ValueError:
            raise ServerFailure(f"{path} of {self.url}: a reply that is no JSON") from None

    def busy(self) -> bool:
        """Whether a request is under way."""
        with self._lock:
            return bool(self._open)

    def close(self) -> None:
        """End all requests that are under way; vLLM aborts what no client waits for."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)


def _shown(content: bytes) -> str:
    return " ".join(content.decode("utf-8", "replace").split())[:SHOWN]
