"""The files of a comparison: JSON, CSV, a picture, one HTML page. Torch-free."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from keel.analysis.comparison import (
    LEAST,
    NO_DIFFERENCE,
    Comparison,
    PairSummary,
    RunScore,
    band,
)
from keel.analysis.metrics import Line, Panel, Series, smooth
from keel.analysis.plots import COLOURS, drawing, plot_panel, svg
from keel.analysis.statistics import Array, Interval
from keel.platform import files
from keel.runs.values import plain

Curves = Mapping[str, Mapping[str, tuple[Array, Array, Array, Array]]]
"""By metric and arm: steps, interquartile mean, and the ends of its interval."""
TOO_FEW = "too few seeds for an interval"
LISTED = 20
"""Pairs up to which each has its sentence."""
TITLES = {
    "reward": "Training reward",
    "eval/pass@1": "Validation accuracy, greedy",
    "eval/reward": "Validation reward, greedy",
}


def write_files(
    folder: Path, found: Comparison, runs: Mapping[str, Sequence[RunScore]], command: str
) -> None:
    """Write comparison.json, scores.csv, curves.csv, curves.png and comparison.html."""
    curves = curves_of(runs)
    text = json.dumps({"command": command, **plain(found.as_dict())}, ensure_ascii=False, indent=2)
    files.write_text(folder / "comparison.json", text + "\n")
    files.write_text(folder / "scores.csv", _scores_csv(runs))
    files.write_text(folder / "curves.csv", _curves_csv(curves))
    if curves:
        with drawing(folder / "curves.png", _height(curves)) as figure:
            _plot(figure, curves)
    files.write_text(folder / "comparison.html", _html(found, curves, command))


def curves_of(runs: Mapping[str, Sequence[RunScore]]) -> Curves:
    """The curves of each arm, at the steps that all of its runs have."""
    found: dict[str, dict[str, tuple[Array, Array, Array, Array]]] = {}
    for metric in TITLES:
        for arm, several in runs.items():
            curves = [run.curves[metric] for run in several if metric in run.curves]
            if len(curves) < len(several) or not curves:
                continue
            steps = curves[0][0]
            for other, _ in curves[1:]:
                steps = np.intersect1d(steps, other)
            values = np.array([v[np.isin(s, steps)] for s, v in curves])
            if len(steps):
                found.setdefault(metric, {})[arm] = (steps, *band(values))
    return found


def lines(found: Comparison) -> list[str]:
    """What was found, in sentences; of more than `LISTED` pairs, only those that differ."""
    listed = [p for p in found.pairs if len(found.pairs) <= LISTED or p.statement != NO_DIFFERENCE]
    out = [_line(pair) for pair in listed]
    if len(listed) < len(found.pairs):
        out.append(
            f"{NO_DIFFERENCE} in {len(found.pairs) - len(listed)} of {len(found.pairs)} pairs: "
            "comparison.json has them all"
        )
    if len(found.pairs) > 1 and found.seeds >= LEAST:
        out.append(
            f"Intervals of scores are of 95 %, those of the {len(found.pairs)} pairs of "
            f"{100 * found.pair_confidence:.4g} % each, so that all of them hold together in 95 %."
        )
    return [*out, *found.notes]


def _line(pair: PairSummary) -> str:
    """What is known of a pair of arms."""
    difference = f"{pair.a} less {pair.b} {shown(pair.difference, pair.by_seed, TOO_FEW)}"
    if len(pair.by_seed) < LEAST:
        return f"{pair.statement}: {difference}"
    chance = f"P({pair.a} > {pair.b}) = {shown(pair.probability_of_improvement)}"
    prompts = (
        ""
        if pair.by_prompt is None
        else f"; on the same prompts {shown(pair.by_prompt, why=TOO_FEW)}"
    )
    return f"{pair.statement}: {difference}; {chance}{prompts}"


def shown(one: Interval, values: Sequence[float] = (), why: str = "") -> str:
    """A figure with its interval; without one the values that it is of, and why there is none."""
    if math.isfinite(one.low) and math.isfinite(one.high):
        return f"{one.mean:.3g} [{one.low:.3g}, {one.high:.3g}]"
    each = ", ".join(f"{value:.3g}" for value in values) if len(values) > 1 else ""
    words = ": ".join(filter(None, (each, why)))
    return f"{one.mean:.3g} ({words})" if words else f"{one.mean:.3g}"


def table(found: Comparison) -> list[list[str]]:
    """The arms with their scores and costs; the first row is the head."""
    head = ["", f"IQM of {found.measure}", "seconds", "tokens", "peak memory", "models in memory"]
    rows = [head]
    for one in found.arms:
        memory = "" if one.peak_bytes is None else f"{one.peak_bytes / 2**20:,.0f} MiB"
        models = f"{len(one.models)} ({', '.join(one.models)})"
        costs = [f"{one.seconds:,.0f}", f"{one.tokens:,.0f}", memory, models]
        rows.append([one.arm, shown(one.score, one.scores), *costs])
    return rows


def _scores_csv(runs: Mapping[str, Sequence[RunScore]]) -> str:
    head = ("arm", "seed", "measure", "score", "seconds", "tokens", "peak_bytes")
    rows = ([getattr(run, name) for name in head] for several in runs.values() for run in several)
    return _csv(head, rows)


def _curves_csv(curves: Curves) -> str:
    head = ("metric", "arm", "step", "iqm", "low", "high")
    rows = (
        [metric, arm, *values]
        for metric, arms in curves.items()
        for arm, columns in arms.items()
        for values in zip(*(column.tolist() for column in columns), strict=True)
    )
    return _csv(head, rows)


def _csv(head: Sequence[str], rows: Any) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return buffer.getvalue()


def _height(curves: Curves) -> float:
    """Of a picture, in inches: its panels and the legend below them."""
    arms = max(curves.values(), key=len)
    return 3.2 * len(curves) + 0.18 * (len(arms) / _columns(arms) + 1)


def _columns(arms: Collection[str]) -> int:
    """Of the legend."""
    return 3 if max(map(len, arms)) <= 24 else 2


def _plot(figure: Any, curves: Curves) -> None:
    panels = figure.subplots(len(curves), 1, squeeze=False)[:, 0]
    for axes, (metric, arms) in zip(panels, curves.items(), strict=True):
        banded = len(arms) <= len(COLOURS)  # more bands than colours hide each other
        line, series = Line(metric, TITLES[metric]), []
        for arm, (steps, *values) in arms.items():
            window = max(1, len(steps) // 20) * 2 - 1 if metric == "reward" else 1
            middle, *ends = (smooth(v, window) for v in values)
            series.append(Series(line, arm, steps, middle, *(ends if banded else ())))
        plot_panel(axes, Panel(metric, TITLES[metric], metric, (line,)), series, marked=True)
        axes.set_title(TITLES[metric], loc="left", fontweight="bold")
        axes.xaxis.get_major_locator().set_params(integer=True)
    most = max(panels, key=lambda axes: len(axes.lines))
    handles, labels = most.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=_columns(labels), fontsize=8)


def _html(found: Comparison, curves: Curves, command: str) -> str:
    picture = ""
    if curves:
        picture = svg(8.0, _height(curves), "comparison", lambda figure: _plot(figure, curves))
    source = resources("keel.workflows").joinpath("comparison.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(
        found=found, rows=table(found), lines=lines(found), svg=Markup(picture), command=command
    )
