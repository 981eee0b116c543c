"""What the pages show, as the address that can be shared. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, get_args, get_type_hints
from urllib.parse import urlencode

CHOICES = {
    "overlay": ("runs", "algorithms"),
    "theme": ("dark", "light"),
    "finish": ("eos", "stop", "length"),
}
LARGEST = 1e9
"""Numbers beyond it are left out of an address: nothing here is as large."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The query part of an address; a field that is None or empty is not in it."""

    def but(self, **changes: Any) -> Self:
        """The address with other values."""
        return replace(self, **changes)

    def url(self, path: str) -> str:
        """The path with this query."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        query = urlencode({k: v for k, v in values.items() if v not in (None, "", ())}, doseq=True)
        return f"{path}?{query}" if query else path


@dataclass(frozen=True, slots=True)
class Address(Parts):
    """The query of the pages of runs.

    `run` are the runs shown, the first of them the one whose rollouts are. `overlay` is "runs" or
    "algorithms", `colour` the key of a token measure, `theme` "dark" or "light". From `text` on
    they are what to search the rollouts for.
    """

    run: tuple[str, ...] = ()
    stage: str | None = None
    step: int | None = None
    row: int | None = None
    token: int | None = None
    colour: str | None = None
    overlay: str | None = None
    smooth: int | None = None
    theme: str | None = None
    text: str | None = None
    prompt: str | None = None
    finish: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    first_step: int | None = None
    last_step: int | None = None

    @staticmethod
    def read(items: Sequence[tuple[str, str]]) -> Address:
        """The address of query parameters; what is not known or not a valid value is left out."""
        values: dict[str, Any] = {"run": tuple(v for k, v in items if k == "run")}
        for key, value in items:
            if key not in KINDS or key == "run" or not value:
                continue
            try:
                found: Any = KINDS[key](value.lower() if key in CHOICES else value)
            except ValueError:
                continue
            number = isinstance(found, int | float)
            if found in CHOICES.get(key, (found,)) and (not number or abs(found) <= LARGEST):
                values[key] = found
        return Address(**values)


KINDS = {
    name: int if int in get_args(kind) else float if float in get_args(kind) else str
    for name, kind in get_type_hints(Address).items()
}
"""The type of each part of an address, but for None."""
SEARCHED = tuple(KINDS)[list(KINDS).index("text") :]
"""What limits a search of the rollouts."""
