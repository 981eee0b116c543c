"""How the rewards and the lengths of the newest rollouts of a stage are distributed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keel.analysis.plots import COLOURS
from keel.analysis.statistics import Array
from keel.view.frame import GREY, chart_panel
from keel.view.library import OpenRun

BINS, FEW = 20, 5
"""Bars at most, and different values that have a bar each, however far apart."""
TITLES = {"reward": "Rewards", "length": "Lengths in tokens"}


@dataclass(frozen=True, slots=True, eq=False)
class Distributions:
    """The rewards and lengths of the completions of a step."""

    step: int
    values: Mapping[str, Array]


def newest_rollouts(run: OpenRun, stage: str) -> Distributions | None:
    """Of the last step of a stage whose file can be read; None if there is none."""
    number = run.run.stages.index(stage)
    for entry in reversed(run.folder.list_rollouts()):
        if entry.place.stage != number:
            continue
        try:
            table = pq.read_table(entry.path, columns=["reward", "written"], use_threads=False)
        except (OSError, pa.ArrowException):
            continue
        rewards = np.array(table["reward"].to_pylist(), np.float64)
        lengths = np.array([sum(one) for one in table["written"].to_pylist()], np.float64)
        found = {"reward": rewards[np.isfinite(rewards)], "length": lengths}
        return Distributions(entry.place.step, found)
    return None


def bars(values: Array) -> list[tuple[str, int]]:
    """The counts of values, or of equal ranges of them, with what each bar is of."""
    different, counts = np.unique(values, return_counts=True)
    low, high = (float(different[0]), float(different[-1])) if len(different) else (0.0, 0.0)
    if high - low < BINS and bool(np.all(different == np.round(different))):
        counts = np.bincount((values - low).astype(int))
        return [(f"{low + at:.0f}", int(n)) for at, n in enumerate(counts)]
    if len(different) <= FEW:
        return [(f"{value:.4g}", int(n)) for value, n in zip(different, counts, strict=True)]
    counts, edges = np.histogram(values, BINS)
    ends = zip(edges[:-1], edges[1:], counts, strict=True)
    return [(f"{start:.3g} to {end:.3g}", int(n)) for start, end, n in ends]


def histogram_options(values: Array, dark: bool) -> dict[str, Any]:
    """The options of a chart of bars."""
    made = bars(values)
    axis = {"axisLabel": {"color": GREY, "hideOverlap": True}}
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "aria": {"enabled": True},
        "grid": {"left": 8, "right": 12, "top": 16, "bottom": 8, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True, "renderMode": "richText"},
        "xAxis": {"type": "category", "data": [label for label, _ in made], **axis},
        "yAxis": {
            "type": "value",
            "minInterval": 1,
            "splitLine": {"lineStyle": {"color": GREY, "opacity": 0.2}},
            **axis,
        },
        "series": [
            {
                "type": "bar",
                "name": "completions",
                "data": [count for _, count in made],
                "barCategoryGap": "8%",
                "itemStyle": {"color": COLOURS[5] if dark else COLOURS[0]},
            }
        ],
    }


class HistogramPanels:
    """A panel for each distribution, in the element that is open."""

    def __init__(self, found: Distributions, dark: bool) -> None:
        self._dark = dark
        self._parts = {
            name: chart_panel(f"histogram-{name}", f"{title} of the newest rollouts")
            for name, title in TITLES.items()
        }
        self.show(found)

    def show(self, found: Distributions) -> None:
        """Show these."""
        for name, (chart, label) in self._parts.items():
            values = found.values[name]
            chart.options.update(histogram_options(values, self._dark))
            chart.update()
            label.text = f"{len(values):,} completions of step {found.step:,}"
