"""Who may ask the server: this machine, or who brings the token. Plain ASGI."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "keel-view"


class Guard:
    """Refuses requests and websockets that do not come from where they may.

    The `Host` header must name one of `hosts`, against a foreign name that resolves to this machine
    (DNS rebinding); an `Origin` must be the host, and what browsers say that another site asks
    for must be a page of its own (a followed link), no image or frame of that site. With a
    `token`, a request needs it, once as `?token=` and then as the cookie that this sets.
    `before` is called before each request that is let in.
    """

    def __init__(
        self,
        app: App,
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
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        # Browsers send a cookie to every port of a host: a name of its own for each server.
        port = headers.get("host", "").rpartition(":")[2]
        name = f"{COOKIE}-{port}" if port.isdecimal() else COOKIE
        wrong = self._wrong_host(headers)
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        by_query = self._fits(given)
        by_cookie = self._fits(_cookie(headers.get("cookie", ""), name))
        if wrong is None and not by_query and not by_cookie:
            wrong = "this page needs the token that the command printed: open the address with it"
        if wrong is not None:
            await _refuse(scope, receive, send, wrong)
            return

        self.before()

        async def with_cookie(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                added = [
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
                if self.token is not None and by_query:
                    cookie = f"{name}={self.token}; HttpOnly; SameSite=Strict; Path=/"
                    added.append((b"set-cookie", cookie.encode()))
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        await self.app(scope, receive, with_cookie)

    def _wrong_host(self, headers: dict[str, str]) -> str | None:
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


def _cookie(text: str, name: str) -> str:
    try:
        found = SimpleCookie(text).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


async def _refuse(scope: Scope, receive: Receive, send: Send, why: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": why[:120]})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": (why + "\n").encode()})
