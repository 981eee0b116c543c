"""What all pages have in common: style, header, navigation, keys, tables of links."""

from __future__ import annotations

import html
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nicegui import events, ui

from keel.analysis.text import visible
from keel.runs.rows import COMPONENT
from keel.view.address import Address
from keel.view.formulas import FORMULA_STYLE, font_face

GREY = "#888888"
"""Text and axes of a chart: legible on a light and on a dark page."""
EVERY = 2.0
"""Seconds between two looks at the files."""
PAGES = (("/", "Runs", "r"), ("/curves", "Curves", "c"), ("/rollouts", "Rollouts", "o"),
         ("/diagnosis", "Diagnosis", "d"), ("/objective", "Objective", "f"))  # fmt: skip
FONT_PATH = "/math.woff2"
STYLE = """
body { font-size: 15px; }
.q-layout { --q-primary: #0072B2; }
.body--dark .q-layout { --q-primary: #56B4E9; }
.q-layout .q-header, .body--dark .q-layout .q-header { --q-primary: #005b8f; }
.page { width: 100%; max-width: 1500px; margin: 0 auto; padding: 12px 16px 48px; gap: 14px; }
.muted { opacity: .68; font-size: 13px; line-height: 1.4; }
.panels { display: grid; gap: 14px; width: 100%;
          grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); }
.pictures { grid-template-columns: repeat(auto-fill, minmax(min(100%, 600px), 1fr)); }
.panel { border: 1px solid rgba(128,128,128,.28); border-radius: 8px; padding: 10px 12px; }
.panel h2, .page h2, .q-card h2 { font-size: 16px; font-weight: 600; line-height: 1.3; margin: 0; }
.chart { width: 100%; height: 270px; }
.text, .tokens { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
                 font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; }
.tokens { line-height: 1.75; max-height: 60vh; overflow: auto; width: 100%; }
.tok { unicode-bidi: isolate; direction: ltr; border-radius: 2px; cursor: pointer; }
.tok:hover { outline: 1px solid currentColor; }
.tok.env { font-style: italic; }
.figure { font-variant-numeric: tabular-nums; }
.q-table td, .q-table th { padding: 4px 8px; }
.q-table td { max-width: max(420px, 50vw); overflow: hidden; text-overflow: ellipsis; }
.wide td:last-child, .wide th:last-child { width: 100%; max-width: 0; }
.q-table td svg { display: block; width: 120px; height: 24px; }
.q-table td polyline { fill: none; stroke: var(--q-primary); stroke-width: 1.5; }
.q-table td a { color: inherit; text-decoration: underline; text-underline-offset: 3px; }
a:focus-visible, .tok:focus-visible { outline: 2px solid currentColor; }
a.nav { padding: 4px 10px; border-radius: 6px; color: inherit; text-decoration: none; }
a.nav:hover, a.nav.here { background: rgba(128,128,128,.22); }
.explained p { margin: 4px 0; }
.explained .panels { margin: 10px 0; }
.explained ul { margin: 0; padding-left: 20px; list-style: disc; }
@media (max-width: 600px) { .page { padding: 8px 8px 40px; } .chart { height: 230px; }
                            nav { order: 9; width: 100%; } a.nav { padding: 4px 7px; } }
"""


@dataclass(eq=False)
class Shown:
    """The address that a page shows, which changes as its user does."""

    path: str
    address: Address

    def change(self, **changes: object) -> None:
        """Show something else, and put it into the browser's address."""
        self.address = self.address.but(**changes)
        ui.navigate.history.replace(self.address.url(self.path))


Keys = Mapping[str, tuple[str, Callable[[], object]]]
"""A page's own keys: what each does, in words, and the function."""


FIELDS = ("input", "select", "textarea")
"""Elements in which a key is text, and nothing more."""


@contextmanager
def page(shown: Shown, title: str, keys: Keys | None = None) -> Iterator[None]:
    """The frame of a page: header with navigation, theme and help; the block fills it."""
    address = shown.address
    begin(title, address.theme)

    def toggle() -> None:
        shown.change(theme=other_theme(shown.address.theme))
        ui.navigate.to(shown.address.url(shown.path))

    every: dict[str, tuple[str, Callable[[], object]]] = {
        key: (f"open {name}", lambda path=path: ui.navigate.to(shown.address.url(path)))  # type: ignore[misc]
        for path, name, key in PAGES
    }
    every |= {"t": ("switch between dark and light", toggle), **(keys or {})}
    with ui.dialog() as help_, ui.card():
        every["?"] = ("this list", help_.open)
        list_keys(every)
    listen(every, ignore=(*FIELDS, "button"))
    with header(toggle, help_), ui.element("nav").style("display: flex; flex-wrap: wrap; gap: 2px"):
        for path, name, key in PAGES:
            link = ui.link(name, address.url(path)).classes("nav")
            link.props(f'title="{name} ({key})"')
            if path == shown.path:
                link.classes("here").props("aria-current=page")
    with ui.column().classes("page"):
        yield


def begin(title: str, theme: str | None) -> None:
    """The style, title and theme of a page."""
    ui.add_css(STYLE + FORMULA_STYLE + font_face(FONT_PATH))
    ui.page_title(visible(f"{title} · Keel", 120))
    ui.dark_mode({"dark": True, "light": False}.get(theme or ""))


def other_theme(theme: str | None) -> str:
    return "light" if theme == "dark" else "dark"


def listen(keys: Keys, *, ignore: Sequence[str] = FIELDS, held: bool = True) -> None:
    """Call a key's function when it is pressed; again and again while it is `held`, or once."""

    async def pressed(event: events.KeyEventArguments) -> None:
        modified = event.modifiers
        if not event.action.keydown or modified.ctrl or modified.alt or modified.meta:
            return
        name = _key(event.key)
        if name in keys:
            doing = keys[name][1]()
            if isinstance(doing, Awaitable):
                await doing

    ui.keyboard(on_key=pressed, repeating=held, ignore=list(ignore))  # type: ignore[arg-type]


def _key(key: events.KeyboardKey) -> str:
    """The name of a key; of letters the small one, in other scripts that of a Latin keyboard."""
    if len(key.name) != 1:
        return key.name
    latin = key.name if key.name.isascii() else key.code.removeprefix("Key").removeprefix("Digit")
    return latin.lower()


def list_keys(keys: Keys) -> None:
    """What each key does."""
    ui.html("<h2>Keys</h2>", sanitize=False)
    for key, (what, _) in keys.items():
        ui.label(f"{key}   {what}").classes("text")


@contextmanager
def header(toggle: Callable[[], object], help_: ui.dialog) -> Iterator[None]:
    """The bar at the top, with buttons for theme and help; the block fills its left."""
    with ui.header().classes("items-center").style("padding: 6px 14px; gap: 6px"):
        ui.label("Keel").style("font-weight: 700; margin-right: 8px")
        yield
        ui.space()
        button = ui.button(icon="contrast", on_click=toggle).props("flat round dense color=white")
        button.props('aria-label="dark or light" data-testid=theme')
        help_button = ui.button(icon="keyboard", on_click=help_.open)
        help_button.props('flat round dense color=white aria-label="keys"')


def problem(text: str) -> None:
    """An error in place of what cannot be shown."""
    ui.label(visible(text, 1_000)).props("role=alert data-testid=problem").classes("text-negative")


class Problems:
    """The errors of a page that goes on: each is shown while it lasts."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._column = ui.column()
        self._column.set_visibility(False)

    def show(self, texts: Iterable[str]) -> None:
        """Show these instead of those before."""
        found = list(dict.fromkeys(texts))
        if found == self._texts:  # a screen reader reads what is new
            return
        self._texts = found
        self._column.clear()
        self._column.set_visibility(bool(found))
        with self._column:
            for text in found:
                problem(text)


def columns_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The columns of a table, each sortable; those of numbers stand at the right."""
    out = []
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        numeric = bool(values) and all(isinstance(value, int | float) for value in values)
        align = "right" if numeric else "left"
        out.append({"name": name, "label": name.removeprefix(COMPONENT), "field": name,
                    "sortable": True, "align": align})  # fmt: skip
    return out


class LinkedTable(ui.table, component="linked_table.js"):
    """A table in which the cells of one column are links to the `link` of their row, and those of
    a column `curve` are plots of the numbers in them, from 0 to 1 in either direction.

    In a slot of `ui.table` a link would lose the focus whenever the page changes: NiceGUI compiles
    the slot's template again, and its elements are replaced. A component is compiled once.
    """

    def __init__(
        self, column: str, rows: list[dict[str, Any]], names: Sequence[str], test: str, **more: Any
    ) -> None:
        super().__init__(rows=rows, columns=columns_of(rows, names), row_key="id", **more)
        self._props["linked"] = column
        self.classes("w-full").props(f"dense flat bordered data-testid={test}")


def chart_panel(
    name: str, title: str, about: str = "", options: dict[str, Any] | None = None, note: str = ""
) -> tuple[ui.echart, ui.label]:
    """A panel with a chart and a note below it, in the element that is open."""
    with ui.element("section").classes("panel").props(f"data-testid={name}"):
        ui.html(f"<h2>{html.escape(title)}</h2>", sanitize=False)
        chart = ui.echart(options or {}, renderer="canvas").classes("chart")
        chart.props(f'role="img" aria-label="{quoted(f"{title} {about}".strip())}"')
        return chart, ui.label(note).classes("muted")


def quoted(text: str) -> str:
    """A text for the value of a property."""
    return text.replace('"', "'").replace("\\", "/")
