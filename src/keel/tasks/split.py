"""The two sides of stored rows, and what is counted on the way to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from keel.types import Side

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sides(Generic[T]):
    """Rows on two sides; no prompt, and no value of the group column, is on both.

    `overlap` counts the train rows left out because their prompt or group is also held out,
    `dropped` the rows with an empty answer where the source says to drop them.
    """

    train: tuple[T, ...]
    heldout: tuple[T, ...]
    overlap: int = 0
    dropped: int = 0


def sides_of(places: Sequence[float], heldout_share: float) -> list[Side]:
    """The side of each row from where its key lies in [0, 1) (`base.position`).

    Few rows may all fall on one side: the key nearest to the other goes over, so that two
    different keys always give two sides. One key alone is on the train side.
    """
    held = {p for p in places if p < heldout_share}
    different = set(places)
    if len(different) < 2:
        held = set()
    elif not held:
        held = {min(different)}
    elif held == different:
        held = different - {max(different)}
    return ["heldout" if p in held else "train" for p in places]
