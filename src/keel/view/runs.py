"""The list of runs, the diagnosis of one, and its objective."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from nicegui import run as background
from nicegui import ui

from keel.analysis.diagnosis.table import Diagnosis, diagnose
from keel.analysis.text import visible
from keel.runs.reader import Column
from keel.types import KeelError
from keel.view.address import Address
from keel.view.formulas import explanation_html, explanation_of
from keel.view.frame import EVERY, LinkedTable, Problems, Shown, page, problem
from keel.view.library import Library


def runs_page(library: Library, address: Address) -> None:
    """Build the page: all runs, of which one or several can be opened."""
    shown = Shown("/", address)
    with page(shown, "runs"):
        problems = Problems()
        rows = _lines(library, address)
        names = list(dict.fromkeys(name for row in rows for name in row))
        names = [name for name in names if name not in ("id", "link")]
        with ui.row().classes("items-center"):
            button = ui.button("open the curves of the selected").props(
                "outline no-caps data-testid=open"
            )
            ui.label("select several to lay their curves over each other").classes("muted")
        table = LinkedTable("run", rows, names, "runs", selection="multiple", pagination=25)

        def open_selected() -> None:
            chosen = table.selected or table.rows[:1]
            ui.navigate.to(_link(address, *(row["id"] for row in chosen)))

        button.on_click(open_selected)
        table.on("rowClick", lambda e: ui.navigate.to(e.args[1]["link"]))

    async def refresh() -> None:
        wrong: list[str] = []
        try:
            found = await background.io_bound(_lines, library, address)
        except KeelError as error:  # all runs were removed
            found, wrong = [], [str(error)]
        if found is None:  # while the server ends
            return
        problems.show(wrong)
        if found != table.rows:
            table.rows = found

    ui.timer(EVERY, refresh)


def _lines(library: Library, address: Address) -> list[dict[str, Any]]:
    return [_line(library, name, _link(address, name)) for name in library.names()]


def _link(address: Address, *names: str) -> str:
    return address.but(run=names).url("/curves")


def _line(library: Library, name: str, link: str) -> dict[str, Any]:
    try:
        run = library.get(name)
        facts = run.facts()
        columns = run.columns(run.stage())
    except KeelError as error:
        state = visible(str(error), 100)
        return {"id": name, "run": visible(name, 80), "state": state, "link": link}
    line: dict[str, Any] = {"id": name}
    for key, value in facts.items():
        line[key] = value
        if key == "measure":
            line["curve"] = _curve(columns[value]) if value else None
    if not line["tags"]:
        del line["tags"]
    return {**line, "link": link}


def _curve(column: Column) -> str:
    """A column as the points of a line in a box of 100 to 20, the highest value at its top."""
    at = np.unique(np.linspace(0, len(column.values) - 1, 60).round().astype(int))
    values = column.values[at]
    low, high = np.nanmin(values), np.nanmax(values)
    share = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    across = np.linspace(0, 100, len(at))
    points = zip(across, 20 - 20 * share, strict=True)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points if math.isfinite(y))


def objective_page(library: Library, address: Address) -> None:
    """Build the page: what the run optimises, term by term, and its recipe."""
    run = library.chosen(address.run)[0]
    with page(Shown("/objective", address.but(run=(run.name,))), f"objective of {run.name}"):
        ui.label(visible(run.name, 100)).style("font-weight: 600")
        none = "this run has no stage of reinforcement learning on a language model"
        recorded = str(run.run.info().get("objective", none))
        made = [explanation_of(run, stage) for stage in run.run.stages]
        for one in filter(None, made):
            html = ui.html(explanation_html(one), sanitize=False)
            html.classes("explained w-full").props("data-testid=formula")
        if not any(made):
            ui.label(visible(recorded, lines=True)).classes("text")
        with ui.expansion("the resolved recipe").classes("w-full"):
            recipe = run.folder.recipe.read_text(encoding="utf-8")
            ui.label(visible(recipe, 100_000, lines=True)).classes("text")


def diagnosis_page(library: Library, address: Address) -> None:
    """Build the page: what is wrong with the run, with evidence and the key to change."""
    run = library.chosen(address.run)[0]
    shown = Shown("/diagnosis", address.but(run=(run.name,)))
    with page(shown, f"diagnosis of {run.name}"):
        ui.label(visible(run.name, 100)).style("font-weight: 600")
        column = ui.column().classes("w-full").props("data-testid=diagnosis")
        with column:
            ui.label("reading the run …").classes("muted")

    async def fill() -> None:
        damaged: list[str] = []
        try:
            found = await background.io_bound(diagnose, run.run, damaged)
        except KeelError as error:
            column.clear()
            with column:
                problem(str(error))
            return
        column.clear()
        with column:
            for name in damaged:
                problem(f"rollouts/{name} is damaged and left out")
            if not found:
                ui.label("No problem found.")
            for one in found or ():
                _diagnosis(shown, one)

    ui.timer(0.05, fill, once=True)


def _diagnosis(shown: Shown, one: Diagnosis) -> None:
    with ui.element("section").classes("panel w-full"):
        with ui.row().classes("items-center"):
            ui.badge(one.severity, color="negative" if one.severity == "error" else "warning")
            ui.label(visible(one.title, 300)).style("font-weight: 600")
            ui.label(f"{one.stage}, steps {one.first_step} to {one.last_step}").classes("muted")
        for title, lines in (("evidence", one.evidence), ("likely causes", one.causes)):
            ui.label(title).classes("muted")
            for line in lines:
                ui.label(visible(line, 600))
        ui.label("what to change").classes("muted")
        for change in one.changes:
            ui.label(visible(str(change), 600))
        for sample in one.samples:
            address = shown.address.but(stage=one.stage, step=sample.step, row=sample.row)
            ui.link(f"step {sample.step}, completion {sample.row}", address.url("/rollouts"))
