"""Who may ask the server: this machine, or who brings the token."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "keel-view"


class Guard:
    """Refuses requests and websockets from hosts and pages that may not ask.

    The `Host` header must name one of `hosts`, against a foreign name that resolves to this machine
    (DNS rebinding); an `Origin` must be the host, and what browsers say that another site asks
    for must be a page of its own (a followed link), no image or frame of that site. With a
    `token`, a request needs it, once as `?token=` and then as the cookie that this sets.
    `before` is called before each request that is let in.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str] | None,
        token: str | None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.app, self.before = app, before
        self.hosts = None if hosts is None else {host.lower() for host in hosts}
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        asked = HTTPConnection(scope)
        # Browsers send a cookie to every port of a host: a name of its own for each server.
        port = asked.headers.get("host", "").rpartition(":")[2]
        name = f"{COOKIE}-{port}" if port.isdecimal() else COOKIE
        wrong = self._wrong_host(asked.headers)
        by_query = self._fits(asked.query_params.get("token", ""))
        by_cookie = self._fits(asked.cookies.get(name, ""))
        if wrong is None and not by_query and not by_cookie:
            wrong = "this page needs the token that the command printed: open the address with it"
        if wrong is not None:
            refusal: ASGIApp = PlainTextResponse(f"{wrong}\n", 403)
            if scope["type"] == "websocket":
                await receive()
                refusal = WebSocketClose(1008, wrong[:120])
            await refusal(scope, receive, send)
            return

        self.before()

        async def with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.append("x-content-type-options", "nosniff")
                headers.append("referrer-policy", "no-referrer")
                if self.token is not None and by_query:
                    cookie = f"{name}={self.token}; HttpOnly; SameSite=Strict; Path=/"
                    headers.append("set-cookie", cookie)
            await send(message)

        await self.app(scope, receive, with_cookie)

    def _wrong_host(self, headers: Mapping[str, str]) -> str | None:
        try:
            host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
            origin = urlsplit(headers.get("origin", "")).netloc
        except ValueError:
            return "this server does not understand the request's host or origin"
        if self.hosts is not None and host not in self.hosts:
            return f"this server does not answer for the host {host!r}"
        of_others = headers.get("sec-fetch-site") == "cross-site"
        followed = headers.get("sec-fetch-dest") == "document"
        foreign = "origin" in headers and origin != headers.get("host")
        if foreign or (of_others and not followed):
            return "this server does not answer pages of other sites"
        return None

    def _fits(self, given: str) -> bool:
        return self.token is None or hmac.compare_digest(given.encode(), self.token.encode())
