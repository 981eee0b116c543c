"""Pictures of a run and of its reward models, the law of optimising against one included, as PNG.

The same numbers give the same bytes. matplotlib is imported on use.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from keel.analysis.calibration import LabelReport, PairReport
from keel.analysis.metrics import Panel, Series, picture_panels, series_of
from keel.analysis.statistics import Array, Interval
from keel.analysis.text import visible
from keel.platform import files
from keel.runs.reader import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    if found:
        with drawing(path, height_of(found)) as figure:
            plot_panels(figure, found, columns)
            set_titles(figure, title, subtitle)


def height_of(panels: Sequence[Panel]) -> float:
    """The inches of a figure of panels under each other."""
    return 0.8 + sum(_height(panel) for panel in panels)


def _height(panel: Panel) -> float:
    return HEIGHTS.get(panel.key, 2.4)


def plot_panels(figure: Figure, panels: Sequence[Panel], columns: Mapping[str, Column]) -> None:
    """Plot panels under each other, over the same steps."""
    count = max(len(column.steps) for column in columns.values())
    window = max(1, count // 20) * 2 + 1 if count >= 20 else 1
    ratios = {"height_ratios": [_height(panel) for panel in panels]}
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        series = series_of(panel, columns, window=window)
        handles = plot_panel(axes, panel, [_with_window(one, window) for one in series])
        if handles:  # a stage without rewards has no curve
            axes.legend(handles=handles, loc="best")
        axes.set_xlabel("")
    rows[-1].set_xlabel("environment steps" if "environment_steps" in columns else "step")
    figure.align_ylabels(rows)


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
        # A notebook shows only the figures of pyplot by itself.
        figure._repr_html_ = lambda: _html(figure)  # type: ignore[method-assign]
        yield figure


def _html(figure: Figure) -> str:
    """A figure as a picture in HTML."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="figure" src="data:image/png;base64,{data}">'


# ---------------------------------------------------------------- reward models


@dataclass(frozen=True, slots=True, eq=False)
class Optimisation:
    """One run against a proxy: its points in order of training.

    `divergence` is KL(π‖π_ref) in nats, the mean over sequences of the summed divergence.
    """

    label: str
    divergence_P: Array
    proxy_P: Array
    gold_P: Array

    @property
    def moved(self) -> bool:
        """Whether the policy went away from the reference, so that a picture has something to show.

        At least 20 points, and the last quarter of the run twice as far away as the first.
        """
        at = distance(self.divergence_P)
        quarter = len(at) // 4
        return len(at) >= 20 and bool(np.mean(at[-quarter:]) >= 2 * np.mean(at[:quarter]))


def optimisation_of(
    rows: Sequence[Mapping[str, Any]], proxies: Mapping[str, float], gold: str, label: str
) -> Optimisation | None:
    """A stage of reinforcement learning (its metrics.jsonl rows) as points of the picture.

    `proxies` are the rewards that were learned from, with their weights; `gold` is the one that
    watched. None if no row has all of them and the divergence to the reference.
    """
    names = ("kl/sequence", f"rewards/{gold}/mean", *(f"rewards/{name}/mean" for name in proxies))
    kept = [row for row in rows if all(row.get(name) is not None for name in names)]
    if not kept:
        return None
    values_NP = np.array([[row[name] for row in kept] for name in names], dtype=np.float64)
    weight_N = np.array(list(proxies.values()), dtype=np.float64)
    return Optimisation(label, values_NP[0], weight_N @ values_NP[2:], values_NP[1])


def distance(divergence_P: npt.ArrayLike) -> Array:
    """d = √KL(π‖π_ref), KL the mean over sequences of the summed divergence.

    An estimate of KL can come out below 0 near the reference: it counts as 0.
    Source: Gao et al. 2022 [2210.10760] §3.
    """
    return np.sqrt(np.maximum(np.asarray(divergence_P, dtype=np.float64).reshape(-1), 0.0))


def fit_law(distance_P: npt.ArrayLike, gold_P: npt.ArrayLike) -> Array | None:
    """The start, α and β of the gold reward under reinforcement learning against a proxy.

        min over start, α, β of Σ (gold_i − start − d_i (α − β log d_i))²,   d = √KL

    The unknowns enter linearly, so there is one answer and no starting point. The paper measures
    gold from the start of training (start = 0); fitted too, it lets no noise of the first point
    into all others. Points that are not finite are left out. None if the rest does not determine
    three unknowns and an error: fewer than four different distances.
    Source: Gao et al. 2022 [2210.10760] §3.1, the form for RL.
    """
    d, gold = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (distance_P, gold_P))
    finite = np.isfinite(d) & np.isfinite(gold)
    design, gold = _design(d[finite]), gold[finite]
    if np.unique(design[:, 1]).size < 4:
        return None
    # Columns of one size, so that the rank does not depend on the unit of d.
    scale = np.abs(design).max(axis=0)
    if not scale.all():
        return None
    found, _, rank, _ = np.linalg.lstsq(design / scale, gold, rcond=1e-10)
    return None if rank < design.shape[1] else found / scale


def law(distance_P: npt.ArrayLike, start_alpha_beta: Array) -> Array:
    """gold(d) = start + d (α − β log d) at distances d ≥ 0, the limit `start` at 0."""
    return np.asarray(_design(distance_P) @ start_alpha_beta)


def _design(distance_P: npt.ArrayLike) -> Array:
    """Columns 1, d and −d log d, which is 0 at d = 0."""
    d = np.asarray(distance_P, dtype=np.float64).reshape(-1)
    return np.stack([np.ones_like(d), d, -d * np.log(np.where(d > 0, d, 1.0))], axis=1)


WORDS = {
    PairReport: {
        "rows": "pairs",
        "right": "preferred answer is the better",
        "predicted": "the answer it prefers",
        "length": "tokens by which the better answer is longer",
        "constant": "chance",
    },
    LabelReport: {
        "rows": "answers",
        "right": "answer is right",
        "predicted": "that the answer is right",
        "length": "tokens of the answer",
        "constant": "constant answer",
    },
}
"""What the axes of a kind of report are called."""
PERCENT = ([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])


def reliability_picture(report: PairReport | LabelReport, path: Path, title: str) -> None:
    """How often predictions of each confidence come true, and below it how many there are.

    Points lie at a bin's mean prediction with Wilson's 95 % interval; on the diagonal the model
    means what it says.
    Raises KeelError as `drawing` does.
    """
    words, low = WORDS[type(report)], report.bins[0].low
    with drawing(path, 6.0) as figure:
        above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
        above.plot([low, 1], [low, 1], color=FAINT, linestyle="--", label="perfectly calibrated")
        if report.n:
            _plot_intervals(
                above,
                [b.predicted for b in report.bins],  # NaN for an empty bin: a gap in the line
                [b.observed for b in report.bins],
                color=COLOURS[0],
                marker=MARKERS[0],
                clip_on=False,
                zorder=3,
                label="model, 95 % interval",
            )
        else:
            above.text(0.5, 0.5, "no rows", ha="center", transform=above.transAxes, color=FAINT)
        below.bar(
            [b.low for b in report.bins],
            [b.n for b in report.bins],
            [b.high - b.low for b in report.bins],
            align="edge",
            color=COLOURS[5],
            edgecolor="white",
        )
        above.set_xlim(low - 0.01, 1.01)
        above.set_ylim(0, 1)
        above.set_yticks(*PERCENT)
        above.set_ylabel(words["right"])
        above.legend(loc="lower right")
        below.set_ylabel(words["rows"])
        below.set_xlabel(f"probability the model gives {words['predicted']}")
        set_titles(figure, title, _figures(report))


def margin_picture(report: PairReport, path: Path, title: str) -> None:
    """How far apart the model scores the two answers of a pair; below 0 it is wrong.
    Raises KeelError as `drawing` does.
    """
    margins, decided = report.margins, report.n - report.ties
    edges, counts = np.array(margins.edges), np.array(margins.counts)
    with drawing(path, 4.5) as figure:
        axes = figure.subplots()
        wrong = edges[:-1] < 0
        sides = (
            (wrong, COLOURS[1], "//", f"wrong: {_percent(margins.below)} of pairs"),
            (~wrong, COLOURS[0], "", f"right: {_percent(1 - margins.below - margins.at_zero)}"),
        )
        for side, colour, hatch, label in sides:
            axes.bar(
                edges[:-1][side],
                counts[side],
                np.diff(edges)[side],
                align="edge",
                color=colour,
                hatch=hatch,
                edgecolor="white",
                label=label,
            )
        even = f"even: {_percent(margins.at_zero)}" if margins.at_zero > 0 else None
        axes.axvline(0, color=INK, linewidth=1.2, label=even)
        if decided:
            axes.axvline(
                margins.median,
                color=INK,
                linewidth=1.2,
                linestyle="--",
                label=f"median {margins.median:.2g}",
            )
        beyond = f" ({margins.beyond} beyond, in the outermost bins)" if margins.beyond else ""
        axes.set_xlabel("score of the better answer minus that of the other" + beyond)
        axes.set_ylabel("pairs")
        axes.figure.legend(loc="outside lower center", ncols=4)  # bars leave no corner free
        set_titles(figure, title, _figures(report))


def length_picture(report: PairReport | LabelReport, path: Path, title: str) -> None:
    """How often the model is right by length, with 95 % intervals.

    A model that goes by length is right where the better answer is longer and wrong elsewhere.
    Raises KeelError as `drawing` does.
    """
    words, bins = WORDS[type(report)], report.by_length
    constant = report.constant_accuracy if isinstance(report, LabelReport) else 0.5
    signed = isinstance(report, PairReport)
    with drawing(path, 4.5) as figure:
        axes = figure.subplots()
        places, right = range(len(bins)), [b.accuracy for b in bins]
        axes.bar(places, [one.mean for one in right], color=COLOURS[5], width=0.7)
        _plot_intervals(axes, places, right, color=INK, linestyle="none", label="95 % interval")
        axes.axhline(constant, color=FAINT, linestyle="--", label=words["constant"])
        axes.set_ylim(0, 1)
        axes.set_yticks(*PERCENT)
        axes.set_ylabel(words["right"])
        names = [f"{_range(b.low, b.high, signed=signed)}\nn = {b.accuracy.n}" for b in bins]
        axes.set_xticks(places, names)
        axes.set_xlabel(words["length"])
        axes.figure.legend(loc="outside lower center", ncols=2)
        set_titles(figure, title, _figures(report))


def _plot_intervals(
    axes: Axes, at: Sequence[float], intervals: Sequence[Interval], **style: Any
) -> None:
    """Estimates with whiskers."""
    mean, low, high = np.array([[one.mean, one.low, one.high] for one in intervals]).T
    whiskers = np.maximum(0.0, [mean - low, high - mean])
    axes.errorbar(at, mean, yerr=whiskers, capsize=3, elinewidth=1.2, **style)


def _range(low: float, high: float, *, signed: bool) -> str:
    """A bin's lengths, the differences with their sign."""
    ends = [f"{end:+.0f}" if signed and end else f"{end:.0f}" for end in (low, high)]
    ends = [end.replace("-", "−") for end in ends]
    return ends[0] if low == high else " to ".join(ends)


def over_optimisation_picture(
    curves: Sequence[Optimisation], path: Path, title: str, subtitle: str = ""
) -> None:
    """Proxy (dashed) and gold (solid) reward against the distance √KL from the reference.

    One colour a run; from 20 points on the means of ten bins of the distance, over the points
    themselves. The proxy has its own axis on the right. A thin dotted line is the law of `fit_law`,
    if the points determine it, drawn no further than they reach.
    Source: Gao et al. 2022 [2210.10760] figure 1.
    Raises KeelError as `drawing` does.
    """
    from matplotlib.lines import Line2D

    handles = []
    with drawing(path, 5.0) as figure:
        axes = figure.subplots()
        right = axes.twinx()
        right.grid(False)
        right.spines["right"].set_visible(True)
        right.set_ylabel("proxy reward (dashed)")
        laws = 0
        for index, curve in enumerate(curves):
            colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
            handles.append(Line2D([], [], color=colour, marker=marker, label=curve.label))
            at = distance(curve.divergence_P)
            _plot_binned(right, at, curve.proxy_P, colour, "", "--")
            _plot_binned(axes, at, curve.gold_P, colour, marker, "-")
            found = fit_law(at, curve.gold_P)
            if found is not None:
                along = np.linspace(np.nanmin(at), np.nanmax(at), 200)
                axes.plot(along, law(along, found), color=colour, linewidth=1.0, linestyle=":")
                laws += 1
        axes.set_xlim(left=0)
        axes.set_xlabel("distance from the reference, √KL (√nats per completion)")
        axes.set_ylabel("gold reward (solid)")
        words = "gold, fitted: $R_0 + d\\,(\\alpha - \\beta\\,\\log d)$"
        for label, style in (("gold reward", "-"), ("proxy reward", "--"), (words, ":")):
            if style != ":" or laws:
                handles.append(Line2D([], [], color=INK, linestyle=style, label=label))
        # Below the axes: curves that rise, fall and cross leave no corner free.
        columns = 4 if len(handles) <= 4 else 3
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        set_titles(figure, title, subtitle)


def _plot_binned(
    axes: Axes, at: Array, values: Array, colour: str, marker: str, style: str
) -> None:
    """Means of bins of equal counts along the distance; from 20 points on over the points."""
    kept = np.isfinite(at) & np.isfinite(values)
    order = np.argsort(at[kept], kind="stable")
    at, values = at[kept][order], values[kept][order]
    if len(at) >= 20:
        axes.plot(at, values, ".", color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
        bins = np.array_split(np.arange(len(at)), 10)
        at, values = (np.array([x[one].mean() for one in bins]) for x in (at, values))
    axes.plot(at, values, color=colour, linestyle=style, marker=marker or None, markersize=5)


def forgetting_picture(
    versions: Sequence[str],
    accuracy: Sequence[Sequence[Interval]],
    path: Path,
    title: str,
) -> None:
    """The accuracy of each version of a reward model on the validation rows of each version.

    Versions are the rows, validation rows the columns: below the diagonal is what a version has
    kept of earlier ones, above it are answers of policies that came later.
    Raises KeelError as `drawing` does.
    """
    share = np.array([[one.mean for one in row] for row in accuracy])
    with drawing(path, 1.5 + 0.6 * len(versions)) as figure:
        axes = figure.subplots()
        axes.grid(visible=False)
        image = axes.imshow(share, cmap="cividis", vmin=0.5, vmax=1, aspect="auto")
        for (row, column), value in np.ndenumerate(share):
            one = accuracy[row][column]
            text = f"{_percent(value)}\n{100 * one.low:.0f}–{100 * one.high:.0f}"
            colour = "white" if value < 0.75 else INK
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
        axes.set_xticks(range(len(versions)), versions)
        axes.set_yticks(range(len(versions)), versions)
        axes.set_xlabel("validation rows of")
        axes.set_ylabel("model after")
        figure.colorbar(image, ax=axes, label="accuracy")
        set_titles(figure, title, "95 % intervals below")


def _figures(report: PairReport | LabelReport) -> str:
    rows = f"{report.n} {WORDS[type(report)]['rows']}"
    if isinstance(report, PairReport) and report.ties:
        rows += f" ({report.ties} tied)"
    accuracy = report.accuracy
    if not accuracy.n:
        return rows
    ends = f"{100 * accuracy.low:.1f}–{100 * accuracy.high:.1f}"
    return (
        f"{rows}: accuracy {_percent(accuracy.mean)} (95 %: {ends}), "
        f"log loss {report.log_loss:.3f}, Brier {report.brier:.3f}, ECE {report.ece:.3f}"
    )


def _percent(share: float) -> str:
    return "–" if np.isnan(share) else f"{100 * share:.1f} %"
