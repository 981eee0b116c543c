"""A panel as options of ECharts: plain data, without functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keel.analysis.panels import Panel, Series
from keel.analysis.plots import COLOURS

_SMALL = (
    "(v) => Math.abs(v) < 1e-3 ? String(Number(v.toPrecision(3)))"
    " : v.toLocaleString('en', {maximumSignificantDigits: 5})"
)
"""How the page writes the figures of an axis."""
GREY = "#888888"
"""Text and axes: legible on a light and on a dark page."""


def options(
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
