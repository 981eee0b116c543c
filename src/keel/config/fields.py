"""Types of keys that every recipe shares. Torch-free."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from keel.algorithms.spec import UnusedIf

AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""TOML has lists only."""
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Index = Annotated[int, Field(ge=0, le=1_000_000_000)]
"""Steps, intervals and examples: a billion is more than any run counts to."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Threads = Annotated[int, Field(ge=1, le=1024)]
"""OpenMP ends the process where it cannot start as many as it is asked for."""
Tokens = Annotated[int, Field(ge=1, le=2**24)]
"""Tokens of one sequence or one micro-batch, which are addressed together in memory."""
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
Words = Annotated[tuple[str, ...], AsTuple]
Ids = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], AsTuple]
"""Tokens by their id."""
Real = Annotated[float, Field(ge=-1e9, le=1e9)]
"""A reward or its weight; the square of 1e9 is finite in float32."""
SEPARATE_VALIDATION = UnusedIf(
    lambda key: key.table.validation_path is not None,
    "validation_path is the validation split, so no share is split off",
)
BadRows = Literal["stop", "quarantine"]
"""What becomes of a row of data that cannot be read."""


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that is a function of the recipe's seed and of what it is for."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
