"""Judged rows as the steps of a stage that learns from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from keel.models.packed import PackedSizes, sizes_on
from keel.training import non_finite as faults
from keel.training import supervised as fit
from keel.training.judged_data import EncodedPair, Marked, Ready, of_step

E = TypeVar("E", EncodedPair, Marked)


def sizes_of(rows: Sequence[EncodedPair] | Sequence[Marked], device: torch.device) -> PackedSizes:
    """What rows are cut by."""
    return sizes_on(device, [row.length for row in rows])


def judged_rows(
    ready: Ready[E],
    size: int,
    seed: int,
    device: torch.device,
    learn: Callable[[Sequence[E], int], fit.Learned],
) -> fit.Rows[Any]:
    """`size` rows a step, in epochs, learned from on this device."""
    return fit.Rows(
        draw=lambda number: of_step(ready.train, size, number, seed),
        learn=learn,
        sizes=lambda rows: sizes_of(rows, device),
        alone=lambda rows: [[row] for row in rows],
        keep=faults.write_rows,
    )
