"""Preference data as tokens: pairs and labelled answers, filtered by length, in epochs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from keel.config.stage import Records
from keel.data.judged_rows import JudgedRow, Labelled, Preference, Stepwise
from keel.data.preferences import encode_row, without_bad
from keel.data.splits import Splits
from keel.models.packed import PackedSizes, sizes_on
from keel.models.reward import Answered, Reader, joined
from keel.runs.quarantine import LeftOut
from keel.types import KeelError


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Two answers to one prompt, in tokens. `cluster` is the same for related examples."""

    chosen: Answered
    rejected: Answered
    probability: float
    margin: float
    cluster: str

    @property
    def length(self) -> int:
        return len(self.chosen.tokens) + len(self.rejected.tokens)

    @property
    def longest(self) -> int:
        return max(len(self.chosen.tokens), len(self.rejected.tokens))


@dataclass(frozen=True, slots=True)
class Marked:
    """One answer in tokens, and a label (0 to 1) for each of its ends; None if there is none."""

    answer: Answered
    labels: tuple[float | None, ...]
    cluster: str

    @property
    def length(self) -> int:
        return len(self.answer.tokens)

    @property
    def longest(self) -> int:
        return self.length


R = TypeVar("R", Preference, Labelled, Stepwise)
E = TypeVar("E", EncodedPair, Marked)


@dataclass(frozen=True, slots=True)
class Ready(Generic[E]):
    """Both splits, encoded; of each the number of examples left out for being too long.

    `left_out` are all the examples that are not used.
    """

    train: tuple[E, ...]
    validation: tuple[E, ...]
    long: int
    long_validation: int
    left_out: tuple[LeftOut, ...] = ()


def ready(
    splits: Splits[R],
    encode: Callable[[R], E],
    limit: int | None,
    validation_rows: int,
    stage: str,
    *,
    quarantine: bool = False,
) -> Ready[E]:
    """The rows of at most `limit` tokens; of the validation split a random `validation_rows`.

    With `quarantine` rows that cannot be encoded are left out. Raises KeelError if no train row is
    left, or none of a validation split that had some.
    """
    splits = without_bad(splits, encode) if quarantine else splits
    left = list(splits.left_out)
    train, long = _fitting(splits.train, encode, limit, left)
    some = some_rows(splits.validation, validation_rows)
    held, long_validation = _fitting(some, encode, limit, left)
    if not train:
        raise KeelError(
            f"stage {stage!r}: each of the {len(splits.train)} train rows is longer than "
            f"{limit} tokens: raise {stage}.max_tokens, or use a model with a longer context"
        )
    if long_validation and not held:
        raise KeelError(
            f"stage {stage!r}: each of the {long_validation} validation rows is longer than "
            f"{limit} tokens: raise {stage}.max_tokens, or set {stage}.evaluation.rows = 0"
        )
    return Ready(train, held, long, long_validation, tuple(left))


def encoder(records: Records, reader: Reader, separator: str = "\n") -> Callable[[Any], Any]:
    """What encodes examples of a kind: preferences as pairs of answers, labelled answers, judged at
    their end, or answers in steps with `separator` between them, judged at the end of each."""

    def pair(row: Preference) -> EncodedPair:
        return EncodedPair(
            reader.answer(row.prompt, row.chosen, row.id, tools=row.tools),
            reader.answer(row.prompt, row.rejected, row.id, tools=row.tools),
            row.probability,
            row.margin,
            cluster_of(row),
        )

    def labelled(row: Labelled) -> Marked:
        answer = reader.answer(row.prompt, row.completion, row.id, tools=row.tools)
        return Marked(answer, (row.label,), cluster_of(row))

    def steps(row: Stepwise) -> Marked:
        answer = reader.steps(row.prompt, joined(row.steps, separator), row.id, tools=row.tools)
        return Marked(answer, row.labels, cluster_of(row))

    kinds: dict[Records, Callable[[Any], Any]]
    kinds = {"pairs": pair, "labels": labelled, "steps": steps}
    return kinds[records]


def cluster_of(row: JudgedRow) -> str:
    """What related examples have in common: their group, or else their prompt."""
    if row.group is not None:
        return row.group
    prompt = row.prompt
    return prompt if isinstance(prompt, str) else json.dumps(list(prompt), sort_keys=True)


def of_step(rows: Sequence[E], size: int, number: int, seed: int) -> list[E]:
    """The rows of step `number` (from 1): epochs end to end, each a permutation of all rows.

    The permutation of epoch e is seeded by `SeedSequence([seed, e])`, so that the rows are a
    function of seed and step.
    """
    n = len(rows)
    places = range((number - 1) * size, number * size)
    orders = {
        epoch: np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(n)
        for epoch in {place // n for place in places}
    }
    return [rows[int(orders[place // n][place % n])] for place in places]


def sizes_of(rows: Sequence[EncodedPair] | Sequence[Marked], device: torch.device) -> PackedSizes:
    """The sizes by which examples are cut into micro-batches."""
    return sizes_on(device, [row.length for row in rows])


def some_rows(rows: Sequence[R], n: int) -> Sequence[R]:
    """At most n of the rows, the same ones each time."""
    if len(rows) <= n:
        return rows
    return [rows[at] for at in sorted(np.random.default_rng(0).permutation(len(rows))[:n].tolist())]


def _fitting(
    rows: Iterable[R], encode: Callable[[R], E], limit: int | None, left: list[LeftOut]
) -> tuple[tuple[E, ...], int]:
    """The rows that fit, encoded, and the number of the others, which go to `left`."""
    kept, long = [], 0
    for row in rows:
        found = encode_row(row, encode)
        if limit is None or found.longest <= limit:
            kept.append(found)
            continue
        long += 1
        if row.origin is not None:
            reason = f"{found.longest} tokens, more than {limit}"
            left.append(row.origin.left_out(reason, "long"))
    return tuple(kept), long
