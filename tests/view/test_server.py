"""The server of pages: the address that it takes, and who may ask."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from keel.platform.listen import LOOPBACK, listen
from keel.types import KeelError
from keel.view.server import COOKIE, MAX_UNOPENED, Guard, forget_unopened

OK = {"type": "http.response.start", "status": 200, "headers": []}


async def page(scope: Any, receive: Any, send: Any) -> None:
    await send(dict(OK))
    await send({"type": "http.response.body", "body": b"page"})


def ask(
    guard: Guard, headers: dict[str, str], query: str = "", kind: str = "http"
) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    raw = [(key.encode(), value.encode()) for key, value in headers.items()]
    scope = {"type": kind, "headers": raw, "query_string": query.encode()}
    asyncio.run(guard(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8765", 200),
        ("localhost:8765", 200),
        ("[::1]:8765", 200),
        ("evil.example:8765", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
        ("[::1", 403),
    ],
)
def test_host_must_be_the_loopback(host: str, status: int) -> None:
    guard = Guard(page, LOOPBACK, None)
    assert ask(guard, {"host": host})[0]["status"] == status


def test_requests_of_another_site_are_refused() -> None:
    guard = Guard(page, LOOPBACK, None)
    own = {"host": "localhost:1", "origin": "http://localhost:1"}
    assert ask(guard, own, kind="websocket")[0]["type"] == "http.response.start"
    other = {"host": "localhost:1", "origin": "http://evil.example"}
    assert ask(guard, other)[0]["status"] == 403
    assert ask(guard, other, kind="websocket")[0]["type"] == "websocket.close"


@pytest.mark.parametrize(
    ("site", "mode", "dest", "status"),
    [
        ("cross-site", "no-cors", "image", 403),
        ("cross-site", "no-cors", "script", 403),
        ("cross-site", "navigate", "iframe", 403),
        ("cross-site", "cors", "empty", 403),
        ("cross-site", "navigate", "document", 200),
        ("same-origin", "no-cors", "image", 200),
        ("none", "navigate", "document", 200),
    ],
)
def test_other_sites_may_link_but_not_embed(site: str, mode: str, dest: str, status: int) -> None:
    let_in: list[int] = []
    guard = Guard(page, LOOPBACK, None, before=lambda: let_in.append(1))
    fetched = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest}
    assert ask(guard, {"host": "localhost:1", **fetched})[0]["status"] == status
    assert len(let_in) == (status == 200)


def test_token_opens_by_query_and_then_by_cookie() -> None:
    guard = Guard(page, None, "secret")
    host = {"host": "10.0.0.1:1"}
    assert ask(guard, host)[0]["status"] == 403
    assert ask(guard, host, "token=wrong")[0]["status"] == 403
    opened = ask(guard, host, "token=secret")[0]
    assert opened["status"] == 200
    cookie = dict(opened["headers"])[b"set-cookie"].decode()
    assert cookie.startswith(f"{COOKIE}-1=secret; HttpOnly; SameSite=Strict")
    assert ask(guard, {**host, "cookie": f"{COOKIE}-1=secret"})[0]["status"] == 200
    assert ask(guard, {**host, "cookie": f"{COOKIE}-1=other"})[0]["status"] == 403
    assert ask(guard, host, kind="websocket")[0]["type"] == "websocket.close"


@pytest.mark.parametrize("hosts", [("10.0.0.1:1", "10.0.0.1:2"), ("[fd00::1]", "[fd00::1]:2")])
def test_cookies_of_servers_on_two_ports_are_apart(hosts: tuple[str, str]) -> None:
    """A browser sends both to each of them."""
    guards = [Guard(page, None, token) for token in ("first", "second")]
    cookies = []
    for host, guard in zip(hosts, guards, strict=True):
        opened = ask(guard, {"host": host}, f"token={guard.token}")[0]
        cookies.append(dict(opened["headers"])[b"set-cookie"].decode().partition(";")[0])
    assert len({cookie.partition("=")[0] for cookie in cookies}) == 2
    for host, guard in zip(hosts, guards, strict=True):
        assert ask(guard, {"host": host, "cookie": "; ".join(cookies)})[0]["status"] == 200


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_port_that_listens_is_taken(host: str, family: int) -> None:
    with listen(host, None) as first, listen(host, None) as second:
        assert first.family == second.family == family
        ports = [taken.getsockname()[1] for taken in (first, second)]
        assert ports[0] != ports[1]
        for port in ports:
            with pytest.raises(KeelError, match=f"cannot serve on {host}:{port}: Address already"):
                listen(host, port)
    with listen(host, ports[1]) as again:  # a server that ended leaves its port free
        assert again.getsockname()[1] == ports[1]


@pytest.mark.slow
def test_pages_without_a_browser_are_bounded() -> None:
    simulated = pytest.importorskip("tests.view.simulated")
    from nicegui import Client, ui

    async def use(user: Any) -> None:
        for _ in range(MAX_UNOPENED + 9):
            assert (await user.http_client.get("/")).status_code == 200
        unopened = [one for one in Client.instances.values() if not one.has_socket_connection]
        assert len(unopened) == MAX_UNOPENED + 9
        forget_unopened()
        left = set(Client.instances.values())
        assert left == {*unopened[9:], user.client}

    simulated.simulate(lambda: ui.label("a page"), use)
