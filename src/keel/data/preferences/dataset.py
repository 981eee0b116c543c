"""Judged answers from files or Python: pairs, labelled answers, labelled steps, on two splits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from keel.config.fields import unknown
from keel.config.sources import PreferenceData
from keel.config.stage import Records
from keel.data.preferences import fields as judged
from keel.data.preferences.fields import Fields
from keel.data.preferences.schema import Labelled, Origin, Preference, Stepwise
from keel.data.tables import Gathered, Table, all_bad, list_rows, rows_table, split_tables
from keel.data.tasks.base import position, splits_of
from keel.data.tasks.generated import call_entry
from keel.runs.quarantine import LeftOut
from keel.types import KeelError

T = TypeVar("T", bound=Preference | Labelled | Stepwise)
E = TypeVar("E")


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


def encode_row(row: T, encode: Callable[[T], E]) -> E:
    """A row in tokens. Raises KeelError that names the row's place."""
    try:
        return encode(row)
    except KeelError as error:
        place = "" if row.origin is None else f"{row.origin.place}: "
        raise KeelError(f"{place}{error}") from error


def readable(row: T, encode: Callable[[T], E]) -> E | None:
    """A row in tokens; None if it cannot be encoded."""
    try:
        return encode(row)
    except KeelError:
        return None


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


KINDS = ("jsonl", "parquet", "datasets")
VALIDATION = "validation/"
"""Begins the ids of a validation file of its own: both files may number their rows from 0."""


def read_pairs(source: PreferenceData, seed: int = 0) -> Splits[Preference]:
    """Rows of `prompt/chosen/rejected`, with `probability` and `margin` if the file has them.

    The prompt is text or messages, an answer text or messages; without a `prompt` the answers are
    whole conversations. `seed` goes to a Python entry that has a parameter of that name. Raises
    KeelError for a row that is none of these, naming file, line, column and fix.
    """
    return _DatasetReader(source, judged.pair, judged.PAIR).splits(seed)


def read_labelled(source: PreferenceData, seed: int = 0) -> Splits[Labelled]:
    """Rows of `prompt/completion/label`; a label is a boolean or a number from 0 to 1."""
    return _DatasetReader(source, judged.labelled, judged.LABELLED).splits(seed)


def read_steps(source: PreferenceData, seed: int = 0) -> Splits[Stepwise]:
    """Rows of `prompt/completions/labels`, or of `prompt/steps/first_error`.

    A step's label is a boolean, a number from 0 to 1, or null if it was not judged; a first
    error is the index (from 0) of the first wrong step, or null if all are right. BIG-Bench
    Mistake's `input` and `mistake_index` are taken for `prompt` and `first_error`. A step may be
    blank, an answer not.
    """
    return _DatasetReader(source, judged.stepwise, judged.STEPWISE).splits(seed)


READERS: dict[Records, Callable[[PreferenceData, int], Splits[Any]]] = {
    "pairs": read_pairs,
    "labels": read_labelled,
    "steps": read_steps,
}


@dataclass(frozen=True, slots=True)
class _Placed(Generic[T]):
    """A row with the positions of its prompt and of its group, which decide its split."""

    item: T
    prompt: float
    group: float


@dataclass(frozen=True, slots=True)
class _DatasetReader(Generic[T]):
    """From a source to two splits: `make` builds a row of the kind, `known` are its columns."""

    source: PreferenceData
    make: Callable[[Fields, str], T]
    known: tuple[str, ...]

    def splits(self, seed: int) -> Splits[T]:
        source = self.source
        train, validation = _tables(source, seed)
        name = source.name.rpartition("/")[2]
        name = name if source.path is None else f"{name}:{Path(source.path).stem}"
        ids: set[str] = set()
        kept, left = self._rows(train, name, ids)
        if validation is None:
            splits = splits_of([row.group for row in kept], source.validation_fraction)
            held = [row for row, split in zip(kept, splits, strict=True) if split == "validation"]
            kept = [row for row, split in zip(kept, splits, strict=True) if split == "train"]
        else:
            held, left_held = self._rows(validation, name, ids, VALIDATION)
            left += left_held
        return _apart(kept, held, left, name)

    def _rows(
        self, table: Table, name: str, ids: set[str], prefix: str = ""
    ) -> tuple[list[_Placed[T]], list[LeftOut]]:
        """The table's rows, and those left out: bad ones, and with an empty answer if these go.

        `prefix` begins the rows' ids, which no row may share with another.
        """
        self._check_names(table)
        found: list[_Placed[T]] = []
        dropped: list[LeftOut] = []
        bad, where = Gathered(self.source.bad_rows, table.bad), table.where
        for row, number, line in zip(table.rows, table.numbers, table.lines, strict=True):
            place = where.place(line)
            origin = Origin(where.source, where.mark, line, row)
            fields = Fields(row, place, self.source.columns, origin)
            try:
                item = self._row(fields, f"{name}/{prefix}{number}", prefix, ids)
            except KeelError as error:
                bad.rows.append(origin.left_out(str(error)))
                continue
            if item is None:
                dropped.append(origin.left_out("an answer is empty", "empty"))
                continue
            ids.add(item.item.id)
            found.append(item)
        bad.check("data")
        every = sorted([*bad.rows, *dropped], key=lambda left: left.line)
        if not found and len(dropped) < len(every):
            raise all_bad(where.source, [left for left in every if left.why == "bad"])
        if not found:
            name = f"{name}/{prefix}".rstrip("/")
            raise KeelError(f"{name}: no rows are left: every one has an empty answer")
        return found, every

    def _row(self, fields: Fields, number: str, prefix: str, ids: set[str]) -> _Placed[T] | None:
        """One row; None if it is dropped for an empty answer."""
        item = self.make(fields, _id(fields, number, prefix))
        if not self._is_kept(item, fields):
            return None
        if item.id in ids:
            raise KeelError(f"{fields.place}: two rows have the id {item.id!r}: give each its own")
        prompt = position(item.prompt)
        group = self._group(fields)
        if group is None:
            return _Placed(item, prompt, prompt)
        return _Placed(replace(item, group=group), prompt, position(group))

    def _is_kept(self, item: T, fields: Fields) -> bool:
        empty = [name for name, text in _answers(item) if not text.strip()]
        if not empty or self.source.empty == "keep":
            return True
        if self.source.empty == "refuse":
            name = fields.first(*empty[0].split("/"))
            fix = 'the answer is empty: leave the row out, or set empty = "drop" (or "keep")'
            raise fields.wrong(name, fix)
        return False

    def _group(self, fields: Fields) -> str | None:
        if self.source.group is None:
            return None
        value = fields.value(self.source.group)
        if value is None:
            raise fields.wrong(self.source.group, "the group is empty: name the row's group")
        return json.dumps(value, sort_keys=True, default=str)

    def _check_names(self, table: Table) -> None:
        """A mistaken name for a column that may be absent would otherwise pass in silence."""
        for name, column in self.source.columns.items():
            if name not in self.known:
                raise KeelError(f"columns: {unknown('column', name, self.known)}")
            if not any(column in row for row in table.rows):
                there = {str(key) for row in table.rows for key in row}
                where = table.where.source
                raise KeelError(f"{where}: columns.{name}: {unknown('column', column, there)}")


def _apart(
    train: list[_Placed[T]], held: list[_Placed[T]], left: list[LeftOut], name: str
) -> Splits[T]:
    """Train rows whose prompt or group is also in the validation split are left out of training."""
    prompts, groups = {row.prompt for row in held}, {row.group for row in held}
    kept, overlap = [], []
    for row in train:
        if row.prompt in prompts or row.group in groups:
            assert row.item.origin is not None
            reason = "the prompt or group is also in the validation split"
            overlap.append(row.item.origin.left_out(reason, "overlap"))
        else:
            kept.append(row)
    if not kept:
        raise KeelError(
            f"{name}: every train prompt is also in the validation split: drop validation_path or "
            "group, or give other rows"
        )
    items = tuple(row.item for row in kept), tuple(row.item for row in held)
    return Splits(*items, left_out=(*left, *overlap))


def _answers(item: Preference | Labelled | Stepwise) -> Iterable[tuple[str, str]]:
    """The columns of the answers (alternatives joined by a stroke) and their texts."""
    if isinstance(item, Preference):
        return (("chosen", item.chosen), ("rejected", item.rejected))
    if isinstance(item, Labelled):
        return (("completion", item.completion),)
    return (("completions/steps", "".join(item.steps)),)


def _id(fields: Fields, number: str, prefix: str) -> str:
    """The row's own `id`, a text or an integer, after the prefix; else its number in its file."""
    own = fields.row.get("id")
    if isinstance(own, bool) or not isinstance(own, str | int) or own == "":
        return number
    return f"{prefix}{own}"


# ---------------------------------------------------------------- where the rows come from


def _tables(source: PreferenceData, seed: int) -> tuple[Table, Table | None]:
    """The train table, and the validation one if it is given."""
    if source.name not in KINDS:
        if ":" not in source.name:
            known = [*KINDS, "module:function"]
            raise KeelError(f"preference data: {unknown('kind', source.name, known)}")
        return _entry(source, seed), None
    return split_tables(source, f"preference data {source.name!r}: path is not set")


def _entry(source: PreferenceData, seed: int) -> Table:
    """What the Python function returns: rows, each a dict of columns."""
    where = f"preference data {source.name!r}"
    for key, value in (("path", source.path), ("validation_path", source.validation_path)):
        if value is not None:
            raise KeelError(f"{where}: {key} is not read by a function: put it into options")

    def rows(made: Any) -> list[Any]:
        if isinstance(made, str | bytes | Mapping):
            raise KeelError(f"{where} returns a {type(made).__name__}: return rows of dicts")
        return list_rows(made)

    return rows_table(call_entry(source, "preference data", seed, rows), where)
