"""Types of keys that every recipe shares. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""TOML has lists only."""
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Words = Annotated[tuple[str, ...], AsTuple]
Ids = Annotated[tuple[int, ...], AsTuple]
BadRows = Literal["stop", "quarantine"]
"""What becomes of a row of data that cannot be read."""
