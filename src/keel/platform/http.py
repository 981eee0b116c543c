"""HTTP requests with JSON to a server of ours: by TCP or a Unix socket, ended from any thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from typing import Any

import httpx2

from keel.platform.loop_thread import LoopThread

NONE_KEPT = httpx2.Limits(max_keepalive_connections=0)
"""A connection for each request, so that a client that is dropped leaves none open."""


class HttpFailure(Exception):
    """No reply came: the connection failed, or the time was over."""


def transport_to(url: str) -> tuple[str, httpx2.AsyncHTTPTransport]:
    """The base address and the transport to http://HOST:PORT or unix:PATH.

    Raises ValueError if `url` is neither.
    """
    kind, _, path = url.partition(":")
    if kind == "unix" and path and "\0" not in path:
        return "http://localhost", httpx2.AsyncHTTPTransport(uds=path, limits=NONE_KEPT)
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(str(error)) from None
    named = parts.scheme == "http" and parts.host and " " not in url
    if not named or (parts.port or 80) > 65535 or parts.path not in ("", "/"):
        raise ValueError("it is not http://HOST:PORT")
    return url, httpx2.AsyncHTTPTransport(limits=NONE_KEPT)


class HttpClient:
    """Sends requests, from any thread; `cancel` ends all that are under way."""

    def __init__(self, url: str) -> None:
        base, transport = transport_to(url)
        self._http = httpx2.AsyncClient(base_url=base, transport=transport, timeout=None)
        self._loop = LoopThread()
        self._lock = threading.Lock()
        self._under_way: set[Future[httpx2.Response]] = set()

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> tuple[int, bytes]:
        """The status and the content of a reply. Raises HttpFailure, or TimeoutError."""
        _, future = self._loop.run(self._http.request(method, path, json=body))
        with self._lock:
            self._under_way.add(future)
        try:
            response = future.result(seconds)
        except TimeoutError:
            raise
        except (httpx2.HTTPError, CancelledError, OSError) as error:
            raise HttpFailure(type(error).__name__) from None
        finally:
            future.cancel()
            with self._lock:
                self._under_way.discard(future)
        return response.status_code, response.content

    def busy(self) -> bool:
        """Whether a request is under way."""
        with self._lock:
            return bool(self._under_way)

    def cancel(self) -> None:
        """End all requests that are under way."""
        with self._lock:
            futures = list(self._under_way)
        for future in futures:
            future.cancel()
