"""The options of a judge, and what its answers cost. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from keel.algorithms.terms import Coefficient, FrozenModel, Positive
from keel.config.fields import AsTuple, Count, Index
from keel.types import KeelError

Structured = Literal["json_schema", "json_object", "text"]
"""How a server is asked for JSON: by a schema, as any JSON object, or only in the prompt."""

RUBRIC = "how correct, helpful and clear the answer is."
GROUP = "group"
"""An answer is compared with others of its group."""
RESERVED = ("model", "messages", "response_format", "seed", "n", "stream")
"""Keys of a request that other options set, or that change the form of the reply."""
LIMITS = ("max_tokens", "max_completion_tokens")
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


class SpendLimitReached(KeelError):
    """The limit does not cover the next request; all replies so far are stored."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What a judge wrote. `refusal` is the reason if it, or its server, gave no answer."""

    text: str
    finish: str
    refusal: str
    cost: Cost


class JudgeOptions(FrozenModel):
    """The options of the judge."""

    model: str
    mode: Literal["rubric", "pairwise"] = "rubric"
    url: str | None = None
    """The server, as in http://localhost:8000/v1; None is OpenAI's."""
    api_key_env: str | None = None
    """The environment variable of the API key; None is OPENAI_API_KEY there, and none elsewhere."""
    rubric: str = RUBRIC
    """What counts, in words."""
    low: int = 1
    high: int = 10
    """The ends of the scale of a rubric; the reward is 0 at `low` and 1 at `high`."""
    reference: str | None = None
    """The column of an answer that deserves full marks."""
    against: str = GROUP
    """What an answer is compared with: others of its group, or the column of a fixed answer."""
    rivals: Count = 2
    """How many others of its group an answer is compared with."""
    both_orders: bool = True
    temperature: Coefficient = 0.0
    max_tokens: Count = 512
    limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The server's name of the limit on a reply's length."""
    seed: Index = 0
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """More keys of a request, such as reasoning_effort or top_p."""
    without: Annotated[tuple[Literal["seed", "temperature"], ...], AsTuple] = ()
    """Keys that the server does not take."""
    structured: Structured = "json_schema"
    attempts: Count = 2
    """How often a question is asked whose answer holds no verdict; each is paid for."""
    concurrency: Count = 8
    retries: Index = 6
    """How often a request without an answer is repeated: after 0.5 s, twice as long each time up to
    8 s, or after the server's `Retry-After` up to two minutes."""
    timeout: Positive = 30.0
    """Seconds that one request may take; rewards.timeout bounds all requests of a step."""
    price_in: Coefficient = 0.0
    price_out: Coefficient = 0.0
    """Dollars for a million tokens."""
    budget: Positive | None = None
    """The most dollars that may be spent, over all runs that share the cache."""
    budget_tokens: Annotated[int, Field(ge=1, le=10**15)] | None = None
    cache: str | None = None
    """The file of paid answers; None is one of the run's."""
    label: Annotated[str, Field(pattern=r"^[\w-]+$")] = "judge"
    """The name of its metrics and its file: a second judge of a run needs another."""

    @model_validator(mode="after")
    def _fits(self) -> JudgeOptions:
        if not 1 <= self.high - self.low <= 100:
            raise ValueError(f"low = {self.low} and high = {self.high}: 1 to 100 must lie between")
        for key in self.extra:
            if key in (*RESERVED, *LIMITS, "temperature"):
                raise ValueError(f"extra.{key}: it is an option of its own, or would not be read")
        if self.budget is not None and not self.price_in + self.price_out:
            raise ValueError(f"budget = {self.budget:g}: set price_in and price_out, or drop it")
        return self

    def parameters(self, sample: int) -> dict[str, Any]:
        """The keys of the request for a sample besides model, messages and format."""
        keys: dict[str, Any] = {"temperature": self.temperature, self.limit_name: self.max_tokens}
        keys |= {"seed": self.seed + sample, **self.extra}
        return {key: value for key, value in keys.items() if key not in self.without}

    def cost(self, tokens_in: int, tokens_out: int) -> Cost:
        """The cost of these numbers of tokens."""
        dollars = (tokens_in * self.price_in + tokens_out * self.price_out) / 1e6
        return Cost(tokens_in, tokens_out, dollars)

    def worst(self, body: Mapping[str, Any]) -> Cost:
        """The most that a request costs."""
        return self.cost(most_tokens(body), self.max_tokens)

    def covers(self, cost: Cost) -> bool:
        """Whether a total cost is within the limits."""
        return (self.budget is None or cost.dollars <= self.budget + ROUNDING) and (
            self.budget_tokens is None or cost.tokens <= self.budget_tokens
        )

    def limit_reached(self, spent: Cost, worst: Cost) -> SpendLimitReached:
        """The error if the rest does not cover the worst case of the next request."""
        option, value = "budget_tokens", f"{self.budget_tokens}"
        if self.budget_tokens is None or (spent + worst).tokens <= self.budget_tokens:
            option, value = "budget", f"{self.budget:g} dollars"
        return SpendLimitReached(
            f"{option} = {value} is used up: {spent} spent, and the next request may need {worst}: "
            f"raise {option}"
        )


def most_tokens(body: Mapping[str, Any]) -> int:
    """The most tokens that a request is read as: no token is shorter than a byte.

    The schema of the reply and tools are included: servers write them into the prompt.
    """
    parts = [*body["messages"], body.get("response_format"), body.get("tools")]
    bytes_in = sum(len(json.dumps(part, ensure_ascii=False).encode()) for part in parts if part)
    return bytes_in + FRAME * (len(body["messages"]) + 1)
