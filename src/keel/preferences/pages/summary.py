"""The summary page: progress, annotators, gold, agreement. Live."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from nicegui import run as background
from nicegui import ui

from keel.analysis.statistics import Interval
from keel.analysis.text import visible
from keel.preferences.annotation import AnnotationProject, AnnotationSummary, summarise_annotation
from keel.preferences.pages.style import PageAddress, begin_page, show_rubric
from keel.types import KeelError
from keel.view.frame import header, list_keys, listen, other_theme, problem

EVERY = 3.0
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
    ui.timer(EVERY, refresh)


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
