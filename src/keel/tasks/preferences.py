"""Judged answers from files or Python: pairs, labelled answers, labelled steps, on two sides."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from keel.config.entry import load_entry
from keel.config.preference_data import PreferenceData
from keel.config.suggest import unknown
from keel.preferences.schema import Labelled, Preference, Stepwise
from keel.tasks import judged
from keel.tasks.base import position
from keel.tasks.fields import Fields
from keel.tasks.generated import take_options
from keel.tasks.split import Sides, sides_of
from keel.tasks.tables import Table, read_table, rows_table
from keel.types import KeelError

KINDS = ("jsonl", "parquet", "datasets")
HELDOUT = "heldout/"
"""Begins the ids of a held-out file of its own: both files may number their rows from 0."""
T = TypeVar("T", bound=Preference | Labelled | Stepwise)


def read_pairs(source: PreferenceData, seed: int = 0) -> Sides[Preference]:
    """Rows of `prompt/chosen/rejected`, with `probability` and `margin` where the file has them.

    The prompt is text or messages, an answer text or messages; without a `prompt` the answers are
    whole conversations. `seed` goes to a Python entry that has a parameter of that name. Raises
    KeelError for a row that is none of these, naming file, line, column and mend.
    """
    return _Reader(source, judged.pair, judged.PAIR).sides(seed)


def read_labelled(source: PreferenceData, seed: int = 0) -> Sides[Labelled]:
    """Rows of `prompt/completion/label`; a label is a boolean or a number from 0 to 1."""
    return _Reader(source, judged.labelled, judged.LABELLED).sides(seed)


def read_steps(source: PreferenceData, seed: int = 0) -> Sides[Stepwise]:
    """Rows of `prompt/completions/labels`, or of `prompt/steps/first_error`.

    A step's label is a boolean, a number from 0 to 1, or null where nobody judged it; a first
    error is the index (from 0) of the first wrong step, or null where all are right. BIG-Bench
    Mistake's `input` and `mistake_index` are taken for `prompt` and `first_error`. A step may be
    blank, an answer not.
    """
    return _Reader(source, judged.stepwise, judged.STEPWISE).sides(seed)


@dataclass(frozen=True, slots=True)
class _Placed(Generic[T]):
    """A row with the positions of its prompt and of its group, which decide its side."""

    item: T
    prompt: float
    group: float


@dataclass(frozen=True, slots=True)
class _Reader(Generic[T]):
    """From a source to two sides: `make` builds a row of the kind, `known` are its columns."""

    source: PreferenceData
    make: Callable[[Fields, str], T]
    known: tuple[str, ...]

    def sides(self, seed: int) -> Sides[T]:
        source = self.source
        train, heldout = _tables(source, seed)
        name = source.name if source.path is None else f"{source.name}:{Path(source.path).stem}"
        kept = self._rows(train, name)
        dropped = len(train) - len(kept)
        if heldout is None:
            sides = sides_of([row.group for row in kept], source.heldout_share)
            held = [row for row, side in zip(kept, sides, strict=True) if side == "heldout"]
            kept = [row for row, side in zip(kept, sides, strict=True) if side == "train"]
        else:
            held = self._rows(heldout, name, HELDOUT)
            dropped += len(heldout) - len(held)
        _different_ids([*kept, *held], name)
        return _apart(kept, held, dropped, name)

    def _rows(self, table: Table, name: str, prefix: str = "") -> list[_Placed[T]]:
        """The table's rows but those dropped for an empty answer; `prefix` begins their ids."""
        self._check_names(table)
        found = []
        for number, (row, place) in enumerate(zip(table.rows, table.places, strict=True)):
            fields = Fields(row, place, self.source.columns)
            item = self.make(fields, _id(fields, f"{name}/{prefix}{number}", prefix))
            if self._is_kept(item, fields):
                prompt = position(item.prompt)
                group = self._group(fields)
                if group is None:
                    found.append(_Placed(item, prompt, prompt))
                else:
                    item = replace(item, group=group)
                    found.append(_Placed(item, prompt, position(group)))
        if not found:
            name = f"{name}/{prefix}".rstrip("/")
            raise KeelError(f"{name}: no rows are left: every one has an empty answer")
        return found

    def _is_kept(self, item: T, fields: Fields) -> bool:
        empty = [name for name, text in _answers(item) if not text.strip()]
        if not empty or self.source.empty == "keep":
            return True
        if self.source.empty == "refuse":
            name = fields.first(*empty[0].split("/"))
            mend = 'the answer is empty: leave the row out, or set empty = "drop" (or "keep")'
            raise fields.wrong(name, mend)
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
                where = table.places[0].rsplit(":", 1)[0]
                raise KeelError(f"{where}: columns.{name}: {unknown('column', column, there)}")


def _apart(train: list[_Placed[T]], held: list[_Placed[T]], dropped: int, name: str) -> Sides[T]:
    """Train rows whose prompt or group is also held out are left out of training."""
    prompts, groups = {row.prompt for row in held}, {row.group for row in held}
    kept = [row for row in train if row.prompt not in prompts and row.group not in groups]
    if not kept:
        raise KeelError(
            f"{name}: every train prompt is also held out: drop heldout_path or group, "
            "or give other rows"
        )
    items = tuple(row.item for row in kept), tuple(row.item for row in held)
    return Sides(*items, overlap=len(train) - len(kept), dropped=dropped)


def _answers(item: Preference | Labelled | Stepwise) -> Iterable[tuple[str, str]]:
    """The columns of the answers (alternatives joined by a stroke) and their texts."""
    if isinstance(item, Preference):
        return (("chosen", item.chosen), ("rejected", item.rejected))
    if isinstance(item, Labelled):
        return (("completion", item.completion),)
    return (("completions/steps", "".join(item.steps)),)


def _id(fields: Fields, number: str, prefix: str) -> str:
    """The row's own `id`, a text or an integer, behind the prefix; else its number in its file."""
    own = fields.row.get("id")
    if isinstance(own, bool) or not isinstance(own, str | int) or own == "":
        return number
    return f"{prefix}{own}"


def _different_ids(rows: list[_Placed[T]], name: str) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.item.id in seen:
            raise KeelError(f"{name}: two rows have the id {row.item.id!r}: give each its own")
        seen.add(row.item.id)


# ---------------------------------------------------------------- where the rows come from


def _tables(source: PreferenceData, seed: int) -> tuple[Table, Table | None]:
    """The train table, and the held-out one where it is given."""
    if source.name not in KINDS:
        if ":" not in source.name:
            known = [*KINDS, "module:function"]
            raise KeelError(f"preference data: {unknown('kind', source.name, known)}")
        return _entry(source, seed), None
    if source.path is None:
        what = "a data set's name" if source.name == "datasets" else "a file"
        raise KeelError(f"preference data {source.name!r}: path is not set: give {what}")
    options: dict[str, Any] = dict(source.options)
    split = str(options.pop("split", "train")) if source.name == "datasets" else "train"
    train = read_table(source.name, source.path, options, split)
    if source.heldout_path is None:
        return train, None
    if source.name == "datasets":
        return train, read_table(source.name, source.path, options, source.heldout_path)
    return train, read_table(source.name, source.heldout_path, options, split)


def _entry(source: PreferenceData, seed: int) -> Table:
    """What the Python function returns: rows, each a dict of columns."""
    where = f"preference data {source.name!r}"
    for key, value in (("path", source.path), ("heldout_path", source.heldout_path)):
        if value is not None:
            raise KeelError(f"{where}: {key} is not read by a function: put it into options")
    function: Callable[..., Any] = load_entry(source.name, "preference data")
    if not callable(function):
        raise KeelError(f"{where}: it is a {type(function).__name__}, not a function")
    options: dict[str, Any] = dict(source.options)
    take_options(function, options, where)
    if "seed" in inspect.signature(function).parameters:
        options.setdefault("seed", seed)
    try:
        made = function(**options)
        rows = None if isinstance(made, str | bytes | Mapping) else list(made)
    except KeelError:
        raise
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise KeelError(f"{where} raises {message}") from error
    if rows is None:
        raise KeelError(f"{where} returns a {type(made).__name__}: return rows of dicts")
    return rows_table(rows, where)
