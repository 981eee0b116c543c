"""HTTP requests with JSON: to a server of ours by TCP or a Unix socket; one to any address."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from keel.platform.calls import LoopThread

T = TypeVar("T")
BUSY = (408, 425, 429)
"""Statuses that are tried again, as all from 500 on are."""
FIRST_WAIT, LONGEST_WAIT = 0.25, 8.0
SHOWN = 200
"""Characters of a server's message that an error repeats."""
NONE_KEPT = httpx2.Limits(max_keepalive_connections=0)
"""A connection for each request, so that a client that is dropped leaves none open."""


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
    """Sends requests in an event loop of its own; one that is cancelled closes its connection."""

    def __init__(self, url: str) -> None:
        base, transport = transport_to(url)
        self._http = httpx2.AsyncClient(base_url=base, transport=transport, timeout=None)
        self._loop = LoopThread()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Let the loop run what sends requests; from any thread."""
        return self._loop.run(work)[1]

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> tuple[int, bytes]:
        """The status and the content of a reply. Raises ConnectionError, or TimeoutError."""
        return await _sent(self._http.request(method, path, json=body), seconds)


async def exchange_json(
    url: str, body: Any, seconds: float, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """The status and the content of the reply to a POST to any address, by a connection of its own
    in the caller's event loop. Raises ConnectionError, or TimeoutError."""
    async with httpx2.AsyncClient(limits=NONE_KEPT, timeout=None) as client:
        return await _sent(client.post(url, json=body, headers=headers), seconds)


async def answer_to(
    url: str, body: Any, seconds: float, retries: int, headers: Mapping[str, str] | None = None
) -> bytes:
    """The content of the answer to a POST, after as many requests as it takes.

    Raises ConnectionError, with what came in its place, if there is none or one that refuses.
    """
    wait = FIRST_WAIT
    for left in range(retries, -1, -1):
        try:
            status, content = await exchange_json(url, body, seconds, headers)
        except TimeoutError:
            why = f"did not answer within {seconds:g} s"
        except ConnectionError as error:
            why = f"cannot be reached ({error})"
        else:
            if 200 <= status < 300:
                return content
            why = f"answered with status {status}: {shown(content)}"
            if status < 500 and status not in BUSY:
                raise ConnectionError(why)
        if left:
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
    raise ConnectionError(f"{why} ({retries + 1} requests)")


def shown(content: bytes) -> str:
    """The beginning of what a server sent, on one line, for a message."""
    return repr(" ".join(content.decode(errors="replace").split())[:SHOWN])


async def _sent(request: Coroutine[Any, Any, httpx2.Response], seconds: float) -> tuple[int, bytes]:
    try:
        async with asyncio.timeout(seconds):
            response = await request
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ConnectionError(type(error).__name__) from None
    return response.status_code, response.content


def check_url(url: str) -> None:
    """Raise ValueError for an address that is not http://HOST… or https://HOST…"""
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.host or " " in url:
        raise ValueError("it is not http://HOST… or https://HOST…")
