"""One SQLite file that several threads and processes share, safe to kill at any instant."""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from keel.types import KeelError

CACHE_KIB = 65_536
"""Memory for pages, at most: keys are hashes, so that an index is written to everywhere at once."""
MAGIC = b"SQLite format 3\0"
"""The first bytes of every SQLite file."""
FIXES = {
    sqlite3.SQLITE_FULL: "free space on its disk",
    # Also of a full disk: SQLite reports so that the index of its log, or a quota, has no space.
    sqlite3.SQLITE_IOERR: "free space on its disk; if it is not full, check the disk",
    sqlite3.SQLITE_READONLY: "make the file and its folder writable",
    sqlite3.SQLITE_CANTOPEN: "make the file and its folder readable and writable",
    sqlite3.SQLITE_BUSY: "another process is writing to it: wait for it to end",
    sqlite3.SQLITE_LOCKED: "another process is writing to it: wait for it to end",
}
"""What to do about an error, by SQLite's primary result code."""


@dataclass(frozen=True, slots=True)
class Format:
    """Whose file it is: SQLite's application_id, a version, and the statements that make it."""

    application: int
    version: int
    statements: Sequence[str]


class Database:
    """A connection to a file of one format; `path` None keeps everything in memory.

    `name` begins each error. `synchronous` NORMAL: a commit survives a kill of the process, and a
    power failure may undo the last ones; FULL: it survives both. `timeout` is how many seconds a
    write waits for another process. Raises KeelError if the file cannot be used.
    """

    def __init__(
        self,
        path: Path | None,
        form: Format,
        name: str,
        *,
        synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
        timeout: float = 60.0,
    ) -> None:
        self.name, self._synchronous = name, synchronous
        self._lock = threading.RLock()
        with self.errors():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=timeout,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._open(form, timeout)
            except BaseException:
                self._db.close()
                raise

    def _open(self, form: Format, timeout: float) -> None:
        # One statement, so that no other process writes between; it changes nothing.
        application, version, tables = self._db.execute(
            "SELECT (SELECT application_id FROM pragma_application_id),"
            " (SELECT user_version FROM pragma_user_version),"
            " (SELECT COUNT(*) FROM sqlite_master)"
        ).fetchone()
        ours = application == form.application
        if (not ours or version != form.version) and (application or version or tables):
            other = f"version {version}, and this Keel needs {form.version}"
            raise sqlite3.DatabaseError(
                f"it is of {other}" if ours else "it belongs to another program or version"
            )
        self._db.execute("PRAGMA foreign_keys = ON")
        self._use_write_ahead_log(timeout)
        self._db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        if ours:
            return
        with self.transaction():
            for statement in form.statements:
                self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id = {form.application}")
            self._db.execute(f"PRAGMA user_version = {form.version}")

    def _use_write_ahead_log(self, timeout: float) -> None:
        """In this one case SQLite does not wait by itself for a process that does the same."""
        end = time.monotonic() + timeout
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() >= end:
                    raise
                time.sleep(0.005)

    @contextmanager
    def transaction(self, lasting: bool = True) -> Iterator[None]:
        """All or nothing, while no other thread or process writes.

        One that is not `lasting` may be undone by a power failure, and does not wait for the disk.
        """
        with self._lock, self.errors():
            self._db.execute(f"PRAGMA synchronous = {self._synchronous if lasting else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk ends it by itself
                    self._db.execute("ROLLBACK")
                raise

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Execute one statement, inside `transaction`."""
        return self._db.execute(sql, values)

    def execute_many(self, sql: str, values: Iterable[Sequence[Any]]) -> int:
        """Execute a statement for each row, inside `transaction`; how many rows it changed."""
        return self._db.executemany(sql, values).rowcount

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Every row of a query."""
        with self._lock, self.errors():
            return self._db.execute(sql, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns an error of SQLite or of the file into one line with a fix."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            # The low byte of an extended code is the primary one.
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_FULL if full else None)
            fix = FIXES.get(0 if code is None else code & 0xFF, "name another file")
            raise KeelError(f"{self.name} cannot be used: {error}: {fix}") from None


def is_database(path: Path) -> bool:
    """Whether a file is one of SQLite's."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
