"""Sets of examples that are read in order while a run goes on, and never as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from keel.config.sources import SFTData
from keel.data.mixture import LEFT_OUT_IN_A_ROW
from keel.data.sft import Block, SFTEncoder, SFTRow, Trained, pack, place_row, set_name
from keel.data.splits import Splits, placed_rows
from keel.data.tables import SourceRow, Table, open_dataset, refuse_bad, without_nulls
from keel.runs.rows import LeftOut, append_quarantine, keep_quarantine
from keel.types import KeelError, Split, one_line

FIRST = 100
"""Rows of a streamed set that are read before the first step, as all rows of a table are."""
WINDOW = 1_000
"""Examples of a streamed set that are packed together."""


def read_stream(source: SFTData, split: str, start: int = 0) -> Iterator[SourceRow]:
    """The rows of a split of a streamed set, from the one of number `start` on.

    Raises KeelError if the split cannot be opened, or at a row that the library cannot read.
    """
    options = {key: value for key, value in source.options.items() if key != "split"}
    rows = open_dataset(str(source.path), split, options)
    name, number = rows_name(source, split), start
    try:
        for values in without_nulls(rows.skip(start) if start else rows):
            yield SourceRow(name, number, number + 1, values)
            number += 1
    except Exception as error:  # of the network or the file
        raise KeelError(f"{name}: row {number + 1}: {one_line(error)[:300]}") from error


def rows_name(source: SFTData, split: str) -> str:
    """What the rows of a split are called."""
    return f"{set_name(source)}[{split}]"


def train_split(source: SFTData) -> str:
    """The split that a set trains on."""
    return str(source.options.get("split", "train"))


def first_rows(source: SFTData, validation: int, key: str) -> Splits[SFTRow]:
    """The examples of the first `FIRST` train rows, and of the first `validation` rows of the
    validation split, if there is one.

    Raises KeelError for a bad row if these stop the run, and if no row of a split can be read.
    """
    held, rest = list[SFTRow](), list[LeftOut]()
    found, left = _first(source, train_split(source), FIRST, key)
    if source.validation_path is not None and validation:
        held, rest = _first(source, source.validation_path, validation, key)
    return Splits(tuple(found), tuple(held), (*left, *rest))


def _first(source: SFTData, split: str, count: int, key: str) -> tuple[list[SFTRow], list[LeftOut]]:
    name, rows = rows_name(source, split), tuple(islice(read_stream(source, split), count))
    if not rows:
        raise KeelError(f"{name}: no rows: the data set is empty")
    make = partial(place_row, source, name)
    found, left = placed_rows(Table(name, rows), make, False, name, source, key)
    return [one.item for one in found], left


@dataclass(eq=False)
class StreamedSet:
    """The blocks of a set that is read in order, from its beginning after its end.

    `key` is that of its table in the recipe, `block_size` that of packing, of `WINDOW` examples at
    a time. Rows that cannot be used are appended to the file `quarantine` in the first pass;
    `bad` counts those of every pass.
    """

    source: SFTData
    name: str
    key: str
    encode: SFTEncoder
    block_size: int | None = None
    quarantine: Path | None = None
    bad: int = 0
    _passes: int = 0
    _read: int = 0
    """Rows that were read in this pass."""
    _start: Mapping[str, Any] = field(default_factory=dict)
    """Where the examples begin that `_ready` was made of: `_present()` before they were read."""
    _ready: list[Block] = field(default_factory=list)
    _given: int = 0
    _rows: Iterator[SourceRow] | None = None

    def size(self, split: Split) -> None:
        return None

    def prompt(self, split: Split, index: int) -> Block:
        """The next block."""
        while self._given == len(self._ready):
            self._start, self._given = self._present(), 0
            self._ready = self._window()
        self._given += 1
        return self._ready[self._given - 1]

    @property
    def rows_of(self) -> str:
        """What its rows are called."""
        return rows_name(self.source, train_split(self.source))

    def counts(self) -> dict[str, int]:
        """How many examples were left out so far, and how many cut."""
        long = self.encode.long
        left_out = self.bad + long["dropped"] + long["empty"]
        return {"left_out": left_out, "cut": long["cut"]}

    def place(self) -> dict[str, Any]:
        """Where it is: what was read before the present window, and the blocks taken of that."""
        return {**(self._start or self._present()), "given": self._given}

    def seek(self, place: Mapping[str, Any]) -> None:
        """Go on from a `place()`. Raises KeelError for one of another version."""
        if not isinstance(place, Mapping):
            raise KeelError(f"{self.name}: the checkpoint is of another version: start a new run")
        self._read, self._passes, self.bad = (place[name] for name in ("read", "passes", "bad"))
        self.encode.long.clear()
        self.encode.long.update(place["long"])
        self._rows, self._start = None, self._present()
        self._ready = self._window() if place["given"] else []
        self._given = place["given"]

    def _present(self) -> dict[str, Any]:
        return {
            "read": self._read,
            "passes": self._passes,
            "bad": self.bad,
            "long": dict(self.encode.long),
        }

    def _window(self) -> list[Block]:
        """The blocks of the next examples."""
        size, first_pass = self.block_size, not self._passes
        count, found, bad, lost = 1 if size is None else WINDOW, list[Trained](), list[LeftOut](), 0
        if self._rows is None:
            self._rows = read_stream(self.source, train_split(self.source), self._read)
            if self.quarantine is not None:  # what a killed run wrote after its checkpoint
                keep_quarantine(self.quarantine, self.bad if first_pass else None)
        for row in self._rows:
            self._read += 1
            one = self._trained(row, bad)
            found += [] if one is None else [one]
            lost = 0 if one is not None else lost + 1
            if len(found) == count or lost == LEFT_OUT_IN_A_ROW:
                break
        else:
            if not found and not self._start["read"]:
                raise KeelError(f"{self.name}: no example of the streamed set can be used")
            self._rows, self._read, self._passes = None, 0, self._passes + 1
        self.bad += len(bad)
        if first_pass and self.quarantine is not None:
            append_quarantine(self.quarantine, bad)
        if lost == LEFT_OUT_IN_A_ROW:
            raise KeelError(
                f"{self.name}: {lost} rows in a row cannot be used, to row {self._read}"
            )
        return [(one,) for one in found] if size is None else pack(found, size)

    def _trained(self, row: SourceRow, bad: list[LeftOut]) -> Trained | None:
        """The row as an example; None if it is left out, a bad one into `bad`."""
        try:
            return self.encode(place_row(self.source, row.source, row, False).item)
        except KeelError as error:
            bad.append(row.left_out(str(error)))
            if self.source.bad_rows == "stop":
                refuse_bad(bad, self.key)
            return None
