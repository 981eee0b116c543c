"""Writes what the studies measured into the documentation: a section of each preset's page with its
curve, and the tables between `<!-- table NAME -->` and `<!-- end -->` of docs/evidence.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from keel.algorithms.presets import PRESETS
from keel.analysis.plots import COLOURS, FAINT, drawing
from keel.analysis.statistics import Array, Interval
from studies.common import ROOT, courses, markdown, shown
from studies.evidence import (
    bias,
    distillation,
    gae,
    lengths,
    memory,
    ratios,
    replay,
    trained,
    variants,
)
from studies.evidence.algorithms import (
    BASELINE,
    COMPARED,
    NOT_MEASURED,
    RATES,
    RESULTS,
    STABLE,
    STABLE_RATES,
    TASKS,
)

DOCS = ROOT / "docs"
PRESET_PAGES = DOCS / "algorithms"
MEASURED_PAGES = DOCS / "evidence"
METRIC = "eval/pass@1"
TITLES = {
    "sort_digits": "sorting digits",
    "reverse": "reversing words",
    distillation.RARE: "sorting, right answers rare",
}
SECTION = "## Learning curve\n\n"


def tasks_of(name: str) -> tuple[str, ...]:
    """The tasks that a preset was measured on."""
    return TASKS if name in COMPARED else tuple(distillation.LEVELS)


def measured(name: str, task: str) -> Path:
    """The folder of a comparison in which a preset was measured on a task."""
    return (RESULTS if name in COMPARED else distillation.MEASURED) / task


@cache
def comparison(folder: Path) -> dict[str, Any]:
    """What `keel compare` found."""
    found: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    return found


@cache
def curves(folder: Path) -> Mapping[str, Array]:
    """By arm (4, steps): steps, interquartile mean of validation accuracy, the interval's ends."""
    found = courses(folder / "curves.csv", "step", "iqm", "low", "high", metric=METRIC)
    return {arm: values for arm, (values,) in found.items()}


def arm(task: str, name: str) -> dict[str, Any]:
    """The summary of a preset."""
    arms = comparison(measured(name, task))["arms"]
    return next(one for one in arms if one["arm"] == name)


def percent(one: Mapping[str, Any], sign: str = "") -> str:
    """A figure with its interval, in percent."""
    return shown(Interval(**one), 100, sign)


def difference(task: str, name: str) -> str:
    """From the baseline, in points; bold where its interval leaves out 0."""
    if name == BASELINE:
        return ""
    pairs = comparison(measured(name, task))["pairs"]
    found = next(one for one in pairs if one["a"] == name)["difference"]
    text = percent(found, sign="+")
    return f"**{text}**" if found["low"] > 0 or found["high"] < 0 else text


# ---------------------------------------------------------------- a preset's page


def section(name: str) -> str:
    """The section of a preset's page."""
    rates = tomllib.loads(RATES.read_text())
    page = "presets" if name in COMPARED else "distillation"
    known = ", ".join(f"{rates[task][name]:g} ({TITLES[task]})" for task in tasks_of(name))
    return (
        f"{SECTION}![{name}](curves/{name}.png)\n\n"
        f"[Ten seeds](../evidence/{page}.md); learning rates {known}.\n"
    )


def plot_presets(path: Path, colours: Mapping[str, str]) -> None:
    """Validation accuracy of presets over the steps, a panel for each task."""
    preset = next(reversed(colours))
    panels = {}
    for task in tasks_of(preset):
        found = curves(measured(preset, task))  # in one panel all curves are of one comparison
        panels[TITLES[task]] = {name: (colour, found[name]) for name, colour in colours.items()}
    plot(path, panels, 3.0, "validation accuracy", ylim=(0, 1))


def plot(
    path: Path,
    panels: Mapping[str, Mapping[str, tuple[str, Array]]],
    height: float,
    ylabel: str,
    **axis: Any,
) -> None:
    """By panel and label: curves (4, steps) of steps, means and the ends of their intervals."""
    with drawing(path, height) as figure:
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
            for label, (colour, (steps, middle, low, high)) in lines.items():
                axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
                axes.plot(steps, middle, color=colour, label=label)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("step")
        all_axes[0].set(ylabel=ylabel, **axis)
        all_axes[0].legend(loc="best")


# ---------------------------------------------------------------- tables of docs/evidence


def presets_table() -> str:
    """Presets on both tasks; seconds and tokens are means of both."""
    rows = []
    for name in COMPARED:
        cells, arms = [], [arm(task, name) for task in TASKS]
        for task in TASKS:
            cells += [percent(arm(task, name)["score"]), difference(task, name)]
        seconds, tokens = (float(np.mean([one[k] for one in arms])) for k in ("seconds", "tokens"))
        cells += [f"{seconds:.0f}", f"{tokens:,.0f}"]
        rows.append((f"[{name}](../algorithms/{name}.md)", *cells))
    head = [cell for task in TASKS for cell in (f"{TITLES[task]}, %", f"above {BASELINE}")]
    return markdown(("preset", *head, "seconds", "tokens"), rows)


def stability_table() -> str:
    """PPO, GRPO and GSPO at each rate."""
    found = json.loads((RESULTS / "stability" / "comparison.json").read_text())
    scores = {one["arm"]: one for one in found["arms"]}
    rows = []
    for name in STABLE:
        cells = []
        for rate in STABLE_RATES:
            one = scores[f"{name}-rl.optimizer.learning_rate={rate:g}"]
            cells.append(f"{percent(one['score'])}; worst {100 * min(one['scores']):.1f}")
        rows.append((name, *cells))
    return markdown(("", *(f"{rate:g}" for rate in STABLE_RATES)), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "presets": presets_table,
    "stability": stability_table,
    "memory": memory.table,
    "replay": replay.table,
    "lengths": lengths.table,
    "difficulty": bias.difficulty_table,
    "drift": bias.drift_table,
    "lambda": gae.lambda_table,
    "baselines": gae.baseline_table,
    "noise": lambda: ratios.table(wild=False),
    "wild": lambda: ratios.table(wild=True),
    "distillation": distillation.table,
    "savings": distillation.savings_table,
    "teachers": distillation.teachers_table,
    "trained": trained.table,
    "variants": variants.table,
}
"""The tables of docs/evidence, by name."""
TABLE = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str) -> str:
    """A page with its tables as the results have them."""
    return TABLE.sub(
        lambda found: f"<!-- table {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->", text
    )


def write() -> None:
    """Write sections, tables and pictures."""
    (PRESET_PAGES / "curves").mkdir(exist_ok=True)
    for name in [one for one in PRESETS if one not in NOT_MEASURED]:
        path = PRESET_PAGES / f"{name}.md"
        path.write_text(path.read_text().partition(SECTION)[0] + section(name))
        # With the baseline's curves in grey.
        others = {} if name == BASELINE else {BASELINE: FAINT}
        plot_presets(PRESET_PAGES / "curves" / f"{name}.png", {**others, name: COLOURS[0]})
    for path in sorted(MEASURED_PAGES.glob("*.md")):
        path.write_text(filled(path.read_text()))
    stable = dict(zip(STABLE, COLOURS, strict=False))
    plot_presets(MEASURED_PAGES / "ppo-grpo-gspo.png", stable)
    plot(MEASURED_PAGES / "lengths.png", lengths.panels(), 2.8, "tokens of the second text")
    plot(MEASURED_PAGES / "trained.png", trained.panels(), 2.8, "greedy answers right, %")
