"""Judged answers from files or Python: pairs, labelled answers, labelled steps, on two splits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from keel.config.fields import unknown
from keel.config.sources import PreferenceData
from keel.config.stage import Records
from keel.data import judged_rows as judged
from keel.data.judged_rows import Fields, JudgedRow, Labelled, Preference, Stepwise
from keel.data.splits import Placed, Splits, position, read_splits, tables_of
from keel.data.tables import SourceRow, Table, all_bad
from keel.runs.rows import LeftOut
from keel.types import KeelError

T = TypeVar("T", bound=JudgedRow)
E = TypeVar("E")


def encode_row(row: T, encode: Callable[[T], E]) -> E:
    """A row in tokens. Raises KeelError that names the row's place."""
    try:
        return encode(row)
    except KeelError as error:
        place = "" if row.origin is None else f"{row.origin.place}: "
        raise KeelError(f"{place}{error}") from error


def without_bad(splits: Splits[T], encode: Callable[[T], Any]) -> Splits[T]:
    """The rows that can be encoded; the others go among the splits' left out.

    Raises KeelError if no train row is left.
    """
    bad: list[LeftOut] = []

    def takes(row: T) -> bool:
        try:
            encode(row)
        except KeelError as error:
            if row.origin is None:
                raise
            bad.append(row.origin.left_out(str(error)))
            return False
        return True

    train = tuple(filter(takes, splits.train))
    if not train:
        raise all_bad(bad[0].source, bad)
    held = tuple(filter(takes, splits.validation))
    return Splits(train, held, (*splits.left_out, *bad))


VALIDATION = "validation/"
"""Begins the ids of a separate validation file: both files may number their rows from 0."""


def read_pairs(source: PreferenceData, seed: int = 0) -> Splits[Preference]:
    """Rows of `prompt/chosen/rejected`, with `probability` and `margin` if the file has them.

    The prompt is text or messages, an answer text or messages; without a `prompt` the answers are
    whole conversations. `seed` goes to a Python entry that has a parameter of that name. Raises
    KeelError for a row that is none of these, naming file, line, column and fix.
    """
    return _read(source, seed, judged.pair, judged.PAIR)


def read_labelled(source: PreferenceData, seed: int = 0) -> Splits[Labelled]:
    """Rows of `prompt/completion/label`; a label is a boolean or a number from 0 to 1."""
    return _read(source, seed, judged.labelled, judged.LABELLED)


def read_steps(source: PreferenceData, seed: int = 0) -> Splits[Stepwise]:
    """Rows of `prompt/completions/labels`, or of `prompt/steps/first_error`.

    A step's label is a boolean, a number from 0 to 1, or null if it was not judged; a first
    error is the index (from 0) of the first wrong step, or null if all are right. BIG-Bench
    Mistake's `input` and `mistake_index` are taken for `prompt` and `first_error`. A step may be
    blank, an answer not.
    """
    return _read(source, seed, judged.stepwise, judged.STEPWISE)


READERS: dict[Records, Callable[[PreferenceData, int], Splits[Any]]] = {
    "pairs": read_pairs,
    "labels": read_labelled,
    "steps": read_steps,
}


def _read(
    source: PreferenceData, seed: int, make: Callable[[Fields, str], T], known: tuple[str, ...]
) -> Splits[T]:
    """From a source to two splits: `make` builds a row of the kind, `known` are its columns."""
    tables = tables_of(source, seed, "preference data")
    name = source.name.rpartition("/")[2]
    name = name if source.path is None else f"{name}:{Path(source.path).stem}"
    for table in tables:
        if table is not None:
            _check_names(source, table, known)
    ids: set[str] = set()

    def placed(row: SourceRow, held: bool) -> Placed[T] | None:
        fields = Fields(row.values, row.place, source.columns, row)
        prefix = VALIDATION if held else ""
        item = make(fields, _id(fields, f"{name}/{prefix}{row.number}", prefix))
        if not _is_kept(source, item, fields):
            return None
        if item.id in ids:
            raise KeelError(f"{row.place}: two rows have the id {item.id!r}: give each its own")
        prompt = position(item.prompt)
        if (group := _group(source, fields)) is None:
            found = Placed(item, row, prompt, prompt)
        else:
            found = Placed(replace(item, group=group), row, prompt, position(group))
        ids.add(item.id)
        return found

    return read_splits(source, tables, placed, name, "data")


def _is_kept(source: PreferenceData, item: T, fields: Fields) -> bool:
    """Whether a row is used; one with an empty answer may be dropped. Raises KeelError for one
    that is refused."""
    empty = [name for name, text in item.answers.items() if not text.strip()]
    if not empty or source.empty == "keep":
        return True
    if source.empty == "refuse":
        name = fields.first(*empty[0].split("/"))
        fix = 'the answer is empty: leave the row out, or set empty = "drop" (or "keep")'
        raise fields.wrong(name, fix)
    return False


def _group(source: PreferenceData, fields: Fields) -> str | None:
    if source.group is None:
        return None
    value = fields.value(source.group)
    if value is None:
        raise fields.wrong(source.group, "the group is empty: name the row's group")
    return json.dumps(value, sort_keys=True, default=str)


def _check_names(source: PreferenceData, table: Table, known: tuple[str, ...]) -> None:
    """A mistaken name for a column that may be absent would otherwise pass in silence."""
    for name, column in source.columns.items():
        if name not in known:
            raise KeelError(f"columns: {unknown('column', name, known)}")
        if not any(column in row.values for row in table.rows):
            there = {str(key) for row in table.rows for key in row.values}
            raise KeelError(f"{table.source}: columns.{name}: {unknown('column', column, there)}")


def _id(fields: Fields, number: str, prefix: str) -> str:
    """The row's own `id`, a text or an integer, after the prefix; else its number in its file."""
    own = fields.row.get("id")
    if isinstance(own, bool) or not isinstance(own, str | int) or own == "":
        return number
    return f"{prefix}{own}"
