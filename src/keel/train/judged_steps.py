"""Judged rows as the steps of a stage that learns from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from keel.train import faults, fit
from keel.train.rows_judged import Marked, Pair, Ready, of_step

E = TypeVar("E", Pair, Marked)


def judged_rows(
    ready: Ready[E], size: int, seed: int, learn: Callable[[Sequence[E], int], fit.Learned]
) -> fit.Rows[Any]:
    """`size` rows a step, in epochs."""
    return fit.Rows(
        draw=lambda number: of_step(ready.train, size, number, seed),
        learn=learn,
        lengths=lambda rows: [row.length for row in rows],
        alone=lambda rows: [[row] for row in rows],
        keep=faults.write_rows,
    )
