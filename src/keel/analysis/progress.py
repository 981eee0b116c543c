"""Progress of a run: a live bar on a terminal, else lines for a log; and curves in Unicode."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from keel.analysis.text import visible
from keel.runs.callbacks import Callback, RunState

SHOWN = {
    "loss": "loss",
    "reward": "reward",
    "episode/return": "return",
    "eval/return": "greedy",
    "epsilon": "ε",
    "kl": "kl",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "value/explained_variance": "ev",
}
"""The metrics of a line, and what the line calls them."""


@contextmanager
def watching(console: Console) -> Iterator[Lines]:
    """A bar on a terminal, one display that changes in a notebook; else lines."""
    if console.quiet or not (console.is_jupyter or console.is_terminal):
        lines = Lines(console)
        try:
            yield lines
        finally:
            lines.print_skipped()
        return
    with Notebook(console) if console.is_jupyter else Bar(console) as live:
        yield live


def summary(metrics: Mapping[str, float]) -> str:
    """The few metrics that say how a step went."""
    loss_only = not any(name in metrics for name in ("reward", "episode/return"))
    wanted = {k: v for k, v in SHOWN.items() if loss_only or k != "loss"}
    return "  ".join(
        f"{short} {metrics[name]:.3g}" for name, short in wanted.items() if name in metrics
    )


def speed(speeds: Mapping[str, float]) -> str:
    """Tokens a second: `3,512 tok/s (gen 9,800, update 6,100, MFU 38 %)`; empty if unknown."""
    if "speed/step" not in speeds:
        return ""
    names = {"speed/generation": "gen", "speed/update": "update"}
    parts = [f"{short} {_round(speeds[name])}" for name, short in names.items() if name in speeds]
    if "mfu/update" in speeds:
        parts.append(f"MFU {speeds['mfu/update']:.0%}")
    inside = f" ({', '.join(parts)})" if "speed/generation" in speeds else ""
    return f"{_round(speeds['speed/step'])} tok/s{inside}"


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


class Lines(Callback):
    """For logs: a line of the first and the last step, of steps before a note, and of others at
    most every few seconds."""

    QUIET = 5.0
    """Seconds after the line of a step in which other steps have none."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.shown = -math.inf
        """When the last line of a step was printed."""
        self.skipped = ""
        """The line of the last step, if it was not printed."""

    def on_stage(self, state: RunState) -> None:
        self.shown = -math.inf
        self.on_note(f"stage {state.stage} ({state.kind}): {state.steps} steps, {state.step} done")

    def on_record(self, state: RunState) -> None:
        now = time.monotonic()
        of = f"{state.stage} {_done(state)}/{state.steps}"
        parts = [of, summary(state.metrics), f"{state.seconds:.2f}s", speed(state.speeds)]
        self.skipped = "  ".join(filter(None, parts))
        if now >= self.shown + self.QUIET or _done(state) >= state.steps:
            self.shown = now
            self.print_skipped()

    def on_evaluation(self, state: RunState, result: Mapping[str, Any]) -> None:
        at = f"after {state.step} steps"
        if result.get("kind") == "return":
            at = f"row {state.step}"
        self.on_note(f"{state.stage} {at}: {describe_evaluation(result)}")

    def on_note(self, text: str) -> None:
        self.print_skipped()
        self._print(text)

    def print_skipped(self) -> None:
        """Print the line of the last step if that was not done: at the end, and before a note."""
        if self.skipped:
            self._print(self.skipped)
            self.skipped = ""

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Bar(Lines):
    """A live bar per stage, with the reward so far as a sparkline."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[curve]}", style="cyan"),
            TextColumn("{task.fields[line]}"),
            console=console,
            refresh_per_second=8,
        )
        self.task: TaskID | None = None
        self.curve: list[float] = []
        self.drawn = console.encoding.startswith("utf")

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def on_stage(self, state: RunState) -> None:
        self.curve = []
        self.task = self.bar.add_task(
            state.stage, total=state.steps, completed=state.step, curve="", line=""
        )

    def on_record(self, state: RunState) -> None:
        assert self.task is not None
        self.curve += _gain(state)
        self.bar.update(
            self.task,
            completed=_done(state),
            curve=sparkline(self.curve, width=16) if self.drawn else "",
            line="  ".join(filter(None, (summary(state.metrics), speed(state.speeds)))),
        )


class Notebook(Lines):
    """One display of a cell, which shows the newest lines and a bar per stage while it changes.

    The saved notebook holds how it ended. It needs no widgets.
    """

    KEPT, EVERY = 12, 0.2
    """Lines that are shown, and seconds between two changes."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.lines: list[str] = []
        self.bars: dict[str, str] = {}
        self.curve: list[float] = []
        self.drawn = -math.inf
        self.display: Any = None

    def __enter__(self) -> Notebook:
        from IPython.display import display

        show: Any = display
        self.display = show(self._content(), raw=True, display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()

    def on_stage(self, state: RunState) -> None:
        self.curve = []
        self._bar(state, f"{state.steps} steps")

    def on_record(self, state: RunState) -> None:
        self.curve += _gain(state)
        line = (sparkline(self.curve, width=16), summary(state.metrics), speed(state.speeds))
        self._bar(state, "  ".join(filter(None, line)))

    def on_note(self, text: str) -> None:
        self.lines.append(text)
        self._draw()

    def _bar(self, state: RunState, text: str) -> None:
        filled = round(24 * _done(state) / state.steps) if state.steps else 24
        bar = f"{'█' * filled}{'░' * (24 - filled)} {_done(state)}/{state.steps}"
        self.bars[state.stage] = f"{state.stage}  {bar}  {text}"
        if time.monotonic() >= self.drawn + self.EVERY:
            self._draw()

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        self.display.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        more = len(self.lines) - self.KEPT
        head = [f"… {more} lines before, in events.jsonl"] if more > 0 else []
        shown = [*head, *self.lines[-self.KEPT :], *self.bars.values()]
        text = "\n".join(visible(line) for line in shown)
        return {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}


def _gain(state: RunState) -> list[float]:
    """What the curve of a stage shows of a step, if it has it."""
    names = ("reward", "episode/return", "loss")
    return [state.metrics[name] for name in names if name in state.metrics][:1]


def _done(state: RunState) -> int:
    """How far a stage has come: in steps, or in steps of its environments."""
    return int(state.metrics.get("environment_steps", state.step))


def describe_evaluation(result: Mapping[str, Any]) -> str:
    """An evaluation, that of sets included, or what validation rows say of a reward model, on one
    line."""
    return "; ".join(evaluation_lines(result))


def evaluation_lines(result: Mapping[str, Any]) -> list[str]:
    """The stage's own evaluation, if it was made, and that of each set."""
    own = [_evaluation(result)] if "sets" not in result or "mean" in result else []
    return [*own, *(_sampled(one, name) for name, one in result.get("sets", {}).items())]


def _evaluation(result: Mapping[str, Any]) -> str:
    if result.get("kind") == "return":
        interval = f"[{result['low']:.1f}, {result['high']:.1f}]"
        return f"greedy return {result['mean']:.1f} {interval}, n = {result['n']}"
    if "accuracy" in result:
        return _measured(result)
    if "mean_token_accuracy" in result:
        right = f"{result['mean_token_accuracy']:.1%} of the tokens most probable"
        return f"validation loss {result['loss']:.4f}, {right}, n = {result['n']}"
    return _sampled(result, "validation greedy")


def _sampled(result: Mapping[str, Any], name: str) -> str:
    """What was found by completions."""
    line = f"{name} {figure(result)}, n = {size(result)}"
    if "sampled" in result:
        sampled = result["sampled"]["mean"]
        form = ".1%" if result.get("measure", "pass@1") == "pass@1" else ".3g"
        line += "; sampled " + ("undefined" if sampled is None else f"{sampled:{form}}")
    for rate, value in result.items():
        if rate.startswith(("pass@", "maj@")):
            line += f"; {rate} {value['mean']:.1%}"
    return line


def figure(result: Mapping[str, Any]) -> str:
    """Accuracy as a share, or the mean reward as a number, with its interval."""
    mean, low, high = (result[key] for key in ("mean", "low", "high"))
    form, name = (".1%", "") if result.get("measure", "pass@1") == "pass@1" else (".3g", "reward ")
    if mean is None:
        return f"{name}undefined"
    if low is None or high is None:
        return f"{name}{mean:{form}}"
    return f"{name}{mean:{form}} [{low:{form}}, {high:{form}}]"


def size(result: Mapping[str, Any]) -> str:
    """Of how many prompts an evaluation is, and how many had no verdict."""
    left = result.get("unjudged", 0)
    return f"{result['n']}" + (f" ({left} without a verdict left out)" if left else "")


def _measured(result: Mapping[str, Any]) -> str:
    """What validation rows say of a reward model, or of a policy's preferences."""
    share = result["accuracy"]
    if share["mean"] is None:
        accuracy = "undefined (no decided row)"
    elif share["low"] <= 0 and share["high"] >= 1:
        right = f"{share['mean'] * share['n']:g} of {share['n']}"
        accuracy = f"{right} (too few prompts for an interval)"
    else:
        accuracy = f"{share['mean']:.1%} [{share['low']:.1%}, {share['high']:.1%}]"
    line = f"validation accuracy {accuracy}, n = {result['n']}"
    for name, words in (("log_loss", "log loss"), ("ece", "calibration error"), ("f1", "F1")):
        value = result.get(name)
        if value is not None:
            line += f"; {words} {value:.3f}"
    return line


BLOCKS = "▁▂▃▄▅▆▇█"
# A braille cell has 2 × 4 dots; the bit of the dot at row, column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800


def sparkline(values: npt.ArrayLike, width: int | None = None) -> str:
    """The values as a line of blocks, lowest to highest; a gap if one is not finite.

    With `width`, neighbours are averaged until no more than that are left. A constant is drawn
    in the middle.
    """
    y = np.asarray(values, dtype=np.float64).reshape(-1)
    if width is not None and y.size > width:
        parts = [part[np.isfinite(part)] for part in np.array_split(y, width)]
        y = np.array([part.mean() if part.size else np.nan for part in parts])
    finite = y[np.isfinite(y)]
    if finite.size == 0:
        return " " * y.size
    low, high = float(finite.min()), float(finite.max())
    span = high - low
    top = len(BLOCKS) - 1
    out = []
    for value in y:
        if not np.isfinite(value):
            out.append(" ")
        else:
            out.append(BLOCKS[round((value - low) / span * top) if span > 0 else top // 2])
    return "".join(out)


def curve(values: npt.ArrayLike, *, width: int = 60, height: int = 9) -> str:
    """A line plot of values over their numbers from 1, in braille of `width` × `height` cells.

    Values that are not finite are left out. Lines end without trailing blanks, the last without a
    newline.
    """
    y = np.asarray(values, dtype=np.float64).reshape(-1)
    kept = np.isfinite(y)
    x, y = np.asarray(np.flatnonzero(kept) + 1, np.float64), y[kept]
    if y.size == 0:
        return "(nothing to draw yet)"
    low, high = float(y.min()), float(y.max())
    if low == high:
        margin = abs(low) / 2 or 0.5
        low, high = low - margin, low + margin
    cells = _cells(x, y, low, high, width, height)
    labels = {0: f"{high:.3g}", height - 1: f"{low:.3g}"}
    if height % 2 and height > 3:  # only then is there a row in the middle
        labels[height // 2] = f"{(low + high) / 2:.3g}"
    indent = max(len(label) for label in labels.values())
    rows = []
    for row in range(height):
        line = "".join(chr(_BLANK + int(cell)) if cell else " " for cell in cells[row])
        rows.append(f"{labels.get(row, ''):>{indent}} ┤{line}".rstrip())
    first, last = f"{x[0]:g}", f"{x[-1]:g}"
    under = first if first == last else f"{first}{last:>{width - len(first)}}"
    return "\n".join([*rows, " " * indent + " └" + "─" * width, " " * (indent + 2) + under])


def _cells(
    x: npt.NDArray[np.float64],
    y: npt.NDArray[np.float64],
    low: float,
    high: float,
    width: int,
    height: int,
) -> npt.NDArray[np.uint8]:
    """The braille bits of each cell (height, width)."""
    across, down = 2 * width, 4 * height
    span = float(x[-1] - x[0])
    columns = (x - x[0]) / span * (across - 1) if span > 0 else np.full(x.shape, (across - 1) / 2)
    at = np.arange(round(columns[0]), round(columns[-1]) + 1)
    heights = np.interp(at, columns, y)
    rows = np.rint((high - heights) / (high - low) * (down - 1)).astype(int)
    # Where there are more points than columns, a column shows the range of its points.
    own = np.rint(columns).astype(int)
    point_rows = np.rint((high - y) / (high - low) * (down - 1)).astype(int)
    cells = np.zeros((height, width), dtype=np.uint8)
    previous = rows[0]
    for column, row in zip(at, rows, strict=True):
        here = [*point_rows[own == column], row]
        # Up to half of the jump from the column before, so that steep lines stay joined.
        top, bottom = min(*here, previous), max(*here, previous)
        if previous < min(here):
            top = previous + 1
        elif previous > max(here):
            bottom = previous - 1
        for dot in range(top, bottom + 1):
            cells[dot // 4, column // 2] |= _DOTS[dot % 4][column % 2]
        previous = row
    return cells
