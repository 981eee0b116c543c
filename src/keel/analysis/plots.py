"""Pictures of a run as PNG, the same bytes for the same numbers. matplotlib is imported on use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from keel.runs import files
from keel.types import KeelError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]

# Okabe and Ito's palette: distinguishable with any of the common colour vision deficiencies.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, FAINT = "#222222", "#8a8a8a"
WIDTH, DPI = 8.0, 160
"""Inches, and pixels to the inch."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Values over steps, with a band or intervals where `low` and `high` are given."""

    label: str
    steps: Array
    values: Array
    low: Array | None = None
    high: Array | None = None

    def __post_init__(self) -> None:
        for name in ("values", "low", "high"):
            array = getattr(self, name)
            if array is not None and len(array) != len(self.steps):
                raise ValueError(f"{name} has {len(array)} entries for {len(self.steps)} steps")


def column(rows: Sequence[Mapping[str, Any]], name: str, label: str = "") -> Curve:
    """A metric of metrics.jsonl's rows (one stage), with `NAME/low` and `NAME/high` if they are."""
    kept = [row for row in rows if row.get(name) is not None]

    def array(key: str) -> Array:
        values = [np.nan if row.get(key) is None else row[key] for row in kept]
        return np.array(values, dtype=np.float64)

    sides = [array(f"{name}/{side}") for side in ("low", "high")]
    known = bool(kept) and all(np.isfinite(side).any() for side in sides)
    low, high = sides if known else (None, None)
    return Curve(label or name, array("step"), array(name), low, high)


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


def reward_curve(
    path: Path, rows: Sequence[Mapping[str, Any]], title: str, subtitle: str = ""
) -> None:
    """Panels over the steps of an RL stage: reward, its spread within groups, validation accuracy.

    `rows` are the stage's rows of metrics.jsonl. The reward is `reward`, each step and its moving
    mean; the spread `reward_std`, where it is not 0 throughout; the third panel, where anything was
    evaluated, `eval/pass@1` and `eval/pass@K`, or else `eval/reward`, with intervals.
    Raises KeelError as `drawing` does.
    """
    reward, spread = column(rows, "reward"), column(rows, "reward_std")
    sampled = sorted({n for row in rows for n in row if _is_pass_at(n)} - {"eval/pass@1"})
    names = {"eval/pass@1": "greedy, pass@1"}
    names |= {name: f"sampled, {name.removeprefix('eval/')}" for name in sampled}
    accuracies = [column(rows, name, label) for name, label in names.items()]
    accuracies = [curve for curve in accuracies if len(curve.steps)]
    rewards = column(rows, "eval/reward", "greedy, mean reward")
    share = bool(accuracies) or not len(rewards.steps)
    accuracies = accuracies if share else [rewards]
    heights = [3.0] + [1.2] * bool(spread.values.any()) + [2.0] * bool(accuracies)
    with drawing(path, 0.8 + sum(heights)) as figure:
        panels = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )[:, 0]
        _plot_steps(panels[0], reward, COLOURS[0], "training reward")
        if len(reward.steps):
            panels[0].legend(loc="best")
        if spread.values.any():
            _plot_steps(panels[1], spread, COLOURS[4], "std in a group")
            panels[1].set_ylim(bottom=0)
        if accuracies:
            _plot_evaluated(panels[-1], accuracies, share)
        panels[-1].set_xlabel("step")
        figure.align_ylabels(panels)
        set_titles(figure, title, subtitle)


def return_curve(
    path: Path, rows: Sequence[Mapping[str, Any]], title: str, subtitle: str = ""
) -> None:
    """Returns over environment steps: of the training episodes, and evaluated with its interval.

    `rows` are those of metrics.jsonl of a run on environments.
    Raises KeelError as `drawing` does.
    """
    at = [{**row, "step": row["environment_steps"]} for row in rows]
    training = column(at, "episode/return", "training episodes, with exploration")
    evaluated = column(at, "eval/return", "greedy, evaluation episodes")
    with drawing(path, 4.0) as figure:
        axes = figure.subplots()
        window = max(1, len(training.steps) // 40) * 2 + 1 if len(training.steps) >= 20 else 1
        axes.plot(
            training.steps,
            smooth(training.values, window),
            color=COLOURS[0],
            marker=None if window > 1 else MARKERS[1],
            label=training.label + (f" (mean of {window} rows)" if window > 1 else ""),
        )
        if len(evaluated.steps):
            _plot_intervals(axes, evaluated, 0, markersize=5.0)
        axes.set_xlabel("environment steps")
        axes.set_ylabel("return")
        axes.legend(loc="best")
        set_titles(figure, title, subtitle)


def compare_curves(
    path: Path,
    curves: Sequence[Curve],
    title: str,
    *,
    ylabel: str,
    xlabel: str = "step",
    subtitle: str = "",
) -> None:
    """Several curves on one pair of axes, each with its band, named in a legend.

    Colour and marker both tell them apart.
    Raises KeelError as `drawing` does.
    """
    with drawing(path, 4.5) as figure:
        axes = figure.subplots()
        for index, curve in enumerate(curves):
            colour = COLOURS[index % len(COLOURS)]
            if curve.low is not None and curve.high is not None:
                axes.fill_between(
                    curve.steps, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0
                )
            axes.plot(
                curve.steps,
                curve.values,
                color=colour,
                marker=MARKERS[index % len(MARKERS)],
                markevery=max(1, len(curve.steps) // 8),
                label=curve.label,
            )
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        if curves:
            axes.legend(loc="best")
        set_titles(figure, title, subtitle)


def _plot_steps(axes: Axes, curve: Curve, colour: str, label: str) -> None:
    """A metric of every step and, from 20 steps on, its moving mean."""
    steps, values = curve.steps, curve.values
    axes.set_ylabel(label)
    if not len(steps):
        axes.text(0.5, 0.5, "no reward yet", ha="center", transform=axes.transAxes, color=FAINT)
        return
    window = max(1, len(steps) // 20) * 2 + 1 if len(steps) >= 20 else 1
    if window > 1:
        axes.plot(steps, values, color=colour, alpha=0.4, linewidth=0.9, label="each step")
        mean = f"mean of {window} steps"
        axes.plot(steps, smooth(values, window), color=colour, linewidth=2.2, label=mean)
    else:
        axes.plot(steps, values, color=colour, marker="o", label="each step")


def _plot_evaluated(axes: Axes, curves: Sequence[Curve], share: bool) -> None:
    for index, curve in enumerate(curves):
        _plot_intervals(axes, curve, index, markersize=5.5, clip_on=False, zorder=3)
    if share:
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
        _label_ends(axes, curves[0])
    axes.set_ylabel("validation accuracy" if share else "validation reward")
    axes.legend(loc="best")


def _plot_intervals(axes: Axes, curve: Curve, index: int, **style: Any) -> None:
    """Evaluations with their intervals, if they have some."""
    errors, label = None, curve.label
    if curve.low is not None and curve.high is not None:
        errors = np.maximum(0.0, [curve.values - curve.low, curve.high - curve.values])
        errors, label = np.nan_to_num(errors), f"{label}, 95 % interval"
    colour, marker = COLOURS[index + 1], MARKERS[index]
    style |= {"color": colour, "marker": marker, "capsize": 3, "elinewidth": 1.2, "label": label}
    axes.errorbar(curve.steps, curve.values, yerr=errors, **style)


def _label_ends(axes: Axes, curve: Curve) -> None:
    """Writes the first and the last value in figures, clear of the line and its intervals."""
    places = [0, -1] if len(curve.steps) > 1 else [0]
    for place in places:
        value = curve.values[place]
        # The first below its point and the last above, where a rising line leaves room.
        below = (place == 0 and value > 0.25) or value > 0.75
        side = curve.low if below else curve.high
        edge = value if side is None or np.isnan(side[place]) else side[place]
        axes.annotate(
            f"{100 * value:.0f} %",
            (curve.steps[place], edge),
            xytext=(0, -8 if below else 8),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            color=COLOURS[1],
            fontweight="bold",
        )


def _is_pass_at(name: str) -> bool:
    return name.startswith("eval/pass@") and name.removeprefix("eval/pass@").isdigit()


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

    Raises KeelError if matplotlib is not installed, or the file cannot be written.
    """
    with styled(WIDTH, height) as figure:
        yield figure
        # Renamed when it is whole, so that a reader never sees half a picture.
        with files.replacing(path, sync=False) as file:
            figure.savefig(file, format="png", metadata={"Software": None})


@contextmanager
def styled(width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches with our style, inside the block.

    Raises:
        KeelError: matplotlib is not installed.
    """
    # Canvas and style are given below; a backend that matplotlib does not know ends its import.
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KeelError("plots need matplotlib: pip install matplotlib") from error
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
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
