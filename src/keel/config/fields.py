"""Types of recipe keys, seeds by name, and suggestions for mistyped names. Torch-free."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from keel.algorithms.terms import AsTuple, UnusedIf

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Index = Annotated[int, Field(ge=0, le=1_000_000_000)]
"""Steps, intervals and examples: a billion is more than any run counts to."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Threads = Annotated[int, Field(ge=1, le=1024)]
"""OpenMP ends the process if it cannot start as many as it is asked for."""
Tokens = Annotated[int, Field(ge=1, le=2**24)]
"""Tokens of one sequence or one micro-batch, which are addressed together in memory."""
AUTO_TOKENS = 16_384
"""What `token_budget = "auto"` is, or begins with."""


def _budget(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
    """One message under one key, whichever type the value is not."""
    try:
        return known(value)
    except ValidationError:
        raise ValueError('"auto", or a number of tokens from 1 to 16,777,216') from None


MicroBatchTokens = Annotated[Tokens | Literal["auto"], WrapValidator(_budget)]
"""A value of `token_budget`."""
Answers = Annotated[int, Field(ge=1, le=65_536)]
"""Completions of one prompt, or sequences decoded together."""
Width = Annotated[int, Field(ge=1, le=65_536)]
"""Features of a layer; the largest published models have 18,432."""
Depth = Annotated[int, Field(ge=1, le=1_024)]
"""Layers, or heads of a layer."""
Temperature = Annotated[float, Field(ge=1e-3, le=100)]
"""Logits are divided by it: below, sampling is greedy; above, uniform."""
LearningRate = Annotated[float, Field(gt=0, le=1)]
"""AdamW moves a weight by about as much in each step."""
StageName = Annotated[str, Field(description="Name of the stage in files, metrics and overrides.")]
Words = Annotated[tuple[str, ...], AsTuple]
Ids = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], AsTuple]
"""Tokens by their id."""
Real = Annotated[float, Field(ge=-1e9, le=1e9)]
"""A reward or its weight; the square of 1e9 is finite in float32."""
SEPARATE_VALIDATION = UnusedIf(
    lambda key: key.table.validation_path is not None,
    "validation_path is the validation split, so no share is split off",
)
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A time limit: a year at the most, since clocks count to some number."""
BadRows = Literal["stop", "quarantine"]
"""What becomes of a row of data that cannot be read."""


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that is a function of the recipe's seed and of what it is for."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most probably meant, if it is like any: fewest typing errors."""
    names = list(known)
    folded = [other for other in names if other.casefold() == name.casefold()]
    close = folded or difflib.get_close_matches(name, names, n=5, cutoff=0.6)
    return min(close, key=lambda other: _typing_errors(name, other)) if close else None


def _typing_errors(a: str, b: str) -> int:
    """Letters added, dropped, replaced, or swapped with a neighbour (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        older, before, row = before, row, [i]
        for j, y in enumerate(b, start=1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                least = min(least, older[j - 2] + 1)
            row.append(least)
    return row[-1]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """One line: there is no such thing, and what was probably meant."""
    names = sorted(set(known))
    guess = nearest(name, names)
    hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(names)}"
    return f"unknown {what} {name!r}: {hint}"
