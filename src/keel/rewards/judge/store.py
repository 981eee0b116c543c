"""The cache of a judge's answers and what they cost: one SQLite table, safe to kill."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keel.platform.sqlite import Database, Format
from keel.types import KeelError

FORMAT = Format(
    application=0x4B4C4A47,  # "KLJG"
    version=3,
    statements=(
        """CREATE TABLE IF NOT EXISTS answers (
            id INTEGER PRIMARY KEY, key TEXT, model TEXT, text TEXT, finish TEXT, refusal TEXT,
            tokens_in INTEGER, tokens_out INTEGER, dollars REAL
        )""",
        # With the costs, so that a sum over it reads no texts.
        "CREATE INDEX IF NOT EXISTS by_key ON answers (key, tokens_in, tokens_out, dollars)",
    ),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens read and written, and their price."""

    tokens_in: int = 0
    tokens_out: int = 0
    dollars: float = 0.0

    @property
    def tokens(self) -> int:
        """Read and written."""
        return self.tokens_in + self.tokens_out

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.tokens_in + other.tokens_in,
            self.tokens_out + other.tokens_out,
            self.dollars + other.dollars,
        )

    def __str__(self) -> str:
        return f"${self.dollars:.6g} ({self.tokens} tokens)"


class SpendLimitReached(KeelError):
    """The limit does not cover the next request; all replies so far are stored."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What a judge wrote. `refusal` is the reason if it, or its server, gave no answer."""

    text: str
    finish: str
    refusal: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class Account:
    """The number of answers in a cache, and their cost."""

    answers: int
    spent: Cost


class JudgeStore:
    """Answers by key; several threads and processes may share a file.

    Every paid answer is a row, so that the sum of the rows is what was billed: if two processes
    ask one question at the same moment, both answers count, and the first is used. `path` None
    keeps all in memory. Raises KeelError if the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._db = Database(path, FORMAT, f"cache = {str(path)!r}")

    def find(self, key: str) -> StoredAnswer | None:
        """The stored answer to a question."""
        found = self._db.rows(
            "SELECT text, finish, refusal, tokens_in, tokens_out, dollars FROM answers"
            " WHERE key = ? ORDER BY id LIMIT 1",
            (key,),
        )
        if not found:
            return None
        text, finish, refusal, *cost = found[0]
        return StoredAnswer(text, finish, refusal, Cost(*cost))

    def add(self, key: str, model: str, answer: StoredAnswer) -> None:
        """Store an answer with its cost."""
        cost = answer.cost
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO answers VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(key, model, answer.text, answer.finish, answer.refusal),
                    *(cost.tokens_in, cost.tokens_out, cost.dollars),
                ),
            )

    def account(self) -> Account:
        """What was spent so far, by every process that used the file."""
        ((answers, *spent),) = self._db.rows(
            "SELECT COUNT(DISTINCT key), COALESCE(SUM(tokens_in), 0),"
            " COALESCE(SUM(tokens_out), 0), COALESCE(SUM(dollars), 0) FROM answers"
        )
        return Account(answers, Cost(*spent))

    def close(self) -> None:
        """Close the file."""
        self._db.close()
