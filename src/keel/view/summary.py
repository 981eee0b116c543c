"""A run in a few lines, and as what a notebook shows of it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from keel.analysis.metrics import Panel, panel_of, panels_of, picture_panels
from keel.analysis.plots import WIDTH, height_of, plain_label, plot_panels, set_titles, styled, svg
from keel.analysis.progress import evaluation_lines
from keel.analysis.text import visible
from keel.config.fields import unknown
from keel.runs.layout import Place
from keel.runs.reader import Run
from keel.types import KeelError
from keel.view.library import Library, OpenRun, duration
from keel.view.rollout_rows import number, prompt_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS, TEXT = 6, 200
"""Rollouts that a notebook shows, and characters of a prompt or completion."""


@dataclass(frozen=True, slots=True)
class StageSummary:
    """A stage: how far it is, its evaluations as run.json has them, and its best checkpoint."""

    name: str
    kind: str
    step: int
    steps: int
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    best: str | None
    best_metric: str | None
    """The metric that selected it."""


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """What came of a run. Its `repr` is the text to read.

    `seconds` are those of its steps, `tokens` those that it trained on (None: not known), `bytes`
    the size of its folder.
    """

    folder: Path
    name: str
    state: str
    stages: tuple[StageSummary, ...]
    seconds: float
    tokens: int | None
    bytes: int

    def __repr__(self) -> str:
        tokens = "" if self.tokens is None else f", {self.tokens:,} tokens"
        size = decimal(self.bytes)
        lines = [
            f"{visible(self.name)}: {self.state}, {duration(self.seconds)} of steps{tokens}",
            f"  {self.folder} ({size})",
        ]
        for one in self.stages:
            best = "" if one.best is None else f", best checkpoint {one.best}"
            best += f" by {one.best_metric}" if best and one.best_metric else ""
            lines.append(f"  {one.name} ({one.kind}): step {one.step:,} of {one.steps:,}{best}")
            for when, result in (("before", one.before), ("after", one.after)):
                found = [] if result is None else evaluation_lines(result)
                lines += [f"    {'' if at else when:<6}  {line}" for at, line in enumerate(found)]
        return "\n".join(lines)


def summarise(run: Run) -> Summary:
    """The summary of a run, also of one that goes on. Raises KeelError if it cannot be read."""
    opened, info, tables = _open(run), run.info(), run.recipe()["stages"]
    stages, tokens = [], []
    for at, (name, table) in enumerate(zip(run.stages, tables, strict=True)):
        columns = opened.metrics.columns(name)
        done = columns.get("environment_steps")
        steps = [column.steps[-1] for column in columns.values()] if done is None else done.values
        found = {**info.get("measured", {}), **info.get("evaluation", {})}.get(name, {})
        best = info.get("best", {}).get(name)
        stages.append(
            StageSummary(
                name,
                str(table["stage"]),
                int(max(steps, default=0)),
                int(table.get("steps") or info.get("steps", {}).get(name, 0)),
                found.get("before"),
                found.get("after"),
                None if best is None else run.folder.checkpoint(at, best).name,
                info.get("best_metric", {}).get(name),
            )
        )
        tokens += [columns["num_tokens"].values[-1]] if "num_tokens" in columns else []
    return Summary(
        run.folder.path,
        str(info.get("name") or run.folder.path.name),
        run.state(),
        tuple(stages),
        run.seconds(),
        int(max(tokens)) if tokens else None,
        run.disk_use(),
    )


def figure_of(run: Run, metrics: tuple[str, ...], stage: str | None = None) -> Figure:
    """The metrics of a stage (the last that has records unless named) under each other.

    Without metrics, what curve.png shows. Raises KeelError for a metric that the stage does not
    have.
    """
    opened = _open(run)
    stage = opened.stage() if stage is None else stage
    kind, columns = str(opened.stage_config(stage)["stage"]), opened.columns(stage)
    for name in metrics:
        if name not in columns:
            raise KeelError(unknown(f"metric of {stage}", name, columns))
    panels = [panel_of(name) for name in metrics] or _panels(kind, opened, stage)
    if not panels:
        raise KeelError(f"{stage} has no metrics yet: plot it after its first step")
    with styled(WIDTH, height_of(panels)) as figure:
        plot_panels(figure, panels, columns)
        set_titles(figure, plain_label(opened.name), stage)
    return figure


def html(run: Run) -> str:
    """What a notebook shows of a run: its summary, its curve and some of its newest rollouts.

    Needs no script and no network. All text that models and data wrote is escaped.
    """
    parts = [f"<pre>{escape(visible(repr(summarise(run)), lines=True))}</pre>"]
    opened = _open(run)
    stage = opened.stage()
    kind, columns = str(opened.stage_config(stage)["stage"]), opened.columns(stage)
    if panels := _panels(kind, opened, stage):
        height = 0.75 * height_of(panels)
        parts.append(svg(7, height, stage, lambda figure: plot_panels(figure, panels, columns)))
    places = run.rollout_places()
    if places:
        parts.append(_rollouts(run, places[-1]))
    return "\n".join(parts)


def _rollouts(run: Run, place: Place) -> str:
    """The first rollouts of a step as a table."""
    stage = run.stages[place.stage]
    rows = run.rollouts(place.step, stage)
    cells = [
        (prompt_text(row["prompt"]), str(row["completion"]), number(row["reward"]))
        for row in rows[:ROWS]
    ]
    lines = ["".join(f"<td>{escape(visible(cell, TEXT))}</td>" for cell in line) for line in cells]
    title = escape(f"{stage} step {place.step}: {len(cells)} of {len(rows)} completions")
    return (
        f"<table><caption>{title}</caption><thead><tr><th>prompt</th><th>completion</th>"
        "<th>reward</th></tr></thead><tbody>"
        f"{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
    )


def _open(run: Run) -> OpenRun:
    library = Library([run.folder.path])
    opened = library.get(library.names()[0])
    opened.update()
    return opened


def _panels(kind: str, opened: OpenRun, stage: str) -> list[Panel]:
    """What a stage gains; of a stage without rewards its first panel."""
    columns = opened.columns(stage)
    return picture_panels(kind, columns) or panels_of(kind, list(columns))[:1]
