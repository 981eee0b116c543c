"""The tables of the preference store, and how a record becomes a row and back."""

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


class TableLayout(Generic[R]):
    """A record type and its table: the fields are the columns, in order.

    `json` are columns that hold JSON. `same` are those in which two records of one id must agree.
    """

    def __init__(
        self, noun: str, table: str, record: type[R], json: Sequence[str], same: Sequence[str]
    ) -> None:
        self.noun, self.table, self.record = noun, table, record
        self.fields = tuple(field.name for field in fields(record))  # type: ignore[arg-type]
        self.same = tuple(map(self.fields.index, same))
        self._json = tuple(map(self.fields.index, json))
        self._get = attrgetter(*self.fields)

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


PROMPTS = TableLayout("prompt", "prompts", PromptRecord, ("content", "columns"), ("content",))
COMPLETIONS = TableLayout(
    "completion",
    "completions",
    CompletionRecord,
    ("sampling", "columns"),
    ("prompt", "text"),
)
PAIRS = TableLayout("pair", "pairs", PairRecord, ("columns",), ("prompt", "first", "second"))
LABELS = TableLayout("label", "labels", LabelRecord, (), ("pair", "value"))
STEPS = TableLayout(
    "steps",
    "steps",
    StepsRecord,
    ("steps", "labels", "columns"),
    ("prompt", "steps", "labels"),
)
COSTS = TableLayout("cost", "costs", CostRecord, (), ("kind", "amount", "unit"))
LAYOUTS: tuple[TableLayout[Any], ...] = (PROMPTS, COMPLETIONS, PAIRS, LABELS, STEPS, COSTS)

# `seq` is the order of adding. `taken` counts the places of a pair that humans fill: open leases
# and labels that are not skips; triggers keep it, so that the next pair is found by an index alone.
_STATEMENTS = (
    """CREATE TABLE IF NOT EXISTS prompts (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, content TEXT NOT NULL,
        columns TEXT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS completions (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        prompt TEXT NOT NULL REFERENCES prompts (id), text TEXT NOT NULL, model TEXT NOT NULL,
        sampling TEXT NOT NULL, round INTEGER NOT NULL, tokens INTEGER, seconds REAL, cost REAL,
        columns TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS completions_prompt ON completions (prompt)",
    """CREATE TABLE IF NOT EXISTS pairs (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        prompt TEXT NOT NULL REFERENCES prompts (id),
        "first" TEXT NOT NULL REFERENCES completions (id),
        second TEXT NOT NULL REFERENCES completions (id),
        round INTEGER NOT NULL, priority REAL NOT NULL, columns TEXT NOT NULL,
        taken INTEGER NOT NULL DEFAULT 0
    )""",
    "CREATE INDEX IF NOT EXISTS pairs_next ON pairs (taken, priority DESC, seq)",
    "CREATE INDEX IF NOT EXISTS pairs_round ON pairs (round, taken, priority DESC, seq)",
    """CREATE TABLE IF NOT EXISTS labels (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
        pair TEXT NOT NULL REFERENCES pairs (id), value REAL CHECK (value BETWEEN 0 AND 1),
        source TEXT NOT NULL, annotator TEXT NOT NULL, rubric TEXT NOT NULL,
        version TEXT NOT NULL, round INTEGER NOT NULL, margin REAL NOT NULL, shown_first TEXT,
        seconds REAL, cost REAL, note TEXT NOT NULL, "at" REAL
    )""",
    "CREATE INDEX IF NOT EXISTS labels_pair ON labels (pair, source, annotator)",
    """CREATE TABLE IF NOT EXISTS steps (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        prompt TEXT NOT NULL REFERENCES prompts (id), steps TEXT NOT NULL, labels TEXT NOT NULL,
        source TEXT NOT NULL, annotator TEXT NOT NULL, version TEXT NOT NULL,
        round INTEGER NOT NULL, seconds REAL, cost REAL, columns TEXT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS costs (
        seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
        amount REAL NOT NULL, unit TEXT NOT NULL, purpose TEXT NOT NULL, round INTEGER NOT NULL,
        forecast INTEGER NOT NULL
    )""",
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
    version=1,
    statements=_STATEMENTS,
    tables=frozenset((*(layout.table for layout in LAYOUTS), "leases")),
)
