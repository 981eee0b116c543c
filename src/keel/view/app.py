"""The server of `keel view`."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from keel.types import KeelError
from keel.view.address import Address
from keel.view.guard import LOOPBACK, Guard
from keel.view.library import Library


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

    `port` None takes 8765, or a free one where that is taken. On another host than the loopback a
    new token is needed, which the announced address holds. `price` is of an hour of the machine.

    Raises KeelError where there is no run, NiceGUI is missing, or the address is taken.
    """
    try:
        from nicegui import app, ui
    except ImportError as error:
        raise KeelError(
            "keel view needs NiceGUI: pip install 'keel-rl[view]' (keel report writes one HTML "
            "file without it)"
        ) from error
    from keel.view.curves import curves_page
    from keel.view.frame import Shown, page, problem
    from keel.view.rollouts import rollouts_page
    from keel.view.runs import diagnosis_page, objective_page, runs_page

    library = Library(folders)
    local = host in LOOPBACK
    token = None if local else secrets.token_urlsafe(24)
    port = _free_port(host, port)
    start = "/curves" if len(library.names()) == 1 else "/"

    def show(build: Callable[[Library, Address], None], path: str) -> None:
        address = Address.read(ui.context.client.request.query_params.multi_items())
        try:
            build(library, address)
        except KeelError as error:  # of a run that is damaged, or gone
            with page(Shown(path, address), "problem"):
                problem(str(error))

    @ui.page("/")
    def _runs() -> None:
        show(runs_page, "/")

    @ui.page("/curves")
    def _curves() -> None:
        show(partial(curves_page, price=price), "/curves")

    @ui.page("/rollouts")
    def _rollouts() -> None:
        show(rollouts_page, "/rollouts")

    @ui.page("/diagnosis")
    def _diagnosis() -> None:
        show(diagnosis_page, "/diagnosis")

    @ui.page("/objective")
    def _objective() -> None:
        show(objective_page, "/objective")

    _preload(library)
    app.add_middleware(Guard, hosts=LOOPBACK if local else None, token=token)
    named = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        named = socket.gethostname()
    query = "" if token is None else f"?token={token}"
    url = f"http://{named}:{port}{start}{query}"
    app.on_startup(lambda: announce(f"keel view: {url} (Ctrl-C stops it)"))
    ui.run(
        host=host,
        port=port,
        title="Keel",
        favicon="📈",
        dark=None,
        reload=False,
        show=f"{start}{query}" if browser else False,
        show_welcome_message=False,
    )


def _preload(library: Library) -> None:
    """Read the newest runs before someone asks, so that the first page is quick."""
    for name in library.names()[:8]:
        try:
            library.get(name).update()
        except KeelError:
            continue  # its page says what is wrong


def _free_port(host: str, wanted: int | None) -> int:
    """The port to bind; raises KeelError where it is taken, or the host is not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (8765, 0) if wanted is None else (wanted,):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                why = error.strerror or error
                if wanted is None and port != 0:
                    continue
                raise KeelError(
                    f"cannot serve on {host}:{port}: {why}: choose another --port or --host"
                ) from error
            return int(probe.getsockname()[1])
    raise KeelError(f"no free port on {host}: name one with --port")
