"""The first screen of a run: its status, its objective, its curves; of several runs, overlaid."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nicegui import events, ui
from nicegui import run as background

from keel.analysis.metrics import Panel, Series, series_of
from keel.analysis.plots import COLOURS
from keel.analysis.text import visible
from keel.types import KeelError
from keel.view.address import Address
from keel.view.formulas import formula_of
from keel.view.frame import EVERY, GREY, Problems, Shown, chart_panel, page, quoted
from keel.view.histograms import HistogramPanels, newest_rollouts
from keel.view.library import Library, OpenRun, panels, pictures_of, status_of

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
    newest = newest_rollouts(runs[0], stage) if len(runs) == 1 else None
    with page(shown, runs[0].name):
        problems = Problems()
        problems.show(files.problems)
        status = _heading(runs, files)
        with ui.row().classes("items-center w-full").style("gap: 6px 18px"):
            _choices(shown, runs, files.stage)
            _smoothing(shown, lambda: draw())
            if runs[0].rollout_steps():
                ui.link("newest rollouts", shown.address.url("/rollouts"))
        with ui.element("div").classes("panels"):
            plotted = [
                _panel(panel, _curves(shown.address, runs, stage, panel), shown.address)
                for panel in panels(runs[0], stage)
            ]
            dark = shown.address.theme == "dark"
            histograms = None if newest is None else HistogramPanels(newest, dark)
        pictures(runs[0], stage)

    async def draw() -> None:
        for panel, chart in plotted:
            made = _curves(shown.address, runs, stage, panel)
            chart.options.update(chart_options(panel, made, dark=shown.address.theme == "dark"))
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
        if len(runs) > 1:
            return
        read = await background.io_bound(newest_rollouts, runs[0], stage)
        if read is None:
            return
        if histograms is None:  # the first that there are
            ui.navigate.reload()
        else:
            histograms.show(read)

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


def _heading(runs: Sequence[OpenRun], files: RunFiles) -> ui.label:
    """The names and objective of the runs, and the status, which is returned."""
    run, stage = runs[0], files.stage
    with ui.row().classes("items-center").style("gap: 6px 18px"):
        ui.label(visible(" · ".join(one.name for one in runs), 300)).style("font-weight: 600")
        status = ui.label(files.status).classes("figure").props("data-testid=status")
    for text in formula_of(run, stage):
        ui.html(text, sanitize=False).classes("formula").props("data-testid=formula")
    return status


def _choices(shown: Shown, runs: Sequence[OpenRun], stage: str) -> None:
    """Which stage is shown, and how several runs are."""
    names = runs[0].run.stages
    if len(names) > 1:
        stages = ui.select(list(names), value=stage, label="stage").props("dense")
        stages.style("min-width: 90px").on_value_change(lambda e: _open(shown, stage=e.value))
    if len(runs) > 1:
        how = {"runs": "each run", "algorithms": "mean of each algorithm"}
        overlay = ui.select(how, value=shown.address.overlay or "runs", label="overlay")
        overlay.props("dense").on_value_change(lambda e: _open(shown, overlay=e.value))


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

    with ui.row().classes("items-center no-wrap").style("gap: 14px; flex: 0 1 420px"):
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
    made = chart_options(panel, curves, dark=address.theme == "dark")
    title = visible(panel.title, 100)
    chart, _ = chart_panel(f"panel-{panel.key}", title, "over the steps", made, panel.help)
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


_SMALL = (
    "(v) => Math.abs(v) < 1e-3 ? String(Number(v.toPrecision(3)))"
    " : v.toLocaleString('en', {maximumSignificantDigits: 5})"
)
"""How the page writes the figures of an axis."""


def chart_options(
    panel: Panel, curves: Sequence[tuple[str, Sequence[Series]]], *, dark: bool = False
) -> dict[str, Any]:
    """The options of a panel; `curves` are the series of each run, with its name.

    With one run colours tell the lines apart, with several the runs. Drag and wheel zoom; a double
    click on the tool box's arrow resets.
    """
    several = len(curves) > 1
    series: list[dict[str, Any]] = []
    right = False
    for number, (name, lines) in enumerate(curves):
        for at, one in enumerate(lines):
            label = name if several else one.label
            colour = _colour(number if several else at, dark)
            series += _line(one, label, colour, band=not several)
            right = right or one.line.right
    # Of several runs one line is shown, which the axis names.
    shown = {one.label: "" for _, lines in curves for one in lines} if several else {}
    axes = [_axis(", ".join(filter(None, [*shown, panel.unit])), right=False)]
    if right:
        axes.append({**_axis(panel.right_unit, right=True), "splitLine": {"show": False}})
    names = [one["name"] for one in series if not one.get("stack")]
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "aria": {"enabled": True},
        "textStyle": {"color": GREY},
        "grid": {"left": 8, "right": 12, "top": 40, "bottom": 26, "containLabel": True},
        "legend": {
            "type": "scroll",
            "bottom": 0,
            "left": 0,
            "right": 0,
            "itemWidth": 18,
            "data": names,
            "textStyle": {"color": GREY},
        },
        "tooltip": {"trigger": "axis", "confine": True, "renderMode": "richText"},
        "toolbox": {
            "left": "center",  # axes' names stand at both sides
            "top": -10,
            "itemSize": 13,
            "feature": {"dataZoom": {"yAxisIndex": False}},
        },
        "dataZoom": [{"type": "inside", "filterMode": "none", "zoomOnMouseWheel": "ctrl"}],
        "xAxis": {
            "type": "value",
            "min": "dataMin",
            "max": "dataMax",
            "axisLabel": {"color": GREY, "hideOverlap": True},
            "axisLine": {"onZero": False, "lineStyle": {"color": GREY}},
            "splitLine": {"show": False},
        },
        "yAxis": axes,
        "series": series,
    }


def _line(one: Series, label: str, colour: str, *, band: bool) -> list[dict[str, Any]]:
    axis = int(one.line.right)
    steps = one.steps.tolist()
    made: dict[str, Any] = {
        "type": "line",
        "name": label,
        "yAxisIndex": axis,
        "data": [[step, _short(value)] for step, value in zip(steps, one.values, strict=True)],
        "showSymbol": one.line.points or len(steps) < 2,
        "symbolSize": 7,
        "lineStyle": {"width": 2, "color": colour},
        "itemStyle": {"color": colour},
        "emphasis": {"focus": "series"},
    }
    if not band or one.low is None or one.high is None:
        return [made]
    hidden = {
        "type": "line",
        "yAxisIndex": axis,
        "stack": f"band of {label}",
        "stackStrategy": "all",
        "symbol": "none",
        "silent": True,
        "lineStyle": {"opacity": 0},
        "tooltip": {"show": False},
    }
    low = [[s, _short(v)] for s, v in zip(steps, one.low, strict=True)]
    width = [[s, _short(h - v)] for s, v, h in zip(steps, one.low, one.high, strict=True)]
    area = {"color": colour, "opacity": 0.15}
    return [
        {**hidden, "name": f"low of {label}", "data": low},
        {**hidden, "name": f"band of {label}", "data": width, "areaStyle": area},
        made,
    ]


def _axis(unit: str, right: bool) -> dict[str, Any]:
    # From the outer edge inwards: centred on the axis, a long unit is cut by the edge of the panel.
    align = {"align": "right" if right else "left", "padding": [0, -28, 0, -28]}
    return {
        "type": "value",
        "scale": True,
        "name": unit,
        "nameTextStyle": {"color": GREY, **align},
        "axisLabel": {"color": GREY, ":formatter": _SMALL},
        "splitLine": {"lineStyle": {"color": GREY, "opacity": 0.2}},
    }


def _colour(number: int, dark: bool) -> str:
    colour = COLOURS[number % len(COLOURS)]
    return "#dddddd" if dark and colour == "#000000" else colour


def _short(value: float) -> float | None:
    """Five figures are enough for a plot; None if there is no number."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
