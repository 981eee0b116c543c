"""The pages of `keel prefs annotate`, and their server."""

from __future__ import annotations

from keel.preferences.annotation import AnnotationProject
from keel.view.server import require_nicegui, serve_pages

COMMAND = "keel prefs annotate"
PATIENCE = 120.0
"""Seconds that a page may take to build: a large store is read for it."""


def serve_annotation(
    project: AnnotationProject,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = True,
) -> None:
    """Serve the pages on which people label pairs, and their summary, until interrupted.

    `host` and `port` as in `serve_pages`. Raises KeelError if NiceGUI is missing, or the address
    is taken.
    """
    require_nicegui(COMMAND)
    from nicegui import ui

    from keel.preferences.pages.labelling import LabellingPage, summary_page
    from keel.preferences.pages.style import PageAddress, sign_in_page

    def address() -> PageAddress:
        return PageAddress.read(ui.context.client.request.query_params)

    @ui.page("/", response_timeout=PATIENCE)
    async def _labelling() -> None:
        shown = address()
        if shown.annotator:
            await LabellingPage(project, shown).build()
        else:
            sign_in_page(project, shown)

    @ui.page("/summary", response_timeout=PATIENCE)
    async def _summary() -> None:
        await summary_page(project, address())

    serve_pages(
        COMMAND,
        "/",
        host=host,
        port=port,
        browser=browser,
        announce=print,
        others=("/summary",),
    )
