"""What a judge costs, in tokens and dollars, and the limit on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keel.types import KeelError

ROUNDING = 1e-9
"""Dollars that sums of floats may be off by."""
FRAME = 64
"""Most tokens that a chat template adds to a message, and to the whole; usual are 3 to 12."""


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

    def error(self, spent: Cost, lost: Cost, worst: Cost) -> KeelError:
        """The error where the rest does not cover the worst case of the next request."""
        if SpendLimit(tokens=self.tokens).covers(spent + lost + worst):
            option, value = "budget", f"{self.dollars:g} dollars"
        else:
            option, value = "budget_tokens", f"{self.tokens}"
        return KeelError(
            f"{option} = {value} is used up: {spent} spent, {lost} on requests without a stored "
            f"answer, and the next may need {worst}: raise {option}"
        )
