"""The pages of an annotator: a pair with the keys that label it, and the summary of all labels."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from nicegui import run as background
from nicegui import ui

from keel.analysis.statistics import Interval
from keel.analysis.text import visible
from keel.preferences.annotation import (
    LONGEST_NOTE,
    AnnotationProject,
    AnnotationSummary,
    Choice,
    ShownPair,
    progress,
    summarise_annotation,
)
from keel.preferences.pages.style import (
    PageAddress,
    begin_page,
    show_rubric,
    show_words,
    sign_in_page,
)
from keel.types import KeelError, shown_text
from keel.view.frame import Keys, header, list_keys, listen, other_theme, problem

R = TypeVar("R")
SHORTEST = 0.3
"""Seconds in which no one has read a pair: a key within them was pressed twice."""
EVERY = 5.0
"""Seconds between two looks at the progress."""
LONGEST = 200_000
"""Characters of a text that is shown."""
MESSAGES: dict[Choice, str] = {
    "left": "answer 1 is better",
    "right": "answer 2 is better",
    "tie": "tie",
    "skip": "skipped",
}


class LabellingPage:
    """The page of one tab. Each pair has its own keyboard: a key that was pressed on a pair that
    is shown no more does nothing."""

    def __init__(self, project: AnnotationProject, address: PageAddress) -> None:
        self.project, self.address = project, address
        self.shown: ShownPair | None = None
        self.since = 0.0
        self.busy = False
        self.status, self.failed = "", False

    async def build(self) -> None:
        """Build the page with the annotator's pair."""
        try:
            self.session = self.project.session(self.address.annotator)
        except KeelError as error:
            sign_in_page(self.project, self.address.but(annotator=""), str(error))
            return
        client = ui.context.client
        client.on_connect(lambda: self.session.connect(client.id))
        client.on_disconnect(lambda: self.session.disconnect(client.id))
        begin_page(f"{self.session.name}: label pairs", self.address)
        self._help()
        self._note_dialog()
        with header(self._toggle_theme, self.help):
            self.progress = ui.label().classes("figure")
            self.progress.props("data-testid=progress aria-live=polite")
            ui.label(visible(self.session.name)).classes("wide").style("opacity: .75")
        with ui.element("div").classes("annotate") as self.main:
            self.body = ui.element("div").classes("pair").props("data-testid=pair")
        self._font()
        await self._show()
        await self._count()
        ui.timer(EVERY, self._count)

    # ------------------------------------------------------------ what is shown

    async def _show(self) -> None:
        """Show the pair that the annotator has, with the last action below it."""
        wrong, found = await self._call(self.session.current)
        self.shown = found
        self.body.clear()
        with self.body:
            if wrong:
                ui.label(visible(wrong, 1_000)).props("role=alert data-testid=problem").classes(
                    "text-negative"
                )
            if found is not None:
                self._pair(found)
            elif not wrong:
                with ui.column().classes("items-center w-full").style("padding-top: 12vh"):
                    ui.label("No pair is left for you.").props("data-testid=finished").style(
                        "font-size: 20px; font-weight: 600"
                    )
                    ui.label("Others may still skip some, and new ones may come.")
            self._others()
            keys = self._keys().items()
            listen({key: (what, partial(self._press, do)) for key, (what, do) in keys}, held=False)
        self.since = time.monotonic()

    def _pair(self, shown: ShownPair) -> None:
        panel = ui.element("section").classes("panel prompt")
        with panel, ui.element("div").props("tabindex=0 data-testid=prompt"):
            if isinstance(shown.prompt, str):
                show_words(shown.prompt, LONGEST)
            else:
                for turn in shown.prompt:
                    ui.label(visible(turn["role"], 60)).classes("role")
                    show_words(shown_text(turn), LONGEST)
        with ui.element("div").classes("sides"):
            for name, text in (("left", shown.left), ("right", shown.right)):
                with ui.element("section").classes("panel side").props(f'aria-label="{name}"'):
                    ui.label("Answer 1" if name == "left" else "Answer 2").classes("muted")
                    show_words(text, LONGEST).props(f"tabindex=0 data-testid={name}")
        with ui.element("div").classes("choices"):
            _button("1", "Answer 1 is better", partial(self._label, "left"), "left", main=True)
            _button("t", "Tie", partial(self._label, "tie"), "tie", main=True)
            _button("2", "Answer 2 is better", partial(self._label, "right"), "right", main=True)

    def _others(self) -> None:
        """The other actions, the note, and what was done last."""
        with ui.element("div").style("display: contents") as self.note_line:
            self._show_note("" if self.shown is None else self.shown.note)
        with ui.element("div").classes("others"):
            if self.shown is None:
                _button("Enter", "Look again", self._look, "look")
            else:
                _button("s", "Skip", partial(self._label, "skip"), "skip")
                _button("n", "Note", self._open_note, "write-note")
            _button("u", "Undo", self._undo, "undo")
            _button("m", "Font", self._toggle_font, "font")
            _button("?", "Rubric" if self.project.settings.rubric else "Keys", self.help.open, "?")
            status = ui.label(visible(self.status, 500)).classes("status")
            status.classes("text-negative" if self.failed else "muted")
            status.props("data-testid=status aria-live=polite")

    def _show_note(self, note: str) -> None:
        self.note_line.clear()
        if note:
            with self.note_line:
                label = ui.label(f"Note: {visible(note, LONGEST_NOTE, prose=True)}")
                label.classes("muted").props("data-testid=note dir=auto")

    def _keys(self) -> Keys:
        left, right = partial(self._label, "left"), partial(self._label, "right")
        return {
            "1": ("answer 1 (left, or above) is better", left),
            "ArrowLeft": ("the same", left),
            "2": ("answer 2 (right, or below) is better", right),
            "ArrowRight": ("the same", right),
            "t": ("tie: both are as good", partial(self._label, "tie")),
            "s": ("skip: someone else may judge", partial(self._label, "skip")),
            "n": ("write a note on this pair", self._open_note),
            "u": ("undo your last label", self._undo),
            "m": ("monospace font, for code, or back", self._toggle_font),
            "d": ("switch between dark and light", self._toggle_theme),
            "Enter": ("look again for a pair, if there was none", self._look),
            "?": ("the rubric and the keys", self._toggle_help),
        }

    def _press(self, do: Callable[[], object]) -> object:
        """What a key does; nothing while a note is written, wherever in its dialog the focus is."""
        return None if self.note.value else do()

    def _help(self) -> None:
        with ui.dialog() as self.help, ui.card().style("max-width: 720px; width: 100%"):
            if self.project.settings.rubric is not None:
                show_rubric(self.project.settings.rubric)
            ui.html("<h2>Keys</h2>", sanitize=False)
            with ui.element("div").style(
                "display: grid; grid-template-columns: auto 1fr; gap: 4px 12px"
            ):
                for key, (what, _) in self._keys().items():
                    _kbd({"ArrowLeft": "←", "ArrowRight": "→"}.get(key, key))
                    ui.label(what)
                ui.label("Tab")
                ui.label("go to a text, to scroll it by ↑ ↓ and Page Down")

    # ------------------------------------------------------------ what is done

    async def _label(self, choice: Choice) -> None:
        shown = self.shown

        async def do() -> None:
            assert shown is not None
            wrong, _ = await self._call(partial(self.session.submit, shown, choice))
            self.status, self.failed = wrong or f"Saved: {MESSAGES[choice]}", bool(wrong)

        if shown is not None:
            await self._act(do)

    async def _undo(self) -> None:
        async def do() -> None:
            wrong, label = await self._call(self.session.undo)
            self.failed = bool(wrong)
            if label is None:
                self.status = wrong or "There is no label to undo"
                return
            _, again = await self._call(self.session.current)
            same = again is not None and again.lease.pair == label.pair
            self.status = "Undone: label it again" if same else "Undone: others have that pair"

        await self._act(do)

    async def _look(self) -> None:
        """Look for a pair if there was none; not by itself, since whoever left would get it."""

        async def do() -> None:
            self.status, self.failed = "", False

        if self.shown is None:
            await self._act(do)

    async def _act(self, do: Callable[[], Awaitable[None]]) -> None:
        """Do something, and show the pair that the annotator has then; one thing at a time."""
        if not self._ready():
            return
        self.busy = True
        try:
            await do()
            await self._show()
        finally:
            self.busy = False
        await self._count()

    def _ready(self) -> bool:
        """Whether an action is of the pair that is shown, and not of a dialog above it."""
        waiting = self.busy or time.monotonic() - self.since < SHORTEST
        return not (waiting or self.help.value or self.note.value)

    async def _call(self, do: Callable[[], R]) -> tuple[str, R | None]:
        """What a call that may wait for the disk returns; or what was wrong."""
        try:
            return "", await background.io_bound(do)
        except KeelError as error:
            return str(error), None

    async def _count(self) -> None:
        _, found = await self._call(partial(progress, self.project, self.session.name))
        if found is not None:
            self.progress.text = f"{found.made:,} of {found.wanted:,} labels · yours: {found.own:,}"

    # ------------------------------------------------------------ note, font, theme

    def _note_dialog(self) -> None:
        with ui.dialog() as self.note, ui.card().style("width: 100%; max-width: 560px"):
            self.box = ui.input(label="note on this pair (Enter keeps it)").classes("w-full")
            self.box.props(f"autofocus maxlength={LONGEST_NOTE} data-testid=note-box")
            self.box.on("keydown.enter", self._keep_note)
            with ui.row():
                ui.button("Keep", on_click=self._keep_note).props("no-caps")
                ui.button("Cancel", on_click=self.note.close).props("flat no-caps")

    async def _open_note(self) -> None:
        if self.shown is None or not self._ready():
            return
        self.busy = True  # no other pair may take this one's place meanwhile
        try:
            _, note = await self._call(partial(self.session.note, self.shown))
        finally:
            self.busy = False
        self.box.value, self.box.error = note or "", None
        self.note.open()

    async def _keep_note(self) -> None:
        if self.shown is None:
            return
        note = self.box.value
        wrong, _ = await self._call(partial(self.session.set_note, self.shown, note))
        self.box.error = wrong or None
        if not wrong:
            self.note.close()
            self._show_note(note.strip())

    def _toggle_help(self) -> None:
        self.help.set_value(not self.help.value)

    def _toggle_font(self) -> None:
        self._change(font="" if self.address.font else "mono")
        self._font()

    def _font(self) -> None:
        self.main.classes(
            add="mono" if self.address.font else "", remove="" if self.address.font else "mono"
        )

    def _toggle_theme(self) -> None:
        self._change(theme=other_theme(self.address.theme))
        ui.navigate.to(self.address.url("/"))

    def _change(self, **changes: str) -> None:
        """Put it into the browser's address, so that a reload keeps it."""
        self.address = self.address.but(**changes)
        ui.navigate.history.replace(self.address.url("/"))


def _kbd(key: str) -> None:
    with ui.element("kbd"):
        ui.label(key)


def _button(
    key: str, name: str, do: Callable[[], object], testid: str, *, main: bool = False
) -> None:
    button = ui.button(on_click=do).props(f"no-caps data-testid=do-{testid}")
    button.props("outline" if main else "flat dense")
    with button:
        _kbd(key)
        ui.label(name)


SUMMARY_EVERY = 3.0
"""Seconds between two looks at the store."""


async def summary_page(project: AnnotationProject, address: PageAddress) -> None:
    """Build the page."""
    begin_page("Summary of the labels", address)

    def toggle() -> None:
        ui.navigate.to(address.but(theme=other_theme(address.theme)).url("/summary"))

    keys = {"d": ("switch between dark and light", toggle)}
    with ui.dialog() as help_, ui.card():
        list_keys(keys)
    listen(keys, held=False)
    with header(toggle, help_):
        ui.label("Summary of the labels")
    with ui.column().classes("page"):
        body = ui.column().classes("w-full").props("data-testid=summary")
        if project.settings.rubric is not None:
            with ui.expansion("the rubric").classes("w-full"):
                show_rubric(project.settings.rubric)
    look = partial(summarise_annotation, project)
    seen: list[AnnotationSummary] = []

    async def refresh() -> None:
        try:
            found = await background.io_bound(look)
        except KeelError as error:
            body.clear()
            with body:
                problem(str(error))
            seen.clear()
            return
        # Compared as text: NaN, which an interval may be, is not equal to itself.
        if found is not None and [str(found)] != [str(one) for one in seen]:
            seen[:] = [found]
            body.clear()
            with body:
                _show(found)

    await refresh()
    ui.timer(SUMMARY_EVERY, refresh)


def _show(found: AnnotationSummary) -> None:
    with ui.element("div").classes("figures"):
        _figure("labels", f"{found.made:,} of {found.wanted:,}", "without skips and gold")
        _figure("accuracy on gold", *_interval(found.gold), testid="gold")
        for size in found.agreement:
            judges = f"{size['judges']} people a pair"
            _figure(f"agree, {judges}", *_agreement(size["pairwise"]), testid="agreement")
            _figure(f"Fleiss’ κ, {judges}", *_agreement(size["fleiss_kappa"]), testid="kappa")
    rows = [_row(one) for one in found.annotators]
    if not rows:
        ui.label("There is no label yet.").classes("muted")
        return
    columns = [
        {"name": name, "label": name, "field": name, "align": "left" if at == 0 else "right"}
        for at, name in enumerate(rows[0])
    ]
    table = ui.table(rows=rows, columns=columns, row_key="annotator").classes("w-full")
    table.props("dense flat bordered data-testid=annotators")
    ui.label(
        "left: how often the answer shown at the left was preferred, of those preferred at all; "
        "far from 50 % it suggests a bias to one side. Intervals: 95 %."
    ).classes("muted")


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    gold, around = _interval(one["gold"])
    seconds, cost, sided = one["seconds_per_label"], one["cost"], one["sided"]
    return {
        "annotator": visible(one["annotator"], 60) or "(no name)",
        **{name: one[name] for name in ("labels", "ties", "skips")},
        "left": f"{100 * one['first_shown'] / sided:.0f} %" if sided else "–",
        "seconds a label": "–" if seconds is None else f"{seconds:.1f}",
        "cost": "–" if cost is None else f"${cost:,.2f}",
        "accuracy on gold": f"{gold} {around}",
    }


def _interval(share: Interval) -> tuple[str, str]:
    if share.n == 0:
        return "–", "no label of gold yet"
    around = "" if math.isnan(share.low) else f"[{100 * share.low:.0f}, {100 * share.high:.0f}] "
    return f"{100 * share.mean:.0f} %", f"{around}of {share.n:,}"


def _agreement(value: Mapping[str, Any]) -> tuple[str, str]:
    pairs = f"{value['n']:,} pairs"
    if math.isnan(value["mean"]):
        return "undefined", pairs
    known = not math.isnan(value["low"])
    around = f"[{value['low']:.2f}, {value['high']:.2f}], " if known else ""
    return f"{value['mean']:.2f}".replace("-", "−"), around.replace("-", "−") + pairs


def _figure(name: str, value: str, more: str, testid: str = "figure") -> None:
    with ui.element("section").classes("panel").props(f"data-testid={testid}"):
        ui.label(name).classes("muted")
        ui.label(value).classes("value figure")
        ui.label(more).classes("muted figure")
