"""Files of preferences into the store; rows that cannot be read are left out, with the reason."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from keel.config.fields import BadRows
from keel.data.preferences.fields import Fields
from keel.data.tables import Gathered, Table, all_bad, read_file
from keel.preferences.store.formats import (
    Attribution,
    EmptyAnswer,
    HelpSteerReader,
    read_helpsteer_preference,
    read_hh,
    read_steps,
    read_trl,
    read_ultrafeedback,
)
from keel.preferences.store.records import LabelRecord, Record, Source, StepsRecord
from keel.preferences.store.store import PreferenceStore
from keel.runs.quarantine import LeftOut, Why, write_quarantine
from keel.types import KeelError

Read = Callable[[Fields, Attribution], Iterator[Record]]
READERS: Mapping[str, Callable[[], Read]] = {
    "trl": lambda: read_trl,
    "steps": lambda: read_steps,
    "hh": lambda: read_hh,
    "ultrafeedback": lambda: read_ultrafeedback,
    "helpsteer": HelpSteerReader,
    "helpsteer-preference": lambda: read_helpsteer_preference,
}
"""What makes the reader of each kind; a new one for each file."""
DEFAULTS: Mapping[str, tuple[Source, str]] = {"ultrafeedback": ("judge", "gpt-4")}
"""Source and annotator of the kinds that no person labelled."""
BATCH = 500
"""Rows of a transaction: annotators wait for it at most."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did: rows read, rows left out, and new records by table.

    `repeated` are judgements (labels, or answers in steps) that were there already, in the store or
    earlier in the file.
    """

    rows: int
    left_out: tuple[LeftOut, ...]
    added: dict[str, int]
    repeated: int


def import_file(
    store: PreferenceStore,
    kind: str,
    path: Path,
    by: Attribution,
    bad_rows: BadRows = "quarantine",
) -> ImportReport:
    """Add a file (JSONL or Parquet) of one of `READERS`.

    An import that was interrupted is completed by another: what is there is not added twice.
    Raises KeelError if the file cannot be read, or none of its rows; with `bad_rows` "stop" also
    for any row that cannot be read, and then nothing is added.
    """
    table = read_file(path, bad_rows)
    left = Gathered(bad_rows, table.bad)
    parsed = _parsed(table, READERS[kind](), by, left)
    if left.stops:
        parsed = iter(list(parsed))
        left.check()
    rows = judgements = 0
    added: Counter[str] = Counter()
    batch: list[Record] = []
    for records in parsed:
        rows += 1
        judgements += sum(isinstance(record, LabelRecord | StepsRecord) for record in records)
        batch += records
        if rows % BATCH == 0:
            added.update(_add(store, batch))
            batch = []
    if not rows and left.rows:
        raise all_bad(str(path), left.rows)
    added.update(_add(store, batch))
    repeated = judgements - added["labels"] - added["steps"]
    return ImportReport(rows, tuple(left.rows), dict(added), repeated)


def _parsed(table: Table, read: Read, by: Attribution, left: Gathered) -> Iterator[list[Record]]:
    """The records of each row that can be read; the others are added to `left`."""
    for row in table.rows:
        try:
            yield list(read(Fields(row.values, row.place), by))
        except KeelError as error:
            why: Why = "empty" if isinstance(error, EmptyAnswer) else "bad"
            left.rows.append(row.left_out(str(error), why))


def _add(store: PreferenceStore, batch: Iterable[Record]) -> dict[str, int]:
    """Add what several rows share, such as a prompt, once."""
    return store.add({(type(record), record.id): record for record in batch}.values())


def quarantine_path(store: Path, source: Path) -> Path:
    """Where the rows of a file that were left out are listed, as `runs.quarantine` does."""
    mark = hashlib.sha256(str(source.resolve()).encode("utf-8", "replace")).hexdigest()[:8]
    return store.with_name(f"{store.name}.quarantine") / f"{source.stem}-{mark}.jsonl"


def write_left_out(store: Path, source: Path, report: ImportReport) -> Path | None:
    """Write the rows that were left out; the file, or None if there are none."""
    target = quarantine_path(store, source)
    write_quarantine(target, report.left_out)
    return target if report.left_out else None
