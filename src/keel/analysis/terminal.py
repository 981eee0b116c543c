"""Curves for a terminal, in Unicode: braille points for a plot, blocks for a sparkline."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
