"""Curves for a terminal, in Unicode: braille points for a plot, blocks for a sparkline."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCKS = "▁▂▃▄▅▆▇█"
# A braille cell has 2 × 4 dots; the bit of the dot at row, column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800


def sparkline(values: npt.ArrayLike, width: int | None = None) -> str:
    """The values as a line of blocks, lowest to highest; a gap where one is not finite.

    With `width`, neighbours are averaged until no more than so many are left. A constant is drawn
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


def curve(
    values: npt.ArrayLike,
    steps: npt.ArrayLike | None = None,
    *,
    title: str = "",
    width: int = 60,
    height: int = 9,
    limits: tuple[float, float] | None = None,
) -> str:
    """A line plot: `height` rows of braille, `width` cells wide, with labelled axes.

    Points are joined over their steps (their numbers from 1 where none are given); values that are
    not finite are left out. Lines end without trailing blanks, the last without a newline.

    Raises:
        ValueError: as many steps as values are needed, and room to draw.
    """
    y = np.asarray(values, dtype=np.float64).reshape(-1)
    x = np.arange(1, y.size + 1.0) if steps is None else np.asarray(steps, np.float64).reshape(-1)
    if x.shape != y.shape:
        raise ValueError(f"{x.size} steps for {y.size} values")
    if width < 2 or height < 2:
        raise ValueError(f"{width} × {height} cells are too few to draw in")
    kept = np.isfinite(y) & np.isfinite(x)
    x, y = x[kept], y[kept]
    head = [title] if title else []
    if y.size == 0:
        return "\n".join([*head, "(nothing to draw yet)"])
    low, high = _limits(y, limits)
    cells = _cells(x, np.clip(y, low, high), low, high, width, height)
    labels = {0: f"{high:.3g}", height - 1: f"{low:.3g}"}
    if height % 2 and height > 3:  # only then is there a row in the middle
        labels[height // 2] = f"{(low + high) / 2:.3g}"
    margin = max(len(label) for label in labels.values())
    rows = []
    for row in range(height):
        label = labels.get(row, "")
        line = "".join(chr(_BLANK + int(cell)) if cell else " " for cell in cells[row])
        rows.append(f"{label:>{margin}} ┤{line}".rstrip())
    first, last = f"{x.min():g}", f"{x.max():g}"
    under = first if first == last else f"{first}{last:>{width - len(first)}}"
    axis = [" " * margin + " └" + "─" * width, " " * (margin + 2) + under]
    return "\n".join([*head, *rows, *axis])


def _limits(y: npt.NDArray[np.float64], limits: tuple[float, float] | None) -> tuple[float, float]:
    low, high = limits if limits is not None else (float(y.min()), float(y.max()))
    if high > low:
        return low, high
    room = abs(low) / 2 or 0.5
    return low - room, low + room


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
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
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
