"""The cache of a judge's answers and what they cost: one SQLite table, safe to kill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.platform.sqlite import Database, Format
from keel.types import KeelError

ROUNDING = 1e-9
"""Dollars that sums of floats may be off by."""
FRAME = 64
"""Most tokens that a chat template adds to a message, and to the whole; usual are 3 to 12."""
FORMAT = Format(
    application=0x4B4C4A47,  # "KLJG"
    version=3,
    tables=frozenset(("answers",)),
    statements=(
        """CREATE TABLE IF NOT EXISTS answers (
            id INTEGER PRIMARY KEY, key TEXT, model TEXT, text TEXT, finish TEXT, refusal TEXT,
            tokens_in INTEGER, tokens_out INTEGER, dollars REAL
        )""",
        "CREATE INDEX IF NOT EXISTS by_key ON answers (key)",
        # A sum over it reads no texts.
        "CREATE INDEX IF NOT EXISTS by_cost ON answers (tokens_in, tokens_out, dollars)",
    ),
)
_SUMS = "COALESCE(SUM(tokens_in), 0), COALESCE(SUM(tokens_out), 0), COALESCE(SUM(dollars), 0)"


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
        """The cost of these numbers of tokens."""
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
    """The limit does not cover the next request; all replies so far are stored."""


@dataclass(frozen=True, slots=True)
class SpendLimit:
    """The most that may be spent, over all runs that share a cache; None is no limit."""

    dollars: float | None = None
    tokens: int | None = None

    @property
    def set(self) -> bool:
        """Whether there is one."""
        return self.dollars is not None or self.tokens is not None

    def covers(self, cost: Cost) -> bool:
        """Whether a total cost is within the limit."""
        return (self.dollars is None or cost.dollars <= self.dollars + ROUNDING) and (
            self.tokens is None or cost.tokens <= self.tokens
        )

    def error(self, spent: Cost, worst: Cost) -> SpendLimitReached:
        """The error if the rest does not cover the worst case of the next request."""
        if SpendLimit(tokens=self.tokens).covers(spent + worst):
            option, value = "budget", f"{self.dollars:g} dollars"
        else:
            option, value = "budget_tokens", f"{self.tokens}"
        return SpendLimitReached(
            f"{option} = {value} is used up: {spent} spent, and the next request may need {worst}: "
            f"raise {option}"
        )


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

    def costs(self) -> list[tuple[str, str, Cost]]:
        """Each question's key, its model, and what its answers cost."""
        sql = f"SELECT key, model, {_SUMS} FROM answers GROUP BY key ORDER BY key"
        return [(key, model, Cost(*cost)) for key, model, *cost in self._db.rows(sql)]

    def account(self) -> Account:
        """What was spent so far, by every process that used the file."""
        ((answers, *spent),) = self._db.rows(f"SELECT COUNT(DISTINCT key), {_SUMS} FROM answers")
        return Account(answers, Cost(*spent))

    def spent(self) -> Cost:
        """The cost of all answers."""
        return Cost(*self._db.rows(f"SELECT {_SUMS} FROM answers")[0])

    def close(self) -> None:
        """Close the file."""
        self._db.close()
