"""What a judge may cost: tokens and dollars, reserved before they are spent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keel.types import KeelError

ROUNDING = 1e-9
"""Dollars that sums of floats may be off by."""
FRAME = 64
"""Tokens that a chat template may put around a message, at most; and one more such for the whole.

Templates in use take three to a dozen.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens read and written, and what they come to."""

    tokens_in: int = 0
    tokens_out: int = 0
    dollars: float = 0.0

    @property
    def tokens(self) -> int:
        """Both ways."""
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
        """What so many tokens come to."""
        dollars = (tokens_in * self.tokens_in + tokens_out * self.tokens_out) / 1e6
        return Cost(tokens_in, tokens_out, dollars)

    def worst(self, body: Mapping[str, Any], max_tokens: int) -> Cost:
        """At most what a request costs: no token is shorter than a byte.

        The schema of the answer is counted in: servers write it into the prompt.
        """
        messages = body["messages"]
        said = [*messages, body.get("response_format"), body.get("tools")]
        bytes_in = sum(len(json.dumps(part, ensure_ascii=False).encode()) for part in said if part)
        return self.cost(bytes_in + FRAME * (len(messages) + 1), max_tokens)


@dataclass(frozen=True, slots=True)
class SpendLimit:
    """The most that may be spent, over all runs that share a cache; None is no bound."""

    dollars: float | None = None
    tokens: int | None = None

    def covers(self, cost: Cost) -> bool:
        """Whether so much may be spent in all."""
        return (self.dollars is None or cost.dollars <= self.dollars + ROUNDING) and (
            self.tokens is None or cost.tokens <= self.tokens
        )

    def check(self, spent: Cost, lost: Cost, worst: Cost) -> None:
        """Raise KeelError where what is gone leaves too little for a request's worst case."""
        if self.covers(spent + lost + worst):
            return
        in_dollars = self.dollars is not None and not SpendLimit(self.dollars).covers(
            spent + lost + worst
        )
        option, value = (
            ("budget", f"{self.dollars:g} dollars")
            if in_dollars
            else ("budget_tokens", f"{self.tokens}")
        )
        raise KeelError(
            f"{option} = {value} is used up: {spent} spent, {lost} on requests whose answers never "
            f"came, and the next may need {worst}: raise {option}"
        )
