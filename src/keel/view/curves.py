"""The first screen of a run: its status, its objective, its curves; of several runs, overlaid."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nicegui import events, ui
from nicegui import run as background

from keel.analysis.panels import Panel, Series, series_of
from keel.analysis.text import visible
from keel.types import KeelError
from keel.view import charts
from keel.view.address import Address
from keel.view.frame import EVERY, Problems, Shown, page
from keel.view.library import Library, OpenRun, formula_of, panels, pictures_of, status_of

WIDEST = 101
"""Steps that the slider's mean is of at most."""
MOST = 24
"""Runs that are overlaid at most."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What was read of the runs: the versions of their files, the stage and the status of the
    first, what could not be read, and whether a run's folder was made again."""

    versions: list[tuple[int, int]]
    stage: str
    status: str
    problems: list[str]
    replaced: bool


def curves_page(library: Library, address: Address, price: float | None) -> None:
    """Build the page."""
    runs = library.chosen(address.run)[:MOST]
    shown = Shown("/curves", address.but(run=tuple(run.name for run in runs)))
    files = _read(library, runs, address.stage, price)
    stage = files.stage
    with page(shown, runs[0].name):
        problems = Problems()
        problems.show(files.problems)
        status = _heading(shown, runs, files)
        _smoothing(shown, lambda: draw())
        with ui.element("div").classes("panels"):
            plotted = [
                _panel(panel, _curves(shown.address, runs, stage, panel), shown.address)
                for panel in panels(runs[0], stage)
            ]
        pictures(runs[0], stage)

    async def draw() -> None:
        for panel, chart in plotted:
            made = _curves(shown.address, runs, stage, panel)
            chart.options.update(charts.options(panel, made, dark=shown.address.theme == "dark"))
            chart.update()
            await asyncio.sleep(0)

    async def refresh() -> None:
        nonlocal files
        found = await background.io_bound(_read, library, runs, address.stage, price)
        if found is None:  # while the server ends
            return
        problems.show(found.problems)
        status.text = found.status
        if found.versions == files.versions and not found.replaced:
            return
        files = found
        same = found.stage == stage and len(plotted) == len(panels(runs[0], stage))
        if found.replaced or not same:
            timer.cancel()
            ui.navigate.reload()
            return
        await draw()

    timer = ui.timer(EVERY, refresh)


def _read(
    library: Library, runs: Sequence[OpenRun], stage: str | None, price: float | None
) -> RunFiles:
    """Read what was written since; a run that cannot be read keeps what was read before."""
    problems: list[str] = []
    replaced = False
    for run in runs:
        try:
            run.update()
            replaced |= library.get(run.name) is not run
        except KeelError as error:
            problems.append(str(error))
    versions = [(run.metrics.version, run.timings.version) for run in runs]
    shown, status = runs[0].stage(stage), ""
    try:
        status = " · ".join(status_of(runs[0], shown, price).parts())
    except KeelError as error:
        problems.append(str(error))
    return RunFiles(versions, shown, status, problems, replaced)


def _heading(shown: Shown, runs: Sequence[OpenRun], files: RunFiles) -> ui.label:
    """The names, objective and choices of the runs, and the status, which is returned."""
    run, stage = runs[0], files.stage
    with ui.row().classes("items-center").style("gap: 6px 18px"):
        ui.label(visible(" · ".join(one.name for one in runs), 300)).style("font-weight: 600")
        status = ui.label(files.status).classes("figure").props("data-testid=status")
    for text in formula_of(run, stage):
        ui.html(text, sanitize=False).classes("formula").props("data-testid=formula")
    with ui.row().classes("items-center").style("gap: 6px 14px"):
        if len(run.run.stages) > 1:
            stages = ui.select(list(run.run.stages), value=stage, label="stage")
            stages.style("min-width: 90px").on_value_change(lambda e: _open(shown, stage=e.value))
        if len(runs) > 1:
            how = {"runs": "each run", "algorithms": "mean of each algorithm"}
            overlay = ui.select(how, value=shown.address.overlay or "runs", label="overlay")
            overlay.on_value_change(lambda e: _open(shown, overlay=e.value))
    return status


class SmoothingSlider(ui.slider):
    """A slider that the browser moves: an answer of the server would undo the keys since."""

    LOOPBACK = False


def _smoothing(shown: Shown, draw: Callable[[], Awaitable[None]]) -> None:
    """The slider of the moving mean's width, which the address keeps."""

    def words(width: int) -> str:
        return "each step" if width == 1 else f"mean of {width} steps"

    async def chosen(event: events.GenericEventArguments) -> None:
        width = int(event.args)  # not the slider's value, which another event brings, maybe later
        shown.change(smooth=width if width > 1 else None)
        await draw()

    with ui.row().classes("items-center no-wrap w-full").style("gap: 14px"):
        ui.label("smoothing")
        slider = SmoothingSlider(min=1, max=WIDEST, step=2, value=_window(shown.address))
        slider.props('aria-label="smoothing: steps of the mean" data-testid=smooth')
        slider.style("flex: 0 1 180px; min-width: 60px")
        slider.on("update:model-value", chosen, throttle=0.3, leading_events=False)
        text = ui.label().classes("figure muted").style("min-width: 130px")
        text.bind_text_from(slider, "value", words)


def _window(address: Address) -> int:
    return min(max(address.smooth or 1, 1), WIDEST)


def _open(shown: Shown, **changes: Any) -> None:
    shown.change(**changes)
    ui.navigate.to(shown.address.url(shown.path))


def _panel(
    panel: Panel, curves: Sequence[tuple[str, Sequence[Series]]], address: Address
) -> tuple[Panel, ui.echart]:
    with ui.element("section").classes("panel").props(f"data-testid=panel-{panel.key}"):
        title = visible(panel.title, 100)
        ui.html(f"<h2>{html.escape(title)}</h2>", sanitize=False)
        made = charts.options(panel, curves, dark=address.theme == "dark")
        chart = ui.echart(made, renderer="canvas").classes("chart")
        chart.props(f'role="img" aria-label="{quoted(title)} over the steps"')
        ui.label(panel.help).classes("muted")
    return panel, chart


def _curves(
    address: Address, runs: Sequence[OpenRun], stage: str, panel: Panel
) -> list[tuple[str, Sequence[Series]]]:
    """The series of each run; with several, of one line: the first that all have, or any."""
    window, points = _window(address), 600 if len(runs) < 4 else 200
    made = [
        series_of(panel, run.columns(run.stage(stage)), window=window, points=points)
        for run in runs
    ]
    if len(runs) > 1:
        of_runs = [[one.line for one in series] for series in made]
        some = [line for line in panel.lines if any(line in lines for lines in of_runs)]
        common = [line for line in some if all(line in lines for lines in of_runs)]
        chosen = (common or some)[:1]
        made = [[one for one in series if one.line in chosen] for series in made]
    if len(runs) == 1 or address.overlay != "algorithms":
        return list(zip(names_of(runs), made, strict=True))
    groups: dict[str, list[Series]] = {}
    for run, series in zip(runs, made, strict=True):
        groups.setdefault(run.algorithm, []).extend(series)
    return [(name, [_mean(several)]) for name, several in groups.items() if several]


def names_of(runs: Sequence[OpenRun]) -> list[str]:
    """What tells the runs apart in a legend: algorithm and seed; of those that share them also two
    keys of the recipe that differ, or else their names."""
    if len(runs) == 1:
        return [runs[0].name]
    short = [f"{run.algorithm} seed {run.seed}" for run in runs]
    tables = [dict(_leaves(run.recipe)) for run in runs]
    names = []
    for name, table, run in zip(short, tables, runs, strict=True):
        same = [t for other, t in zip(short, tables, strict=True) if other == name]
        keys = [k for k in table if len({repr(t.get(k)) for t in same}) > 1]
        keys = [k for k in keys if not re.search(r"\.(name|description|algorithm)\b", k)]
        words = [f"({run.name})"] if len(same) > 1 else []
        for few in (keys[:2], keys[:1]):
            if len({repr([t.get(k) for k in few]) for t in same}) == len(same):
                words = [f"{k.rpartition('.')[2]}={table[k]}" for k in few]
        names.append(" ".join([name, *words]))
    return names


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree of tables and lists, each with its path."""
    if not isinstance(value, dict | list):
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(inner, f"{path}.{key}")


def _mean(several: Sequence[Series]) -> Series:
    """The mean of runs at the steps that all have."""
    end = min(float(one.steps[-1]) for one in several)
    start = max(float(one.steps[0]) for one in several)
    longest = max(several, key=lambda one: len(one.steps))
    steps = longest.steps[(longest.steps >= start) & (longest.steps <= end)]
    values = np.mean([np.interp(steps, one.steps, one.values) for one in several], axis=0)
    first = several[0]
    label = f"{first.label}, mean of {len(several)}" if len(several) > 1 else first.label
    return Series(first.line, label, steps, values)


def pictures(run: OpenRun, stage: str) -> None:
    """What a stage plotted of its reward model or of over-optimisation, and a game's film."""
    found = pictures_of(run, stage)
    found += [("film", path) for path in (run.folder.film,) if path.is_file()]
    if not found:
        return
    with ui.element("div").classes("panels pictures"):
        for title, path in found:
            with ui.element("section").classes("panel"):
                ui.label(title).style("font-weight: 600")
                ui.image(path).props(f'alt="{quoted(title)}"').style("max-width: 100%")


def quoted(text: str) -> str:
    """A text for the value of a property."""
    return text.replace('"', "'").replace("\\", "/")
