"""The preference store: adds, queries, and leases of pairs to annotators."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from keel.platform.sqlite import Database, is_database
from keel.preferences.records import (
    COMPLETIONS,
    COSTS,
    FORMAT,
    LABELS,
    LAYOUTS,
    PAIRS,
    PROMPTS,
    STEPS,
    CompletionRecord,
    CostRecord,
    JudgedPair,
    LabelRecord,
    Lease,
    PairRecord,
    PromptRecord,
    Record,
    Source,
    StepsRecord,
    TableLayout,
)
from keel.types import KeelError

R = TypeVar("R")
PAGE = 1000
"""Rows that are read at a time; none is held while the caller works on them."""
LEASE = 1800.0
"""Seconds for which an annotator has a pair."""


class PreferenceStore:
    """Preferences in one SQLite file; several threads and processes may read and write at once.

    What a method wrote survives a kill; all but leases survives a power failure too.
    `path` None keeps all in memory. `create` makes the file if there is none. `timeout` is how many
    seconds a write waits for another process. Raises KeelError for a file that is not a store or of
    another version, and if it cannot be written.
    """

    def __init__(self, path: Path | None, *, create: bool = False, timeout: float = 30.0) -> None:
        self._path = path
        name = f"preference store {path}"
        if path is not None and not create and not is_database(path):
            what = "it is not a store" if path.exists() else "there is no such file"
            raise KeelError(f"{name}: {what}: name a store's file")
        if path is not None and create and not path.parent.is_dir():
            raise KeelError(f"{name}: there is no folder {str(path.parent)!r}")
        self.database = Database(path, FORMAT, name, synchronous="FULL", timeout=timeout)

    @property
    def path(self) -> Path:
        """The store's file."""
        assert self._path is not None
        return self._path

    def __enter__(self) -> PreferenceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    # ------------------------------------------------------------ add

    def add(self, records: Iterable[Record]) -> dict[str, int]:
        """Add records of any kinds, all or none; how many of each table are new.

        What a record refers to is in the store, or among the records. Of two records with one id
        the first stays. Raises KeelError if the second says something else.
        """
        rows: dict[type[Any], list[tuple[Any, ...]]] = {layout.record: [] for layout in LAYOUTS}
        layouts = {layout.record: layout for layout in LAYOUTS}
        for record in records:
            rows[type(record)].append(layouts[type(record)].row(record))
        with self.database.transaction():
            return {
                layout.table: self._insert(layout, rows[layout.record])
                for layout in LAYOUTS
                if rows[layout.record]
            }

    def add_forecast(self, entries: Iterable[CostRecord]) -> None:
        """Add entries of the ledger; one whose id is there already stays as it is."""
        known = {cost.id for cost in self.costs(forecast=True)}
        self.add(entry for entry in entries if entry.id not in known)

    def set_priorities(self, priorities: Iterable[tuple[str, float]]) -> None:
        """Set the priority of pairs (by id), which `lease_next` goes by."""
        rows = [(priority, pair) for pair, priority in priorities]
        with self.database.transaction():
            found = self.database.execute_many("UPDATE pairs SET priority = ? WHERE id = ?", rows)
            if found != len(rows):
                raise KeelError(f"{self.database.name}: {len(rows) - found} pairs are not there")

    def _insert(self, layout: TableLayout[Any], rows: Sequence[tuple[Any, ...]]) -> int:
        values = ", ".join("?" * len(layout.fields))
        sql = f"INSERT INTO {layout.table} ({layout.names()}) VALUES ({values})"
        try:
            new = self.database.execute_many(f"{sql} ON CONFLICT (id) DO NOTHING", rows)
        except UnicodeEncodeError:
            raise KeelError(f"{layout.noun}: a text has a lone surrogate: fix it") from None
        except sqlite3.IntegrityError as error:
            raise KeelError(
                f"{self.database.name}: a {layout.noun} refers to what is not there ({error}): "
                "add prompts, then completions, pairs and labels"
            ) from None
        if new < len(rows):
            self._refuse_other(layout, rows)
        return new

    def _refuse_other(self, layout: TableLayout[Any], rows: Sequence[tuple[Any, ...]]) -> None:
        """Raises KeelError if a row is not what is there by its id."""
        at = layout.fields.index("id")
        sql = f"SELECT {layout.names()} FROM {layout.table} WHERE id = ?"
        for row in rows:
            there = self.database.execute(sql, (row[at],)).fetchone()
            if layout.content(there) != layout.content(row):
                raise KeelError(
                    f"{self.database.name}: another {layout.noun} has the id {row[at]!r}: "
                    "give each its own"
                )

    # ------------------------------------------------------------ query

    def prompts(self) -> Iterator[PromptRecord]:
        """Every prompt, in the order of adding, as all iterators here."""
        return self._read(PROMPTS, "", ())

    def completions(self, prompt: str | None = None) -> Iterator[CompletionRecord]:
        """Every completion, or those of one prompt (by id)."""
        return self._read(COMPLETIONS, *where(prompt=prompt))

    def pairs(self, round: int | None = None) -> Iterator[PairRecord]:
        """Every pair, or those of a round."""
        return self._read(PAIRS, *where(round=round))

    def unlabelled(
        self, source: Source, *, annotator: str | None = None, rubric: str | None = None
    ) -> Iterator[PairRecord]:
        """Pairs without a label from a source (by an annotator and a rubric); a skip is a label.

        Labels that are added while the iteration goes on may or may not be seen by it.
        """
        has, values = where(source=source, annotator=annotator, rubric=rubric)
        clause = f" AND NOT EXISTS (SELECT 1 FROM labels WHERE pair = pairs.id{has})"
        return self._read(PAIRS, clause, values)

    def labels(
        self,
        pair: str | None = None,
        *,
        source: Source | None = None,
        annotator: str | None = None,
        round: int | None = None,
    ) -> Iterator[LabelRecord]:
        """Labels of a pair (by id), a source, an annotator or a round; every one by default."""
        wanted = where(pair=pair, source=source, annotator=annotator, round=round)
        return self._read(LABELS, *wanted)

    def steps(self) -> Iterator[StepsRecord]:
        """Every answer in labelled steps."""
        return self._read(STEPS, "", ())

    def costs(self, forecast: bool | None = None) -> Iterator[CostRecord]:
        """Entries of the ledger."""
        return self._read(COSTS, *where(forecast=forecast))

    def prompt(self, id: str) -> PromptRecord:
        """The prompt of an id. Raises KeelError if there is none."""
        for found in self._read(PROMPTS, *where(id=id)):
            return found
        raise KeelError(f"{self.database.name}: there is no prompt {id!r}")

    def judged_pair(self, id: str) -> JudgedPair:
        """A pair (by id) with its texts and labels. Raises KeelError if there is none."""
        for _, found in self._judged("AND p.id = ?", [id]):
            return found
        raise KeelError(f"{self.database.name}: there is no pair {id!r}")

    def judged_pairs(self) -> Iterator[JudgedPair]:
        """Every pair with its texts and labels."""
        after = 0
        while found := list(self._judged("AND p.seq > ?", [after])):
            yield from (pair for _, pair in found)
            after = found[-1][0]

    def counts(self) -> dict[str, int]:
        """How many prompts, completions, pairs, labels, steps and costs there are."""
        names = [layout.table for layout in LAYOUTS]
        columns = ", ".join(f"(SELECT COUNT(*) FROM {name})" for name in names)
        return dict(zip(names, self.database.rows(f"SELECT {columns}")[0], strict=True))

    def _read(self, layout: TableLayout[R], clause: str, values: Sequence[Any]) -> Iterator[R]:
        sql = (
            f"SELECT seq, {layout.names()} FROM {layout.table} WHERE seq > ?{clause}"
            f" ORDER BY seq LIMIT {PAGE}"
        )
        after = 0
        while rows := self.database.rows(sql, (after, *values)):
            yield from (layout.read(row[1:]) for row in rows)
            after = rows[-1][0]

    def _judged(self, clause: str, values: Sequence[Any]) -> Iterator[tuple[int, JudgedPair]]:
        """A page of pairs, each with its place in the order."""
        parts: tuple[tuple[str, TableLayout[Any]], ...] = (
            *(("p", PAIRS), ("q", PROMPTS)),
            *(("a", COMPLETIONS), ("b", COMPLETIONS)),
        )
        names = ", ".join(layout.names(alias) for alias, layout in parts)
        pairs = self.database.rows(
            f"SELECT p.seq, {names} FROM pairs p JOIN prompts q ON q.id = p.prompt"
            ' JOIN completions a ON a.id = p."first" JOIN completions b ON b.id = p.second'
            f" WHERE 1 {clause} ORDER BY p.seq LIMIT {PAGE}",
            values,
        )
        for seq, *row in pairs:
            records: list[Any] = []
            for _, layout in parts:
                records.append(layout.read(row[: len(layout.fields)]))
                row = row[len(layout.fields) :]
            pair, prompt, first, second = records
            yield seq, JudgedPair(pair, prompt, first, second, self._labels_of(pair.id))

    def _labels_of(self, pair: str) -> tuple[LabelRecord, ...]:
        sql = f"SELECT {LABELS.names()} FROM labels WHERE pair = ? ORDER BY seq"
        return tuple(LABELS.read(row) for row in self.database.rows(sql, (pair,)))

    # ------------------------------------------------------------ leases

    def lease_next(
        self,
        annotator: str,
        now: float,
        *,
        seconds: float = LEASE,
        overlap: int = 1,
        round: int | None = None,
        gold: Sequence[str] = (),
        gold_next: bool = False,
    ) -> Lease | None:
        """Lease the next pair (of a round) to a person; None if there is none for them.

        The pair with the highest priority, then the first added, that fewer than `overlap` people
        have or have labelled, and that this one has not. Whoever has a pair already gets it again,
        of any round.
        `gold` are pairs (by id) with a known label, which are for everyone: they are leased
        only if `gold_next`, the first that the person has not labelled, whoever else has it.
        `now` is the time in seconds. A lease that is past its `expires` is withdrawn when someone
        else asks for a pair. A pair that was skipped goes to another person.
        """
        expires = now + seconds
        clause, values = where(**{"p.round": round})
        listed = json.dumps(list(gold))
        with self.database.transaction(lasting=False):
            execute = self.database.execute
            # The earliest: after an undo, the pair of the label that was undone.
            own = execute(
                "SELECT id, pair FROM leases WHERE label IS NULL AND annotator = ?"
                " ORDER BY id LIMIT 1",
                (annotator,),
            ).fetchone()
            if own is not None:
                execute("UPDATE leases SET expires = ? WHERE id = ?", (expires, own[0]))
                return Lease(own[0], own[1], annotator, expires)
            execute("DELETE FROM leases WHERE label IS NULL AND expires <= ?", (now,))
            pair = self._gold(annotator, listed) if gold_next else None
            pair = pair or self._next(annotator, overlap, clause, values, listed)
            if pair is None:
                return None
            id = execute(
                "INSERT INTO leases (pair, annotator, expires) VALUES (?, ?, ?)",
                (pair, annotator, expires),
            ).lastrowid
            assert id is not None
            return Lease(id, pair, annotator, expires)

    def _next(
        self, annotator: str, overlap: int, clause: str, values: Sequence[Any], gold: str
    ) -> str | None:
        """The next pair for a person that is not gold. One query a count of the places taken: each
        walks an index in order and stops at its first row."""
        best = [
            found
            for taken in range(overlap)
            for found in self.database.execute(
                f"SELECT -p.priority, p.seq, p.id FROM pairs p WHERE p.taken = ?{clause}"
                " AND NOT EXISTS (SELECT 1 FROM labels WHERE pair = p.id"
                " AND source = 'human' AND annotator = ?)"
                " AND p.id NOT IN (SELECT value FROM json_each(?))"
                " ORDER BY p.priority DESC, p.seq LIMIT 1",
                (taken, *values, annotator, gold),
            )
        ]
        return min(best)[2] if best else None

    def _gold(self, annotator: str, gold: str) -> str | None:
        """The first of the gold pairs that a person has not labelled."""
        found = self.database.execute(
            "SELECT p.id FROM json_each(?) g JOIN pairs p ON p.id = g.value WHERE NOT EXISTS"
            " (SELECT 1 FROM labels WHERE pair = p.id AND source = 'human' AND annotator = ?)"
            " ORDER BY g.key LIMIT 1",
            (gold, annotator),
        ).fetchone()
        return None if found is None else str(found[0])

    def submit(self, lease: Lease, label: LabelRecord) -> bool:
        """Store the label of a leased pair, once; False if this very label is there already.

        It is taken after the lease expired too, unless the pair was withdrawn. Raises KeelError
        if it was, if the lease has another label, and for a label of another pair or person.
        """
        expected = (lease.pair, "human", lease.annotator)
        if (label.pair, label.source, label.annotator) != expected:
            raise KeelError(f"label: pair, source and annotator are not the lease's: {expected}")
        with self.database.transaction():
            sql = "SELECT label FROM leases WHERE id = ? AND pair = ? AND annotator = ?"
            row = self.database.execute(sql, (lease.id, lease.pair, lease.annotator)).fetchone()
            if row is None:
                raise KeelError(
                    f"pair {lease.pair}: the lease of {lease.annotator!r} expired, and the pair "
                    "was withdrawn: take the next one"
                )
            if row[0] is not None:
                if row[0] == label.id:
                    return False
                raise KeelError(
                    f"pair {lease.pair}: {lease.annotator!r} has labelled it: undo that first"
                )
            if not self._insert(LABELS, [LABELS.row(label)]):
                raise KeelError(f"pair {lease.pair}: the label {label.id} is there already")
            sql = "UPDATE leases SET label = ? WHERE id = ?"
            self.database.execute(sql, (label.id, lease.id))
        return True

    def undo(
        self, annotator: str, now: float, *, seconds: float = LEASE, overlap: int = 1
    ) -> LabelRecord | None:
        """Take back the person's last submitted label; None if there is none.

        The pair is leased to them again, and `lease_next` returns it first; not if it was
        skipped and `overlap` others have it by now.
        """
        with self.database.transaction():
            row = self.database.execute(
                f"SELECT e.id, {LABELS.names('l')} FROM labels l JOIN leases e ON e.label = l.id"
                " WHERE e.annotator = ? ORDER BY l.seq DESC LIMIT 1",
                (annotator,),
            ).fetchone()
            if row is None:
                return None
            label = LABELS.read(row[1:])
            self.database.execute("DELETE FROM labels WHERE id = ?", (label.id,))
            self.database.execute(
                "UPDATE leases SET label = NULL, expires = ? WHERE id = ?", (now + seconds, row[0])
            )
            if label.value is None:  # a skip left the place to others
                self.database.execute(
                    "DELETE FROM leases WHERE id = ?"
                    " AND (SELECT taken FROM pairs WHERE id = ?) > ?",
                    (row[0], label.pair, overlap),
                )
        return label


def where(**columns: Any) -> tuple[str, list[Any]]:
    """The conditions of the columns that are not None, each after an AND, and their values."""
    given = {name: value for name, value in columns.items() if value is not None}
    return "".join(f" AND {name} = ?" for name in given), list(given.values())
