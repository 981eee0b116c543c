"""The server of pages: who may ask, and the pages of `keel view`. Torch-free."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from keel.platform.extras import install_command
from keel.platform.listen import fits, listen, shown_token, token_for, url_of, wrong_host
from keel.types import KeelError
from keel.view.address import Address

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from keel.view.library import Library


MAX_UNOPENED = 64
"""Pages that wait for their browser at most: each holds some 300 kB, for a minute."""


def require_nicegui(command: str, instead: str = "") -> None:
    """Raises KeelError if NiceGUI is not installed; `instead` names another way."""
    if importlib.util.find_spec("nicegui") is None:
        raise KeelError(f"{command} needs NiceGUI: {install_command('view')}{instead}")


def serve_pages(
    command: str,
    start: str,
    *,
    host: str,
    port: int | None,
    browser: bool,
    announce: Callable[[str], None],
    others: Sequence[str] = (),
) -> None:
    """Serve the pages that were defined until interrupted; `start` and `others` are announced.

    `port` None takes 8765, or a free one if that is taken. On another host than the loopback a
    token is needed, which the announced addresses hold: a new one, or that of `KEEL_TOKEN`, by its
    name.

    Raises KeelError if the address is taken.
    """
    from nicegui import app, ui

    token, hosts = token_for(host)
    app.add_middleware(Guard, hosts=hosts, token=token, before=forget_unopened)
    query, shown = (
        ("", "") if token is None else (f"?token={token}", f"?token={shown_token(token)}")
    )
    with listen(host, port) as listener:
        port = int(listener.getsockname()[1])
        url = url_of(host, port)

        def ready() -> None:
            announce(f"{command}: {url}{start}{shown} (Ctrl-C stops it)")
            for path in others:
                announce(f"{path.strip('/')}: {url}{path}{shown}")

        app.on_startup(ready)
        ui.run(
            host=host,
            port=port,
            fd=listener.fileno(),
            title="Keel",
            favicon="📈",
            dark=None,
            reload=False,
            show=f"{start}{query}" if browser else False,
            show_welcome_message=False,
        )


def forget_unopened() -> None:
    """Delete the oldest pages to which no browser is connected, all but `MAX_UNOPENED`."""
    from nicegui import Client

    waiting = [one for one in Client.instances.values() if not one.has_socket_connection]
    for client in waiting[:-MAX_UNOPENED]:
        client.delete()


COOKIE = "keel-view"


class Guard:
    """Refuses requests and websockets from hosts and pages that may not ask.

    Headers must fit `hosts` (see `wrong_host`). With a `token`, a request needs it, once as
    `?token=` and then as the cookie that this sets. `before` is called before each request that is
    let in.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Sequence[str] | None,
        token: str | None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.app, self.before = app, before
        self.hosts, self.token = hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        # NiceGUI brings Starlette, and may be missing.
        from starlette.datastructures import MutableHeaders
        from starlette.requests import HTTPConnection
        from starlette.responses import PlainTextResponse
        from starlette.websockets import WebSocketClose

        asked = HTTPConnection(scope)
        # Browsers send a cookie to every port of a host: a name of its own for each server.
        port = asked.headers.get("host", "").rpartition(":")[2]
        name = f"{COOKIE}-{port}" if port.isdecimal() else COOKIE
        token = self.token
        wrong = wrong_host(asked.headers, self.hosts)
        by_query = fits(asked.query_params.get("token", ""), token)
        by_cookie = fits(asked.cookies.get(name, ""), token)
        if wrong is None and not by_query and not by_cookie:
            wrong = (
                "this page needs ?token= and the token, of KEEL_TOKEN or as the command printed it"
            )
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


def serve(
    folders: Sequence[Path | str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    price: float | None = None,
    browser: bool = True,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the pages of the runs in and below `folders` until interrupted.

    `host` and `port` as in `serve_pages`. `price` is of an hour of the machine.

    Raises KeelError if there is no run, NiceGUI is missing, or the address is taken.
    """
    require_nicegui("keel view", " (keel report writes one HTML file without it)")
    from nicegui import app, ui

    from keel.view.curves import curves_page
    from keel.view.formulas import FONT
    from keel.view.frame import FONT_PATH, Shown, page, problem
    from keel.view.library import Library
    from keel.view.rollouts import RolloutsPage
    from keel.view.runs import diagnosis_page, objective_page, runs_page

    library = Library(folders)
    start = "/curves" if len(library.names()) == 1 else "/"

    def add(path: str, build: Callable[[Library, Address], None]) -> None:
        @ui.page(path)
        def _page() -> None:
            address = Address.read(ui.context.client.request.query_params.multi_items())
            try:
                build(library, address)
            except KeelError as error:  # of a run that is damaged, or gone
                with page(Shown(path, address), "problem"):
                    problem(str(error))

    add("/", runs_page)
    add("/curves", partial(curves_page, price=price))
    add("/rollouts", lambda library, address: RolloutsPage(library, address).build())
    add("/diagnosis", diagnosis_page)
    add("/objective", objective_page)
    app.add_static_file(local_file=FONT, url_path=FONT_PATH)
    _preload(library)
    serve_pages("keel view", start, host=host, port=port, browser=browser, announce=announce)


def _preload(library: Library) -> None:
    """Read the newest runs before someone asks, so that the first page is quick."""
    for name in library.names()[:8]:
        try:
            library.get(name).update()
        except KeelError:
            continue  # its page says what is wrong
