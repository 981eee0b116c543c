"""Pictures of a run as PNG, the same bytes for the same numbers. matplotlib is imported on use."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keel.analysis.panels import Panel, Series, picture_panels, series_of
from keel.analysis.text import visible
from keel.platform import files
from keel.runs.reader import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinguishable with any of the common colour vision deficiencies.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "--", "-.", ":")
INK, FAINT = "#222222", "#8a8a8a"
WIDTH, DPI = 8.0, 160
"""Inches, and pixels to the inch."""
HEIGHTS = {"reward": 3.0, "spread": 1.2, "validation": 2.0, "return": 3.2}
"""Of the panels of a curve.png, in inches."""


def stage_curve(
    path: Path, kind: str, columns: Mapping[str, Column], title: str, subtitle: str = ""
) -> None:
    """The picture of a stage: what it gains, smoothed over each step, and evaluations with their
    intervals; none without metrics. Raises KeelError as `drawing` does.
    """
    found = picture_panels(kind, columns)
    if not found:
        return
    heights = [HEIGHTS[panel.key] for panel in found]
    count = max(len(column.steps) for column in columns.values())
    window = max(1, count // 20) * 2 + 1 if count >= 20 else 1
    with drawing(path, 0.8 + sum(heights)) as figure:
        all_axes = figure.subplots(
            len(found), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )[:, 0]
        for axes, panel in zip(all_axes, found, strict=True):
            series = series_of(panel, columns, window=window)
            plot_panel(axes, panel, [_with_window(one, window) for one in series])
            if axes.get_legend_handles_labels()[0]:  # a stage without rewards has no curve
                axes.legend(loc="best")
            axes.set_xlabel("")
        all_axes[-1].set_xlabel("environment steps" if "environment_steps" in columns else "step")
        figure.align_ylabels(all_axes)
        set_titles(figure, title, subtitle)


def _with_window(one: Series, window: int) -> Series:
    """The series, whose label says what was smoothed."""
    return one if one.raw is None else replace(one, label=f"{one.label} (mean of {window})")


def plot_panel(
    axes: Axes, panel: Panel, series: Sequence[Series], *, marked: bool = False
) -> list[Any]:
    """Draw the lines of a panel, those of another unit on an axis at the right; their handles.

    Points have error bars, lines a band, and a smoothed line its raw values faintly. With `marked`
    every line has its own marker, for many lines of equal standing, which are all solid.
    """
    right = None
    if any(one.line.right for one in series) and not all(one.line.right for one in series):
        right = axes.twinx()
        right.grid(False)
        right.spines["right"].set_visible(True)
        right.set_ylabel(panel.right_unit)
    handles = []
    for at, one in enumerate(series):
        target = right if right is not None and one.line.right else axes
        handles.append(_plot_series(target, one, at, marked))
    axes.set_ylabel(panel.unit)
    axes.set_xlabel("step")
    for part in (axes, right):
        if part is not None and part.get_ylim()[0] < 0 and not _below_zero(series):
            part.set_ylim(bottom=0)
    return handles


def _plot_series(axes: Axes, one: Series, at: int, marked: bool) -> Any:
    colour, label = COLOURS[at % len(COLOURS)], plain_label(one.label)
    marker = MARKERS[(at + at // len(COLOURS)) % len(MARKERS)]
    if one.line.points and one.low is not None and one.high is not None:
        errors = np.maximum(0.0, [one.values - one.low, one.high - one.values])
        style: dict[str, Any] = {"capsize": 3, "elinewidth": 1.2, "label": label}
        return axes.errorbar(
            one.steps, one.values, np.nan_to_num(errors), color=colour, marker=marker, **style
        )
    if one.raw is not None:
        axes.plot(*one.raw, color=colour, alpha=0.4, linewidth=0.9)
    shown = marker if marked or one.line.points or len(one.steps) < 2 else None
    (line,) = axes.plot(
        one.steps,
        one.values,
        color=colour,
        marker=shown,
        markevery=max(1, len(one.steps) // 8) if marked else None,
        linestyle="-" if marked else STYLES[at % len(STYLES)],
        label=label,
    )
    if one.low is not None and one.high is not None:
        axes.fill_between(one.steps, one.low, one.high, color=colour, alpha=0.15, linewidth=0)
    return line


def plain_label(label: str) -> str:
    """A label as text: matplotlib sets dollars as mathematics, and hides what begins with _."""
    return visible(f" {label}" if label.startswith("_") else label, 60).replace("$", r"\$")


def _below_zero(series: Sequence[Series]) -> bool:
    """Whether any value is negative: else no axis needs to show such."""
    ends = [part for one in series for part in (one.values, one.low) if part is not None]
    return any(bool((part < 0).any()) for part in ends)


def set_titles(figure: Figure, title: str, subtitle: str) -> None:
    axes = figure.axes[0]
    axes.set_title(title, loc="left", pad=24 if subtitle else 10, fontweight="bold", fontsize=13)
    if subtitle:
        axes.annotate(
            subtitle,
            (0, 1),
            xytext=(0, 8),
            xycoords="axes fraction",
            textcoords="offset points",
            color=FAINT,
        )


@contextmanager
def drawing(path: Path, height: float) -> Iterator[Figure]:
    """A figure with our style and no state of pyplot's, written when the block ends.

    Raises KeelError if the file cannot be written.
    """
    with styled(WIDTH, height) as figure:
        yield figure
        # Renamed when it is whole, so that a reader never sees half a picture.
        with files.replacing(path, sync=False) as file:
            figure.savefig(file, format="png", metadata={"Software": None})


def svg(width: float, height: float, salt: str, plot: Callable[[Figure], None]) -> str:
    """A figure as SVG with text as text, the same for the same numbers."""
    import matplotlib

    buffer = io.StringIO()
    rules = {"svg.fonttype": "none", "svg.hashsalt": salt}
    with styled(width, height) as figure, matplotlib.rc_context(rules):
        plot(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


@contextmanager
def styled(width: float, height: float) -> Iterator[Figure]:
    """A figure of a size in inches with our style, inside the block."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {
        "font.family": "DejaVu Sans",  # comes with matplotlib, so the same everywhere
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e6e6",
        "grid.linewidth": 0.8,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "lines.linewidth": 1.8,
        "legend.frameon": False,
        "legend.fontsize": 9,
    }
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **style}):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
