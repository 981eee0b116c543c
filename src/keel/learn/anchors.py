"""The states that the turns of conversations begin at, by which turns of one group are compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keel.types import Group


def anchors(groups: Sequence[Group]) -> list[int]:
    """The number of the state that the turn of each written token begins at.

    Turns of one group begin at the same state if the environment named it the same, else if the
    tokens of what arrived before them are the same; those of a first turn are none.
    """
    numbers: dict[tuple[int, str | bytes], int] = {}
    found: list[int] = []
    for at, group in enumerate(groups):
        for completion in group.completions:
            named, end = dict(completion.states), 0
            places = completion.written.nonzero()[0]
            gaps = (np.diff(places) != 1).nonzero()[0] + 1
            for turn in np.split(places, gaps) if len(places) else ():
                start = int(turn[0])
                key = named.get(start, completion.tokens[end:start].tobytes())
                found += [numbers.setdefault((at, key), len(numbers))] * len(turn)
                end = int(turn[-1]) + 1
    return found
