"""A run as one HTML file that needs nothing else, and its curves as a PNG. Torch-free."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from keel.analysis.diagnosis.table import diagnose
from keel.analysis.metrics import Panel, Series, series_of
from keel.analysis.plots import drawing, plain_label, plot_panel, svg
from keel.analysis.text import Tokens, visible
from keel.platform import files
from keel.runs.reader import load
from keel.runs.rows import COMPONENT
from keel.types import KeelError
from keel.view.formulas import FORMULA_STYLE, font_face, formula_of
from keel.view.library import Library, OpenRun, panels, pictures_of, status_of
from keel.view.rollout_rows import Row, StepRows, legend, number, prompt_text, summary, verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUPS, MEMBERS, TEXT, TOKENS = 3, 8, 4_000, 800
"""Groups of the last step that are shown, and completions of each: the best and the worst;
characters of a text, and tokens of a completion."""


def write_report(run: Path | str, out: Path | None = None, price: float | None = None) -> Path:
    """Write the report of a run folder to `out` (RUN/report.html), and its curves next to it as
    a PNG; returns the path of the first.

    Raises KeelError if there is no run, it cannot be read, or the files cannot be written.
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
    damaged: list[str] = []
    diagnoses, rollouts = diagnose(run.run, damaged), _rollouts(run, damaged)
    return environment.from_string(source).render(
        name=run.name,
        formula_style=Markup(FORMULA_STYLE + font_face()),
        info=run.run.info(),
        stages=stages,
        diagnoses=diagnoses,
        evaluations=list(_evaluations(run)),
        rollouts=rollouts,
        damaged=sorted(set(damaged)),
        recipe=run.folder.recipe.read_text(encoding="utf-8"),
    )


def _stage(run: OpenRun, stage: str, price: float | None) -> dict[str, Any]:
    columns = run.columns(stage)
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
        "pictures": [
            {"title": title, "data": base64.b64encode(path.read_bytes()).decode("ascii")}
            for title, path in pictures_of(run, stage)
        ],
    }


def _evaluations(run: OpenRun) -> list[dict[str, Any]]:
    """The first and the last evaluation of each stage, as numbers with their intervals."""
    found: list[dict[str, Any]] = []
    for stage, whens in run.run.info().get("measured", {}).items():
        for when, result in sorted(whens.items(), key=lambda pair: pair[0] != "before"):
            about = {"stage": stage, "when": when, "n": result["n"], "low": None, "high": None}
            names = {"loss": "loss (nats)", "mean_token_accuracy": "most probable tokens"}
            for key, name in ({"accuracy": "accuracy"} if "accuracy" in result else names).items():
                value = result[key]
                figures = value if isinstance(value, dict) else {"mean": value}
                found.append({**about, "measure": name, **figures})
    for stage, whens in run.run.info().get("evaluation", {}).items():
        ordered = sorted(whens.items(), key=lambda pair: pair[0] != "before")
        every = [(when, stage, result) for when, result in ordered]
        every += [
            (when, f"{stage}, {name}", one)
            for when, result in ordered
            for name, one in result.get("sets", {}).items()
        ]
        for when, shown, result in every:
            figures = {"mean": result.get("mean"), "low": result.get("low"), "high": result["high"]}
            measure = result.get("measure", result.get("kind", "pass@1"))
            found.append(
                {"stage": shown, "when": when, "measure": measure, "n": result["n"], **figures}
            )
    return found


def _rollouts(run: OpenRun, damaged: list[str]) -> dict[str, Any] | None:
    """The groups of the last step that can be read with the widest spread of rewards."""
    for stage, step in reversed(run.rollout_steps()):
        try:
            rows = run.rows(stage, step)
        except KeelError:
            damaged.append(run.folder.rollouts(run.run.stages.index(stage), step).name)
            continue
        shown = [_group(rows, members) for members in rows.widest[:GROUPS]]
        return {
            "stage": stage,
            "step": step,
            "count": len(rows),
            "loss": rows.loss,
            "groups": shown,
        }
    return None


def _group(rows: StepRows, members: Sequence[int]) -> dict[str, Any]:
    """A group, of which `members` are the places, best first."""
    first, ranked = rows[members[0]], members
    if len(ranked) > MEMBERS:
        ranked = [*ranked[: MEMBERS // 2], *ranked[-(MEMBERS // 2) :]]
    return {
        "prompt": visible(prompt_text(first["prompt"]), TEXT, lines=True),
        "id": first["prompt_id"],
        "expected": first.get("expected"),
        "left_out": len(members) - len(ranked),
        "completions": [_completion(rows[at]) for at in ranked],
    }


def _short(name: str, line: Mapping[str, Any]) -> str:
    """A component without its prefix, unless a column has that name."""
    short = name.removeprefix(COMPONENT)
    return name if short != name and short in line else short


def _completion(row: Row) -> dict[str, Any]:
    tokens = Tokens(row)
    measure = next(iter(tokens.values), None)
    line = summary(row)
    line.pop("completion")
    found = [one for one in verdicts(row) if one.name != "extracted"]  # it is in the line
    return {
        "line": {
            _short(name, line): value if isinstance(value, str | int) else number(value)
            for name, value in line.items()
        },
        "tokens": Markup(tokens.html(measure, limit=TOKENS)),
        "more": max(0, len(tokens) - TOKENS),
        "legend": "" if measure is None else f"{measure.label}: {legend(tokens, measure)}",
        "verdicts": found if any(one.words for one in found) else [],
    }


# ---------------------------------------------------------------- figures


def _svg(panel: Panel, series: Sequence[Series]) -> str:
    return svg(6.2, 2.7, panel.key, lambda figure: _plot(figure.subplots(), panel, series))


def _plot(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    """A panel with its legend above it."""
    handles = plot_panel(axes, panel, series)
    wide = sum(len(one.label) for one in series) > 50  # more columns would narrow the axes
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=2 if wide else 4)


def _write_png(path: Path, run: OpenRun) -> None:
    """The panels of the last stage under each other."""
    stage = run.stage()
    columns = run.columns(stage)
    found = panels(run, stage)
    if not found:
        return
    with drawing(path, 2.6 * len(found)) as figure:
        for axes, panel in zip(
            figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True
        ):
            _plot(axes, panel, series_of(panel, columns))
            axes.set_title(plain_label(panel.title), loc="left", fontweight="bold", pad=22)
