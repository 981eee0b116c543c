"""The cache of a judge's answers and what they cost: one SQLite file, safe to kill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.data.database import Database, Format
from keel.types import KeelError

ROUNDING = 1e-9
"""Dollars that sums of floats may be off by."""
FRAME = 64
"""Most tokens that a chat template adds to a message, and to the whole; usual are 3 to 12."""
FORMAT = Format(
    application=0,
    version=2,
    tables=frozenset(("answers", "requests", "spent")),
    statements=(
        """CREATE TABLE IF NOT EXISTS answers (
            key TEXT PRIMARY KEY, model TEXT, text TEXT, finish TEXT, refusal TEXT,
            tokens_in INTEGER, tokens_out INTEGER, dollars REAL
        ) WITHOUT ROWID""",
        """CREATE TABLE IF NOT EXISTS requests (
            id INTEGER PRIMARY KEY, tokens_in INTEGER, tokens_out INTEGER, dollars REAL
        )""",
        """CREATE TABLE IF NOT EXISTS spent (
            id INTEGER PRIMARY KEY CHECK (id = 0), tokens_in INTEGER, tokens_out INTEGER,
            dollars REAL
        )""",
        "INSERT OR IGNORE INTO spent VALUES (0, 0, 0, 0)",
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


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars for a million tokens."""

    tokens_in: float = 0.0
    tokens_out: float = 0.0

    def cost(self, tokens_in: int, tokens_out: int) -> Cost:
        """The cost of so many tokens."""
        dollars = (tokens_in * self.tokens_in + tokens_out * self.tokens_out) / 1e6
        return Cost(tokens_in, tokens_out, dollars)

    def worst(self, body: Mapping[str, Any], max_tokens: int) -> Cost:
        """The most that a request costs: no token is shorter than a byte.

        The schema of the reply is included: servers write it into the prompt.
        """
        messages = body["messages"]
        parts = [*messages, body.get("response_format"), body.get("tools")]
        bytes_in = sum(len(json.dumps(part, ensure_ascii=False).encode()) for part in parts if part)
        return self.cost(bytes_in + FRAME * (len(messages) + 1), max_tokens)


class SpendLimitReached(KeelError):
    """The limit does not cover the next request; all that was paid for is stored."""


@dataclass(frozen=True, slots=True)
class SpendLimit:
    """The most that may be spent, over all runs that share a cache; None is no limit."""

    dollars: float | None = None
    tokens: int | None = None

    def covers(self, cost: Cost) -> bool:
        """Whether a total cost is within the limit."""
        return (self.dollars is None or cost.dollars <= self.dollars + ROUNDING) and (
            self.tokens is None or cost.tokens <= self.tokens
        )

    def error(self, spent: Cost, lost: Cost, worst: Cost) -> SpendLimitReached:
        """The error where the rest does not cover the worst case of the next request."""
        if SpendLimit(tokens=self.tokens).covers(spent + lost + worst):
            option, value = "budget", f"{self.dollars:g} dollars"
        else:
            option, value = "budget_tokens", f"{self.tokens}"
        return SpendLimitReached(
            f"{option} = {value} is used up: {spent} spent, {lost} on requests without a stored "
            f"answer, and the next may need {worst}: raise {option}"
        )


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What a judge wrote. `refusal` is the reason where it, or its server, gave none."""

    text: str
    finish: str
    refusal: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class Account:
    """What a cache holds: `answers`, paid with `spent`, and `lost` requests.

    A lost request was sent and has no stored answer: it is in progress, or it ended with a kill, a
    timeout or a broken connection. It may have been billed, so `lost_cost` is its worst case.
    """

    answers: int
    spent: Cost
    lost: int
    lost_cost: Cost


class JudgeStore:
    """Answers by key, and reservations; several threads and processes may share a file.

    The worst case of a request is reserved before it is sent and replaced by its cost when its
    answer is stored. A reservation that is never replaced keeps counting. `path` None keeps all in
    memory. Raises KeelError where the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._db = Database(path, FORMAT, f"cache = {str(path)!r}")

    def find(self, key: str) -> StoredAnswer | None:
        """The stored answer to a question."""
        columns = "text, finish, refusal, tokens_in, tokens_out, dollars"
        found = self._db.rows(f"SELECT {columns} FROM answers WHERE key = ?", (key,))
        if not found:
            return None
        text, finish, refusal, *cost = found[0]
        return StoredAnswer(text, finish, refusal, Cost(*cost))

    def reserve(self, worst: Cost, limit: SpendLimit) -> int | None:
        """Reserve the worst case of a request; its id, or None beyond the limit."""
        with self._db.transaction():
            if not limit.covers(self._sum("spent") + self._sum("requests") + worst):
                return None
            return self._db.execute(
                "INSERT INTO requests (tokens_in, tokens_out, dollars) VALUES (?, ?, ?)",
                (worst.tokens_in, worst.tokens_out, worst.dollars),
            ).lastrowid

    def commit(self, reservation: int, key: str, answer: StoredAnswer, model: str) -> None:
        """Store an answer and replace its reservation by its cost.

        Where another process stored one first, that one stays and both are counted as spent.
        """
        cost = (answer.cost.tokens_in, answer.cost.tokens_out, answer.cost.dollars)
        with self._db.transaction():
            self._db.execute("DELETE FROM requests WHERE id = ?", (reservation,))
            self._db.execute(
                "UPDATE spent SET tokens_in = tokens_in + ?, tokens_out = tokens_out + ?,"
                " dollars = dollars + ?",
                cost,
            )
            self._db.execute(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (key, model, answer.text, answer.finish, answer.refusal, *cost),
            )

    def release(self, reservation: int) -> None:
        """Drop the reservation of a request that was not billed."""
        with self._db.transaction():
            self._db.execute("DELETE FROM requests WHERE id = ?", (reservation,))

    def costs(self) -> list[tuple[str, str, Cost]]:
        """Each stored answer's key, model and cost."""
        sql = "SELECT key, model, tokens_in, tokens_out, dollars FROM answers ORDER BY key"
        return [(key, model, Cost(*cost)) for key, model, *cost in self._db.rows(sql)]

    def account(self) -> Account:
        """What was spent so far, by every process that used the file."""
        with self._db.transaction():
            answers, lost = (
                self._db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
                for table in ("answers", "requests")
            )
            return Account(answers, self._sum("spent"), lost, self._sum("requests"))

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _sum(self, table: str) -> Cost:
        columns = ("tokens_in", "tokens_out", "dollars")
        sums = ", ".join(f"COALESCE(SUM({column}), 0)" for column in columns)
        return Cost(*self._db.execute(f"SELECT {sums} FROM {table}").fetchone())
