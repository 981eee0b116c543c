"""Files of preferences into the store, and its labels as rows of TRL's form."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config.fields import BadRows
from keel.data.columns import prompt_columns
from keel.data.judged_rows import Fields
from keel.data.tables import Table, all_bad, read_file, refuse_bad
from keel.platform.files import write_bytes
from keel.preferences.formats import (
    Attribution,
    EmptyAnswer,
    HelpSteerReader,
    read_helpsteer_preference,
    read_hh,
    read_steps,
    read_trl,
    read_ultrafeedback,
)
from keel.preferences.records import (
    JudgedPair,
    LabelRecord,
    Record,
    Source,
    StepsRecord,
    mean_label,
)
from keel.preferences.store import PreferenceStore
from keel.runs.quarantine import LeftOut, Why, write_quarantine
from keel.runs.values import record_line
from keel.types import KeelError, one_line

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
    left = list(table.bad)
    parsed = _parsed(table, READERS[kind](), by, left)
    if bad_rows == "stop":
        parsed = iter(list(parsed))
        refuse_bad(left)
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
    if not rows and left:
        raise all_bad(str(path), left)
    added.update(_add(store, batch))
    repeated = judgements - added["labels"] - added["steps"]
    return ImportReport(rows, tuple(left), dict(added), repeated)


def _parsed(
    table: Table, read: Read, by: Attribution, left: list[LeftOut]
) -> Iterator[list[Record]]:
    """The records of each row that can be read; the others are added to `left`."""
    for row in table.rows:
        try:
            yield list(read(Fields(row.values, row.place), by))
        except KeelError as error:
            why: Why = "empty" if isinstance(error, EmptyAnswer) else "bad"
            left.append(row.left_out(str(error), why))


def _add(store: PreferenceStore, batch: Iterable[Record]) -> dict[str, int]:
    """Add what several rows share, such as a prompt, once."""
    return store.add({(type(record), record.id): record for record in batch}.values())


def write_left_out(store: Path, source: Path, report: ImportReport) -> Path | None:
    """List the rows of a file that were left out, as `runs.quarantine` does.

    Returns the list's file, or None if there are none.
    """
    mark = hashlib.sha256(str(source.resolve()).encode("utf-8", "replace")).hexdigest()[:8]
    target = store.with_name(f"{store.name}.quarantine") / f"{source.stem}-{mark}.jsonl"
    write_quarantine(target, report.left_out)
    return target if report.left_out else None


@dataclass(frozen=True, slots=True)
class Selection:
    """Which labels count: of these sources, rounds and annotators; of all if None."""

    sources: Collection[Source] | None = None
    rounds: Collection[int] | None = None
    annotators: Collection[str] | None = None

    def takes(self, label: Any) -> bool:
        """Whether a label (or labelled steps) is one of them."""
        return (
            (self.sources is None or label.source in self.sources)
            and (self.rounds is None or label.round in self.rounds)
            and (self.annotators is None or label.annotator in self.annotators)
        )


def preference_rows(
    store: PreferenceStore, selection: Selection = Selection()
) -> Iterator[dict[str, Any]]:
    """A row of `id/prompt/chosen/rejected/probability` for each pair with a label that counts.

    `probability` is the mean of the labels' values; `chosen` is the answer with ½ or more, the
    first if both have ½. `margin` is there if it is not 0. Columns of the pair follow.
    """
    for judged in store.judged_pairs():
        found = mean_label(label for label in judged.labels if selection.takes(label))
        if found is not None:
            yield _preference(judged, *found)


def steps_rows(
    store: PreferenceStore, selection: Selection = Selection()
) -> Iterator[dict[str, Any]]:
    """A row of `prompt/completions/labels` for each answer in labelled steps that counts."""
    for record in store.steps():
        if selection.takes(record):
            prompt = store.prompt(record.prompt)
            yield {
                **prompt_columns(prompt.content, prompt.tools),
                "completions": list(record.steps),
                "labels": list(record.labels),
                **record.columns,
            }


def write_rows(out: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as Parquet if the name ends so, else as JSONL, whole or not at all.

    Returns how many. Raises KeelError if there is none, or Parquet cannot hold them.
    """
    every = list(rows)
    if not every:
        raise KeelError(f"{out}: nothing to write: no label is of this source, round and annotator")
    if out.suffix == ".parquet":
        write_bytes(out, _parquet(out, every))
    else:
        write_bytes(out, b"".join(record_line(row, {}) for row in every))
    return len(every)


def _parquet(out: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    names = dict.fromkeys(name for row in rows for name in row)
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        file = io.BytesIO()
        parquet.write_table(table, file)
    except pyarrow.ArrowException as error:
        raise KeelError(
            f"{out}: a column has values of several types ({one_line(error)}): name a .jsonl file"
        ) from None
    return file.getvalue()


def _preference(judged: JudgedPair, value: float, margin: float) -> dict[str, Any]:
    first = value >= 0.5
    chosen, rejected = judged.first.text, judged.second.text
    columns = judged.pair.columns
    row = {
        "id": columns.get("id", judged.pair.id),
        **prompt_columns(judged.prompt.content, judged.prompt.tools),
        "chosen": chosen if first else rejected,
        "rejected": rejected if first else chosen,
        "probability": value if first else 1 - value,
        **({"margin": margin if first else -margin} if margin else {}),
    }
    return row | {name: columns[name] for name in columns if name not in row}
