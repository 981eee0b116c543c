"""A run as one HTML file that needs nothing else, and its curves as a PNG. Torch-free."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from keel.analysis.diagnosis.table import diagnose
from keel.analysis.panels import Panel, Series, series_of
from keel.analysis.plots import COLOURS, MARKERS, drawing, styled
from keel.analysis.text import visible
from keel.analysis.token_values import measures_of, step_loss, token_html
from keel.runs import files
from keel.runs.reader import load
from keel.types import KeelError
from keel.view.library import Library, OpenRun
from keel.view.rows import Row, legend, prompt_text, score, summary
from keel.view.status import formula_of, panels, status_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUPS, MEMBERS, TEXT, TOKENS = 3, 8, 4_000, 800
"""Groups of the last step that are shown, and completions of each: the best and the worst;
characters of a text, and tokens of a completion."""


def write_report(run: Path | str, out: Path | None = None, price: float | None = None) -> Path:
    """Write the report of a run folder to `out` (RUN/report.html), and its curves next to it as
    a PNG; returns the path of the first.

    Raises KeelError where there is no run, it cannot be read, or the files cannot be written.
    """
    load(run)  # refuses a folder of runs
    library = Library([run])
    opened = library.get(library.names()[0])
    opened.update()
    path = opened.folder.path / "report.html" if out is None else out
    if path.suffix != ".html":
        raise KeelError(f"--out {path}: give a name that ends in .html")
    files.write_text(path, html(opened, price))
    _write_png(path.with_suffix(".png"), opened)
    return path


def html(run: OpenRun, price: float | None = None) -> str:
    """The report. All text that models and data wrote is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["visible"] = visible
    source = resources("keel.view").joinpath("report.html.j2").read_text(encoding="utf-8")
    stages = [_stage(run, stage, price) for stage in run.metrics.stages()]
    return environment.from_string(source).render(
        name=run.name,
        info=run.run.info(),
        stages=stages,
        diagnoses=diagnose(run.run),
        evaluations=list(_evaluations(run)),
        rollouts=_rollouts(run),
        recipe=run.folder.recipe.read_text(encoding="utf-8"),
    )


def _stage(run: OpenRun, stage: str, price: float | None) -> dict[str, Any]:
    columns = run.metrics.columns(stage)
    window = max(1, max((len(c.steps) for c in columns.values()), default=1) // 40) * 2 - 1
    return {
        "name": stage,
        "status": status_of(run, stage, price).parts(),
        "formula": formula_of(run, stage),
        "window": window,
        "panels": [
            {
                "title": panel.title,
                "help": panel.help,
                "svg": Markup(_svg(panel, series_of(panel, columns, window=window))),
            }
            for panel in panels(run, stage)
        ],
    }


def _evaluations(run: OpenRun) -> list[dict[str, Any]]:
    """The first and the last evaluation of each stage, as numbers with their intervals."""
    found = []
    for stage, whens in run.run.info().get("evaluation", {}).items():
        for when, result in sorted(whens.items(), key=lambda pair: pair[0] != "before"):
            figures = {"mean": result.get("mean"), "low": result.get("low"), "high": result["high"]}
            measure = result.get("measure", result.get("kind", "pass@1"))
            found.append(
                {"stage": stage, "when": when, "measure": measure, "n": result["n"], **figures}
            )
    return found


def _rollouts(run: OpenRun) -> dict[str, Any] | None:
    """The groups of the last recorded step with the widest spread of rewards."""
    places = run.run.rollout_places()
    if not places:
        return None
    place = places[-1]
    stage = run.run.stages[place.stage]
    rows = run.run.rollouts(place.step, stage)
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)

    def spread(members: Sequence[Row]) -> float:
        rewards = [row["reward"] for row in members if row["reward"] is not None]
        return max(rewards, default=0.0) - min(rewards, default=0.0)

    chosen = sorted(groups.values(), key=spread, reverse=True)[:GROUPS]
    return {
        "stage": stage,
        "step": place.step,
        "count": len(rows),
        "loss": step_loss(rows),
        "groups": [_group(members) for members in chosen],
    }


def _group(members: Sequence[Row]) -> dict[str, Any]:
    first = members[0]
    ranked = sorted(members, key=lambda row: -score(row))
    if len(ranked) > MEMBERS:
        ranked = [*ranked[: MEMBERS // 2], *ranked[-(MEMBERS // 2) :]]
    return {
        "prompt": visible(prompt_text(first["prompt"]), TEXT, lines=True),
        "id": first["prompt_id"],
        "expected": first.get("expected"),
        "left_out": len(members) - len(ranked),
        "completions": [_completion(row) for row in ranked],
    }


def _completion(row: Row) -> dict[str, Any]:
    measure = next(iter(measures_of(row)), None)
    line = summary(row)
    line.pop("completion")
    return {
        "line": line,
        "tokens": Markup(token_html(row, measure, limit=TOKENS)),
        "more": max(0, len(row["tokens"]) - TOKENS),
        "legend": "" if measure is None else f"{measure.label}: {legend(row, measure)}",
    }


# ---------------------------------------------------------------- figures


def _svg(panel: Panel, series: Sequence[Series]) -> str:
    """A panel as SVG with text as text, the same for the same numbers."""
    import matplotlib

    with (
        styled(6.2, 2.7) as figure,
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.key}),
    ):
        _plot(figure.subplots(), panel, series)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _plot(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    """The lines of a panel; those of another unit on an axis at the right."""
    right = None
    if any(one.line.right for one in series) and not all(one.line.right for one in series):
        right = axes.twinx()
        right.grid(False)
        right.spines["right"].set_visible(True)
        right.set_ylabel(panel.right_unit)
    handles = []
    for number, one in enumerate(series):
        target = right if right is not None and one.line.right else axes
        colour = COLOURS[number % len(COLOURS)]
        marker = MARKERS[number % len(MARKERS)] if one.line.points or len(one.steps) < 2 else None
        handles += target.plot(
            one.steps,
            one.values,
            color=colour,
            marker=marker,
            linestyle=("-", "--", "-.", ":")[number % 4],
            label=one.label,
        )
        if one.low is not None and one.high is not None:
            target.fill_between(one.steps, one.low, one.high, color=colour, alpha=0.15, linewidth=0)
    axes.set_ylabel(panel.unit)
    axes.set_xlabel("step")
    for part in (axes, right):
        if part is not None and part.get_ylim()[0] < 0 and not _below_zero(series):
            part.set_ylim(bottom=0)
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)


def _below_zero(series: Sequence[Series]) -> bool:
    """Whether any value is negative: else no axis needs to show such."""
    ends = [part for one in series for part in (one.values, one.low) if part is not None]
    return any(bool((part < 0).any()) for part in ends)


def _write_png(path: Path, run: OpenRun) -> None:
    """The panels of the last stage under each other."""
    stage = run.stage()
    columns = run.metrics.columns(stage)
    found = panels(run, stage)
    if not found:
        return
    with drawing(path, 2.6 * len(found)) as figure:
        for axes, panel in zip(
            figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True
        ):
            _plot(axes, panel, series_of(panel, columns))
            axes.set_title(panel.title, loc="left", fontweight="bold", pad=22)
