"""The server of `keel view`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from keel.types import KeelError
from keel.view.address import Address
from keel.view.formula import FONT
from keel.view.library import Library
from keel.view.server import require_nicegui, serve_pages


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
    from keel.view.frame import FONT_PATH, Shown, page, problem
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
