"""A few numbers on each completion of a step, read from its rollouts: what conditions compare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.runs.layout import RunFolder
from keel.runs.rollouts import COMPONENT, TERMS, read_table

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
MOST_ROWS = 256
"""Completions of a step that are looked at, from the first: medians need no more."""
MOST_STEPS = 24
"""Steps whose rollouts are read of a finished run, evenly spread."""
NGRAM = 4
MARKERS = re.compile(r"<[^<>]*>|\\boxed|[^\w\s]+")
"""What frames an answer: tags, `\\boxed`, `####` and signs other than letters and digits."""
SHORTEST = 3 * NGRAM
"""Tokens below which a completion is too short for a share of repeated 4-grams."""
_POLICY = TERMS[0]
_WANTED = ("group", "completion", "tokens", "written", "advantages", _POLICY, "finish", "reward")


@dataclass(frozen=True, eq=False)
class StepRollouts:
    """The completions of one step, arrays with an entry for each; NaN if there is no number.

    `written` counts the tokens of the policy, `context` those of the environment. `repetition` is
    the share of 4-grams of tokens that occurred before in the same completion (NaN for short ones),
    `advantage` that of its first token, `mass` the sum of |w_n s(ρ_n, A_n)| over its tokens, if
    the terms of the loss were recorded, and `bare` whether the completion holds markers and nothing
    else. `words` are the different tokens that the policy wrote, if the environment wrote some too.
    """

    step: int
    group: npt.NDArray[np.int64]
    reward: Array
    written: Array
    context: Array
    truncated: Bools
    repetition: Array
    advantage: Array
    mass: Array
    words: Sequence[npt.NDArray[Any]]
    bare: Bools
    components: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.reward)

    def centred(self, values: Array) -> Array:
        """Values less the mean of their group, over completions with a value; others NaN."""
        out = np.full(len(values), np.nan)
        for one in np.unique(self.group):
            inside = (self.group == one) & np.isfinite(values)
            out[inside] = values[inside] - values[inside].mean() if inside.any() else np.nan
        return out


def read_step(folder: RunFolder, stage: int, step: int) -> StepRollouts | None:
    """The rollouts of a step; None if there are none. Raises KeelError for a damaged file."""
    path = folder.rollouts(stage, step)
    if not path.is_file():
        return None
    table = read_table(path)
    names = [n for n in table.column_names if n in _WANTED or n.startswith(COMPONENT)]
    rows = table.select(names).slice(0, MOST_ROWS).to_pylist()
    return summarise(step, rows) if rows else None


def spread(steps: Sequence[int], most: int = MOST_STEPS) -> list[int]:
    """At most `most` of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    places = np.linspace(0, len(steps) - 1, most).round().astype(int)
    return [steps[place] for place in places]


def summarise(step: int, rows: Sequence[Mapping[str, Any]]) -> StepRollouts:
    """The summary of rows as `Run.rollouts` gives them; columns that they lack are left out."""
    own = [np.asarray(row["written"], dtype=bool) for row in rows]
    tokens = [np.asarray(row["tokens"])[mask] for row, mask in zip(rows, own, strict=True)]
    names = sorted({n for row in rows for n in row if n.startswith(COMPONENT)})
    written = np.array([mask.sum() for mask in own], dtype=np.float64)
    context = np.array([len(mask) for mask in own]) - written
    return StepRollouts(
        step=step,
        group=np.array([row["group"] for row in rows], dtype=np.int64),
        reward=_numbers(row["reward"] for row in rows),
        written=written,
        context=context,
        truncated=np.array([row["finish"] == "length" for row in rows], dtype=bool),
        repetition=_numbers(_repeated(one) for one in tokens),
        advantage=_numbers(
            _first(row.get("advantages"), mask) for row, mask in zip(rows, own, strict=True)
        ),
        mass=_numbers(_mass(row.get(_POLICY)) for row in rows),
        words=[
            np.unique(one if others else one[:0])
            for one, others in zip(tokens, context, strict=True)
        ],
        bare=np.array([_bare(row.get("completion") or "") for row in rows], dtype=bool),
        components={
            name.removeprefix(COMPONENT): _numbers(row.get(name) for row in rows) for name in names
        },
    )


def _numbers(values: Iterable[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _first(advantages: Sequence[float] | None, own: Bools) -> float | None:
    """The advantage of the first token that the policy wrote."""
    return None if advantages is None or not own.any() else advantages[int(np.argmax(own))]


def _mass(terms: Sequence[float] | None) -> float | None:
    return None if terms is None else float(np.abs(terms).sum())


def _repeated(tokens: npt.NDArray[Any]) -> float | None:
    """1 − different 4-grams / all 4-grams."""
    if len(tokens) < SHORTEST:
        return None
    grams = np.lib.stride_tricks.sliding_window_view(tokens, NGRAM)
    return 1 - len(np.unique(grams, axis=0)) / len(grams)


def _bare(text: str) -> bool:
    return bool(text.strip()) and not MARKERS.sub("", text).strip()
