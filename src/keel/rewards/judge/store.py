"""What a judge was asked, what it answered and what that cost: one SQLite file, safe to kill."""

from __future__ import annotations

import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.rewards.judge.spending import Cost, SpendLimit
from keel.types import KeelError

VERSION = 1
"""Of the file's tables."""
TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, model TEXT, text TEXT, finish TEXT, refusal TEXT,
    tokens_in INTEGER, tokens_out INTEGER, dollars REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY, key TEXT, attempt INTEGER, owner TEXT,
    lost INTEGER DEFAULT 0, tokens_in INTEGER, tokens_out INTEGER, dollars REAL
);
CREATE INDEX IF NOT EXISTS requests_by_key ON requests (key);
CREATE TABLE IF NOT EXISTS spent (
    id INTEGER PRIMARY KEY CHECK (id = 0), tokens_in INTEGER, tokens_out INTEGER, dollars REAL
);
INSERT OR IGNORE INTO spent VALUES (0, 0, 0, 0);
"""
_OUTER = ("BEGIN IMMEDIATE", ("ROLLBACK",), "COMMIT")
_INNER = ("SAVEPOINT part", ("ROLLBACK TO part", "RELEASE part"), "RELEASE part")
SUM = "COALESCE(SUM(tokens_in), 0), COALESCE(SUM(tokens_out), 0), COALESCE(SUM(dollars), 0.0)"


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What a judge wrote. `refusal` says why it wrote nothing, where it or its server told."""

    text: str
    finish: str
    refusal: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to send a request once; `name` is what the server may tell repetitions by."""

    id: int
    key: str
    attempt: int

    @property
    def name(self) -> str:
        """The idempotency key."""
        return f"{self.key}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class Account:
    """What a file holds: `answers` that `spent` paid for, and `lost` requests.

    A lost request was sent and had no answer that could be kept (a kill, a timeout, a broken
    connection); it may have been billed, so the budget counts `lost_cost`, its worst case. `open`
    ones are on their way.
    """

    answers: int
    spent: Cost
    lost: int
    lost_cost: Cost
    open: int


class JudgeStore:
    """Answers by key, and requests under way; several threads and processes may share a file.

    A request is on record before it is sent, an answer before it is used. `path` None keeps all in
    memory. Raises KeelError where the file is none of these.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._mine = f"{os.getpid()}:{_started(os.getpid())}:{uuid.uuid4().hex}"
        self._lock = threading.RLock()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=60.0,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise KeelError(
                f"cache = {str(path)!r} cannot be used: {error}: name another file"
            ) from None

    def together(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call methods of this store in one transaction; what each returns, or its exception.

        One that raises leaves nothing of its own behind. Raises, with nothing of any kept, where
        the whole cannot be written.
        """
        if not works:
            return []
        ends: list[Any] = []
        with self._transaction():
            for work in works:
                try:
                    ends.append(work())
                except Exception as error:
                    if not self._db.in_transaction:
                        raise  # a full disk has undone it all
                    ends.append(error)
        return ends

    def find(self, key: str) -> StoredAnswer | None:
        """The answer to a question, if there is one."""
        with self._lock:
            return self._find(key)

    def reserve(self, key: str, worst: Cost, budget: SpendLimit) -> StoredAnswer | Ticket | None:
        """Leave to ask; or the answer, where there is one by now; or None: wait, and try again.

        None where another process is asking the same, or where the budget may yet do once requests
        on their way have been answered. Raises KeelError where it cannot.
        """
        with self._transaction():
            if (answer := self._find(key)) is not None:
                return answer
            self._bury()
            ours = (key,)
            if self._db.execute(
                "SELECT 1 FROM requests WHERE key = ? AND NOT lost", ours
            ).fetchone():
                return None
            spent, lost = self._spent(), self._sum("lost")
            budget.check(spent, lost, worst)
            if not budget.covers(spent + lost + self._sum("NOT lost") + worst):
                return None
            attempt = self._db.execute(
                "SELECT COALESCE(MAX(attempt), 0) FROM requests WHERE key = ?", ours
            ).fetchone()[0]
            cursor = self._db.execute(
                "INSERT INTO requests (key, attempt, owner, tokens_in, tokens_out, dollars)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (key, attempt, self._mine, worst.tokens_in, worst.tokens_out, worst.dollars),
            )
            assert cursor.lastrowid is not None
            return Ticket(cursor.lastrowid, key, attempt)

    def settle(self, ticket: Ticket, answer: StoredAnswer, model: str) -> StoredAnswer:
        """Keep an answer and what it cost. The answer that was first, where there are two."""
        cost = answer.cost
        with self._transaction():
            self._db.execute("DELETE FROM requests WHERE id = ?", (ticket.id,))
            self._db.execute(
                "UPDATE spent SET tokens_in = tokens_in + ?, tokens_out = tokens_out + ?,"
                " dollars = dollars + ?",
                (cost.tokens_in, cost.tokens_out, cost.dollars),
            )
            self._db.execute(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(ticket.key, model, answer.text, answer.finish, answer.refusal),
                    *(cost.tokens_in, cost.tokens_out, cost.dollars),
                ),
            )
            kept = self._find(ticket.key)
        assert kept is not None
        return kept

    def release(self, ticket: Ticket) -> None:
        """The request was not billed."""
        with self._transaction():
            self._db.execute("DELETE FROM requests WHERE id = ?", (ticket.id,))

    def lose(self, ticket: Ticket, answered: bool) -> None:
        """The request may have been billed, and brought nothing.

        Where the server `answered`, the next goes out under another name, lest it be sent the same
        again; where it did not, under the same, so that it need not be billed twice.
        """
        with self._transaction():
            self._db.execute(
                "UPDATE requests SET lost = 1, attempt = attempt + ? WHERE id = ?",
                (int(answered), ticket.id),
            )

    def account(self) -> Account:
        """What was paid so far, by every process that used the file."""
        with self._transaction():
            self._bury()
            count = "SELECT COUNT(*) FROM"
            return Account(
                answers=self._db.execute(f"{count} answers").fetchone()[0],
                spent=self._spent(),
                lost=self._db.execute(f"{count} requests WHERE lost").fetchone()[0],
                lost_cost=self._sum("lost"),
                open=self._db.execute(f"{count} requests WHERE NOT lost").fetchone()[0],
            )

    def close(self) -> None:
        """Let go of the file. Requests of this store that are still open are lost from now on."""
        with self._lock:
            # Nobody else can tell: their owner, this process, may go on. A file that cannot be
            # written, or that was closed before, is let go of all the same.
            with suppress(sqlite3.Error), self._transaction():
                self._lose_all(self._mine)
            self._db.close()

    def _open(self) -> None:
        self._check()
        self._db.execute("PRAGMA journal_mode = WAL")
        # FULL: a commit is on the disk when it returns, whatever happens to the machine.
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            for statement in TABLES.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {VERSION}")

    def _check(self) -> None:
        """Raise DatabaseError where a file is neither new nor of this version."""
        # In one statement, so that no other process comes between; and it alters nothing.
        version, names = self._db.execute(
            "SELECT (SELECT user_version FROM pragma_user_version),"
            " (SELECT COALESCE(GROUP_CONCAT(name), '') FROM sqlite_master)"
        ).fetchone()
        ours = version == VERSION and {"answers", "requests", "spent"} <= set(names.split(","))
        if not ours and (version or names):
            raise sqlite3.DatabaseError("it is another program's, or another version's")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, and nobody else meanwhile; within another, a part of that."""
        with self._lock:
            inner = self._db.in_transaction
            begin, undo, keep = _INNER if inner else _OUTER
            self._db.execute(begin)
            try:
                yield
                self._db.execute(keep)
            except BaseException:
                # A full disk may have undone it all by itself.
                if self._db.in_transaction:
                    for statement in undo:
                        self._db.execute(statement)
                raise

    def _find(self, key: str) -> StoredAnswer | None:
        row = self._db.execute(
            "SELECT text, finish, refusal, tokens_in, tokens_out, dollars FROM answers"
            " WHERE key = ?",
            (key,),
        ).fetchone()
        return None if row is None else StoredAnswer(row[0], row[1], row[2], Cost(*row[3:]))

    def _spent(self) -> Cost:
        return Cost(
            *self._db.execute("SELECT tokens_in, tokens_out, dollars FROM spent").fetchone()
        )

    def _sum(self, which: str) -> Cost:
        return Cost(*self._db.execute(f"SELECT {SUM} FROM requests WHERE {which}").fetchone())

    def _bury(self) -> None:
        """Requests of processes that are no more will bring no answer."""
        owners = self._db.execute("SELECT DISTINCT owner FROM requests WHERE NOT lost").fetchall()
        for (owner,) in owners:
            if owner != self._mine and not _alive(owner):
                self._lose_all(owner)

    def _lose_all(self, owner: str) -> None:
        self._db.execute("UPDATE requests SET lost = 1 WHERE owner = ? AND NOT lost", (owner,))


def _alive(owner: str) -> bool:
    """Whether the process that calls itself so still runs (seen from this machine)."""
    pid, started, _ = owner.split(":")
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        pass
    except OSError:
        return False
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """When a process started, as the kernel counts: a process id may be another's later.

    A zombie has ended. Empty where there is no /proc.
    """
    try:
        # The second field is the program's name in brackets, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]
