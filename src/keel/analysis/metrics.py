"""The metrics of a run: what each means (glossary.toml), and in which panels (panels.toml).

`keel view`, `keel report` and the pictures of a run plot the panels, so that all show the same.
`python -m keel.analysis.metrics` prints docs/metrics.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from keel.config.entry import stage_kind
from keel.runs.reader import Array, Column, Run


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of them: what it is, its unit, what to watch for."""

    name: str
    meaning: str
    unit: str
    watch: str = ""


@cache
def sections() -> dict[str, tuple[Metric, ...]]:
    """The metrics of each section of the glossary, by its title."""
    text = files("keel.analysis").joinpath("glossary.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)["section"]
    return {one["title"]: tuple(Metric(**entry) for entry in one["metric"]) for one in tables}


def look_up(name: str) -> Metric | None:
    """The glossary's entry for a metric; an exact name goes before a pattern. None: unknown."""
    metrics = [metric for section in sections().values() for metric in section]
    for metric in metrics:
        if metric.name == name:
            return metric
    fitting = [metric for metric in metrics if fnmatchcase(name, metric.name)]
    # The most particular of the patterns: `eval/*/low` before `eval/pass@*` for eval/pass@4/low.
    return max(fitting, key=lambda metric: (metric.name[-1] != "*", len(metric.name)), default=None)


def unknown(names: Iterable[str]) -> list[str]:
    """Those of the names that the glossary does not hold."""
    return [name for name in names if look_up(name) is None]


INTRO = """\
# Metrics

The columns of `metrics.jsonl`. Names are TRL's if TRL has one; a `*` stands for a name or a number.
In parentheses is the unit, unless the description names it; shares are from 0 to 1; in italics is
what to watch for. Every record also has `stage` and `step` (from 1 within the stage; 0: before
training); a number that is not finite is `null`. Times (seconds by phase, the `total`) and the last
section are in `timings.jsonl`. What a reward function records with `log_metric`, or a callback with
`control.log`, has the name that it gives.
"""


def markdown() -> str:
    """The glossary as the page docs/metrics.md."""
    lines = [INTRO.rstrip()]
    for title, metrics in sections().items():
        lines += ["", f"## {title}", ""]
        for metric in metrics:
            plain = metric.unit == "1" or metric.unit.partition(",")[0] in metric.meaning.lower()
            unit = "" if plain else f" ({metric.unit})"
            watch = f" *{metric.watch}*" if metric.watch else ""
            lines.append(f"- `{metric.name}`{unit}: {metric.meaning}{watch}")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- panels


@dataclass(frozen=True, slots=True)
class Line:
    """A metric of a panel, by name or pattern; `label` names it in the legend.

    `band` are the metrics of a band's lower and upper end, of which `*` is the line's own, or of a
    half width around the line ("±NAME"). A line on the `right` axis has another unit.
    """

    metric: str
    label: str
    band: tuple[str, ...] = ()
    right: bool = False
    points: bool = False
    """Values of few steps, such as evaluations, which are marked and never smoothed."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot: its lines, and what explains it: the glossary's entry for a metric, or a text."""

    key: str
    title: str
    explains: str
    lines: tuple[Line, ...]
    unit: str = ""
    right_unit: str = ""

    @property
    def help(self) -> str:
        """What the plotted quantity is, and what to watch for."""
        entry = look_up(self.explains)
        text = self.explains if entry is None else " ".join((entry.meaning, entry.watch))
        return text.strip().replace("`", "")


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """A line with its points, ready to plot; `low` and `high` are None without a band.

    `raw` are the steps and values before they were smoothed, if they were.
    """

    line: Line
    label: str
    steps: Array
    values: Array
    low: Array | None = None
    high: Array | None = None
    raw: tuple[Array, Array] | None = None


@cache
def tables() -> dict[str, tuple[Panel, ...]]:
    """The panels of each table of panels.toml, by its name."""
    text = files("keel.analysis").joinpath("panels.toml").read_text(encoding="utf-8")
    return {name: tuple(map(_panel, panels)) for name, panels in tomllib.loads(text).items()}


def _panel(table: Mapping[str, Any]) -> Panel:
    """A panel; what it leaves out of explanation and units is that of its metrics."""
    lines = tuple(Line(**{**one, "band": tuple(one.get("band", ()))}) for one in table["lines"])
    own = {
        "title": "",
        "explains": lines[0].metric,
        "unit": _unit([line for line in lines if not line.right]),
        "right_unit": _unit([line for line in lines if line.right]),
    }
    return Panel(**{**own, **table, "lines": lines})


def _unit(lines: Sequence[Line]) -> str:
    """The unit that the glossary gives all of the lines, without limits; empty if they differ."""
    entries = [look_up(line.metric) for line in lines]
    units = {entry.unit.partition(",")[0] for entry in entries if entry is not None}
    return units.pop() if len(units) == 1 and units != {"1"} else ""


def panels_of(kind: str, names: Sequence[str], *, alone: bool = False) -> list[Panel]:
    """The panels of a kind of stage of which some metric is there; of games any other kind. Then
    those of the metrics that reward functions recorded, which the glossary does not know.

    `alone`: a group is one completion. The value model, or else the spread over all prompts, then
    has the place of the variance in groups.
    """
    config = stage_kind(kind)
    panels = tables().get("control" if config is None else config.panels or "", ())
    if alone and has_rollouts(kind):
        reward, _, *rest, value = panels
        learned = any(name.startswith("value/") for name in names)
        panels = (reward, value if learned else tables()["spread"][0], *rest)
    timed = _present(tables()["speed"], names)
    return [*_present(panels, names), *timed, *_recorded(unknown(names))]


def picture_panels(kind: str, columns: Mapping[str, Column]) -> list[Panel]:
    """The panels of the picture curve.png: what a stage gains, and how surely."""
    found = _present(
        tables()["picture" if has_rollouts(kind) else "picture_of_games"], list(columns)
    )
    return [panel for panel in found if panel.key != "spread" or columns["reward_std"].values.any()]


def panel_of(name: str) -> Panel:
    """A panel of one metric, with its interval if it has one."""
    ends = ("*/low", "*/high")
    line = Line(name, name, ends, points=name.partition("/")[0] == "eval")
    return Panel(name, name, name, (line,))


def has_rollouts(kind: str) -> bool:
    """Whether stages of a kind learn from rollouts."""
    config = stage_kind(kind)
    return config is not None and bool(config.learns_from_rollouts)


def _present(panels: Sequence[Panel], names: Sequence[str]) -> list[Panel]:
    """The panels of which some metric is there."""
    return [
        panel
        for panel in panels
        if any(fnmatchcase(name, line.metric) for line in panel.lines for name in names)
    ]


def _recorded(names: Sequence[str]) -> list[Panel]:
    """A panel for each of the names; one for all that have the same part before a slash."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(name.partition("/")[0], []).append(name)
    text = "Recorded by a reward function with log_metric, or by a callback with control.log."
    return [
        Panel(
            f"recorded-{at}",
            group if len(of_group) > 1 else of_group[0],
            text,
            tuple(Line(name, name.removeprefix(f"{group}/")) for name in of_group),
        )
        for at, (group, of_group) in enumerate(groups.items(), start=1)
    ]


def stage_columns(run: Run, stage: str) -> Mapping[str, Column]:
    """The metrics of a stage; evaluations begin with the one before its first step."""
    return with_first(run.columns(stage), run.info(), stage)


def with_first(
    columns: Mapping[str, Column], info: Mapping[str, Any], stage: str
) -> Mapping[str, Column]:
    """The columns with what was evaluated before the first step, which `info` (run.json) has, as
    values of step 0."""
    found: dict[str, Any] = {}
    for kind in ("evaluation", "measured"):
        before = info.get(kind, {}).get(stage, {}).get("before", {})
        own = {before.get("measure", "pass@1"): before} if "mean" in before else {}
        for of, one in before.get("sets", {}).items():
            parts = {**one, one.get("measure", "pass@1"): one}
            own |= {f"{of}/{name}": value for name, value in parts.items()}
        for name, value in {**before, **own}.items():
            ends = value if isinstance(value, Mapping) else {"mean": value}
            found |= {f"eval/{name}/{end}": ends[end] for end in ends}
            found[f"eval/{name}"] = ends.get("mean")
    return {
        name: Column(np.array([0.0, *column.steps]), np.array([found[name], *column.values]))
        if isinstance(found.get(name), int | float) and 0 not in column.steps
        else column
        for name, column in columns.items()
    }


def series_of(
    panel: Panel, columns: Mapping[str, Column], *, window: int = 1, points: int = 600
) -> list[Series]:
    """The lines of a panel: smoothed by a moving mean of `window` steps, thinned to `points`."""
    at = columns.get("environment_steps")
    found = []
    for line in panel.lines:
        for name, label in _named(line, panel, columns):
            found.append(_series(line, label, name, columns, at, window, points))
    return [one for one in found if len(one.steps)]


def _named(line: Line, panel: Panel, names: Iterable[str]) -> list[tuple[str, str]]:
    """The metrics of a line with their labels; of a pattern those that no other line has."""
    if line.metric in names:
        return [(line.metric, line.label)]
    others = {one.metric for one in panel.lines}
    fitting = [name for name in names if fnmatchcase(name, line.metric) and name not in others]
    fitting = sorted(name for name in fitting if not name.endswith(("/low", "/high")))
    if line.metric.startswith("rewards/") and len(fitting) < 2:
        return []  # one component is the reward itself
    start, _, end = line.metric.partition("*")
    cut = [name.removeprefix(start).removesuffix(end) for name in fitting]
    return [(name, line.label.replace("*", part)) for name, part in zip(fitting, cut, strict=True)]


def _series(
    line: Line,
    label: str,
    name: str,
    columns: Mapping[str, Column],
    at: Column | None,
    window: int,
    points: int,
) -> Series:
    column = columns[name]
    known = np.isfinite(column.values)
    steps = column.steps[known]
    values = column.values[known]
    low = high = None
    if len(line.band) == 1:
        half = _on(columns.get(line.band[0].removeprefix("±")), steps)
        if half is not None:
            low, high = values - half, values + half
            if values.size and values.min() >= 0 and values.max() <= 1:
                # Such rewards are shares: a band outside of them would show what cannot be.
                low, high = low.clip(min=0), high.clip(max=1)
    elif line.band:
        low, high = (_on(columns.get(end.replace("*", name)), steps) for end in line.band)
    smoothed = window > 1 and not line.points
    if at is not None:  # games count the steps of their environments
        steps = np.interp(steps, at.steps, at.values)

    def shown(part: Array) -> Array:
        return _thin(smooth(part, window) if smoothed else part, points)

    return Series(
        line,
        label,
        steps=_thin(steps, points),
        values=shown(values),
        low=None if low is None else shown(low),
        high=None if high is None else shown(high),
        raw=(_thin(steps, points), _thin(values, points)) if smoothed else None,
    )


def smooth(values: Array, window: int) -> Array:
    """Centred moving mean: y_i = mean of what there is of x_{i−h} … x_{i+h}, h = window // 2.

    NaN is left out; it stays where there is nothing else.
    """
    half, known = window // 2, ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(values))
    first, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    count = counts[end] - counts[first]
    mean = (sums[end] - sums[first]) / np.maximum(count, 1)
    return np.where(count > 0, mean, np.nan)


def _on(column: Column | None, steps: Array) -> Array | None:
    """The values of a column at these steps, NaN if it has none; None without the column."""
    if column is None or not len(column.steps):
        return None
    at = np.searchsorted(column.steps, steps).clip(max=len(column.steps) - 1)
    return np.where(column.steps[at] == steps, column.values[at], np.nan)


def _thin(values: Array, points: int) -> Array:
    """At most `points` of the values, each the mean of neighbours."""
    if len(values) <= points:
        return values
    starts = np.linspace(0, len(values), points + 1).astype(int)
    sums = np.add.reduceat(values, starts[:-1])
    return np.asarray(sums / np.diff(starts))


if __name__ == "__main__":
    print(markdown(), end="")
