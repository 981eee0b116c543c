"""Rows of a source on two splits, none of whose prompts or groups is in both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from keel.config.sources import PreferenceData, TaskSource
from keel.data.tables import Gathered, SourceRow, Table, all_bad, read_table
from keel.data.tasks.base import splits_of
from keel.runs.quarantine import LeftOut
from keel.types import KeelError

T = TypeVar("T")
KINDS = {
    "jsonl": "a file with one JSON object a line",
    "parquet": "a Parquet file",
    "datasets": "what the `datasets` library loads by name",
}
"""The kinds of source that are tables."""


@dataclass(frozen=True, slots=True)
class Splits(Generic[T]):
    """Rows in two splits; no prompt, and no value of the group column, is in both.

    `left_out` are the rows in neither: bad ones, train rows whose prompt or group is also in the
    validation split (`overlap` counts these), and those with an empty answer, if the source says
    to drop them (`dropped`).
    """

    train: tuple[T, ...]
    validation: tuple[T, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def overlap(self) -> int:
        return sum(row.why == "overlap" for row in self.left_out)

    @property
    def dropped(self) -> int:
        return sum(row.why == "empty" for row in self.left_out)


@dataclass(frozen=True, slots=True)
class Placed(Generic[T]):
    """What a row became, and the positions of its prompt and of its group, which decide its split.

    Without a group, rows of one prompt are one.
    """

    item: T
    row: SourceRow
    prompt: float
    group: float


Make = Callable[[SourceRow, bool], Placed[T] | None]
"""From a row and whether it is of a validation table; None: it is dropped for an empty answer."""


def source_tables(source: TaskSource | PreferenceData, where: str) -> tuple[Table, Table | None]:
    """The train table of a source of files, and the validation one if it is given.

    Bad rows are among the tables' `bad`. Raises KeelError that begins with `where`.
    """
    named = source.name == "datasets"
    if source.path is None:
        raise KeelError(where + (": give a data set's name" if named else ": give a file"))
    options = dict(source.options)
    split = str(options.pop("split", "train")) if named else "train"
    train = read_table(source.name, source.path, options, split, "quarantine")
    if source.validation_path is None:
        return train, None
    path, held = source.path, source.validation_path
    other = (path, options, held) if named else (held, options, split)
    return train, read_table(source.name, *other, "quarantine")


def read_splits(
    source: TaskSource | PreferenceData,
    tables: tuple[Table, Table | None],
    make: Make[T],
    name: str,
    key: str,
) -> Splits[T]:
    """Both splits, by the hash of the prompt or group, or of a table each.

    Raises KeelError for a bad row unless the source drops them (its `key` in the recipe), and if a
    table or the train split is left without rows.
    """
    train, validation = tables
    kept, left = _rows(train, make, False, name, source, key)
    if validation is None:
        splits = splits_of([row.group for row in kept], source.validation_fraction)
        held = [row for row, split in zip(kept, splits, strict=True) if split == "validation"]
        kept = [row for row, split in zip(kept, splits, strict=True) if split == "train"]
    else:
        held, left_held = _rows(validation, make, True, f"{name}/validation", source, key)
        left += left_held
    prompts, groups = {row.prompt for row in held}, {row.group for row in held}
    found = [row for row in kept if row.prompt not in prompts and row.group not in groups]
    reason = "the prompt or group is also in the validation split"
    left += [
        row.row.left_out(reason, "overlap")
        for row in kept
        if row.prompt in prompts or row.group in groups
    ]
    if not found:
        raise KeelError(
            f"{name}: every train prompt is also in the validation split: drop validation_path or "
            "group, or give other rows"
        )
    items = tuple(row.item for row in found), tuple(row.item for row in held)
    return Splits(*items, tuple(left))


def _rows(
    table: Table,
    make: Make[T],
    held: bool,
    name: str,
    source: TaskSource | PreferenceData,
    key: str,
) -> tuple[list[Placed[T]], list[LeftOut]]:
    """What the table's rows became, and those left out: bad ones, and with an empty answer."""
    found: list[Placed[T]] = []
    dropped: list[LeftOut] = []
    bad = Gathered(source.bad_rows, table.bad)
    for row in table.rows:
        try:
            placed = make(row, held)
        except KeelError as error:
            bad.rows.append(row.left_out(str(error)))
            continue
        if placed is None:
            dropped.append(row.left_out("an answer is empty", "empty"))
        else:
            found.append(placed)
    bad.check(key)
    if not found and bad.rows:
        raise all_bad(table.source, sorted(bad.rows, key=lambda one: one.line))
    if not found:
        raise KeelError(f"{name}: no rows are left: every one has an empty answer")
    return found, sorted([*bad.rows, *dropped], key=lambda one: one.line)
