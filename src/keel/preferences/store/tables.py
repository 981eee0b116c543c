"""The tables of the preference store, which its records describe, and a record as a row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Generic, TypeVar

from keel.platform.sqlite import Format
from keel.preferences.store.records import (
    CompletionRecord,
    CostRecord,
    LabelRecord,
    PairRecord,
    PromptRecord,
    StepsRecord,
)

R = TypeVar("R")
_encode = json.JSONEncoder(ensure_ascii=False).encode
TYPES = {"str": "TEXT NOT NULL", "int": "INTEGER NOT NULL", "float": "REAL NOT NULL"}
TYPES |= {"int | None": "INTEGER", "float | None": "REAL", "Side | None": "TEXT"}
TYPES |= dict.fromkeys(("Source", "CostKind", "CostUnit"), "TEXT NOT NULL")
TYPES["bool"] = "INTEGER NOT NULL"
"""The columns of a record's fields; a field of any other type is a column that holds JSON."""
REFERENCES = {"prompt": "prompts", "first": "completions", "second": "completions", "pair": "pairs"}
"""The tables whose ids these fields hold."""


class TableLayout(Generic[R]):
    """A record type and its table: the fields are the columns, in order.

    `same` are the fields in which two records of one id must agree.
    """

    def __init__(self, noun: str, table: str, record: type[R], same: Sequence[str]) -> None:
        self.noun, self.table, self.record = noun, table, record
        self.types = {field.name: str(field.type) for field in fields(record)}  # type: ignore[arg-type]
        self.fields = tuple(self.types)
        self.same = tuple(map(self.fields.index, same))
        self._json = tuple(at for at, kind in enumerate(self.types.values()) if kind not in TYPES)
        self._get = attrgetter(*self.fields)

    def statement(self) -> str:
        """What makes the table. `seq` is the order of adding; a number is never used again."""
        columns = [
            f'"{name}" {TYPES.get(kind, "TEXT NOT NULL")}'
            + (" UNIQUE" if name == "id" else "")
            + (f" REFERENCES {REFERENCES[name]} (id)" if name in REFERENCES else "")
            for name, kind in self.types.items()
        ]
        # Humans fill the places of a pair; triggers count them.
        columns += ["taken INTEGER NOT NULL DEFAULT 0"] if self.table == "pairs" else []
        every = ", ".join(["seq INTEGER PRIMARY KEY AUTOINCREMENT", *columns])
        return f"CREATE TABLE IF NOT EXISTS {self.table} ({every})"

    def names(self, alias: str = "") -> str:
        """The columns of a SELECT or INSERT; `alias` is the table's in a join."""
        before = f"{alias}." if alias else ""
        return ", ".join(f'{before}"{name}"' for name in self.fields)

    def row(self, record: R) -> tuple[Any, ...]:
        """A record as its row."""
        values = list(self._get(record))
        for at in self._json:
            value = values[at]
            # Most columns are empty, and the encoder is slow to start.
            values[at] = "{}" if value.__class__ is dict and not value else _encode(value)
        return tuple(values)

    def content(self, row: Sequence[Any]) -> list[Any]:
        """The values in which two records of one id must agree."""
        return [json.loads(row[at]) if at in self._json else row[at] for at in self.same]

    def read(self, row: Sequence[Any]) -> R:
        """The record of a row."""
        values = list(row)
        for at in self._json:
            values[at] = json.loads(values[at])
        return self.record(*values)


PROMPTS = TableLayout("prompt", "prompts", PromptRecord, ("content",))
COMPLETIONS = TableLayout("completion", "completions", CompletionRecord, ("prompt", "text"))
PAIRS = TableLayout("pair", "pairs", PairRecord, ("prompt", "first", "second"))
LABELS = TableLayout("label", "labels", LabelRecord, ("pair", "value"))
STEPS = TableLayout("steps", "steps", StepsRecord, ("prompt", "steps", "labels"))
COSTS = TableLayout("cost", "costs", CostRecord, ("kind", "amount", "unit"))
LAYOUTS: tuple[TableLayout[Any], ...] = (PROMPTS, COMPLETIONS, PAIRS, LABELS, STEPS, COSTS)

# `taken` counts the places of a pair that humans fill: open leases and labels that are not skips;
# triggers keep it, so that the next pair is found by an index alone.
_STATEMENTS = (
    *(layout.statement() for layout in LAYOUTS),
    "CREATE INDEX IF NOT EXISTS completions_prompt ON completions (prompt)",
    "CREATE INDEX IF NOT EXISTS pairs_next ON pairs (taken, priority DESC, seq)",
    "CREATE INDEX IF NOT EXISTS pairs_round ON pairs (round, taken, priority DESC, seq)",
    "CREATE INDEX IF NOT EXISTS labels_pair ON labels (pair, source, annotator)",
    # A number is never used again, so that an expired lease is not taken for a later one.
    """CREATE TABLE IF NOT EXISTS leases (
        id INTEGER PRIMARY KEY AUTOINCREMENT, pair TEXT NOT NULL REFERENCES pairs (id),
        annotator TEXT NOT NULL, expires REAL NOT NULL, label TEXT UNIQUE
    )""",
    "CREATE INDEX IF NOT EXISTS leases_open ON leases (expires) WHERE label IS NULL",
    "CREATE INDEX IF NOT EXISTS leases_annotator ON leases (annotator) WHERE label IS NULL",
    """CREATE TRIGGER IF NOT EXISTS lease_made AFTER INSERT ON leases BEGIN
        UPDATE pairs SET taken = taken + 1 WHERE id = NEW.pair; END""",
    """CREATE TRIGGER IF NOT EXISTS lease_dropped AFTER DELETE ON leases
        WHEN OLD.label IS NULL BEGIN
        UPDATE pairs SET taken = taken - 1 WHERE id = OLD.pair; END""",
    """CREATE TRIGGER IF NOT EXISTS lease_used AFTER UPDATE OF label ON leases BEGIN
        UPDATE pairs SET taken = taken + (NEW.label IS NULL) - (OLD.label IS NULL)
        WHERE id = NEW.pair; END""",
    """CREATE TRIGGER IF NOT EXISTS label_made AFTER INSERT ON labels
        WHEN NEW.source = 'human' AND NEW.value IS NOT NULL BEGIN
        UPDATE pairs SET taken = taken + 1 WHERE id = NEW.pair; END""",
    """CREATE TRIGGER IF NOT EXISTS label_dropped AFTER DELETE ON labels
        WHEN OLD.source = 'human' AND OLD.value IS NOT NULL BEGIN
        UPDATE pairs SET taken = taken - 1 WHERE id = OLD.pair; END""",
)
FORMAT = Format(
    application=0x4B505246,  # KPRF
    version=2,
    statements=_STATEMENTS,
)
