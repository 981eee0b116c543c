"""The recipe key that an error message names, as the user writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from pydantic import BaseModel

from keel.config.errors import models_in
from keel.config.model import Model
from keel.config.schema import Stage

DOTTED = re.compile(r"(?<![\w./-])[a-z_][\w-]*(?:\.[\w-]+)+")
ASIDE = re.compile(r"\([^()]*\)|'[^']*'|\"[^\"]*\"")
"""Parts of a message that add an explanation or quote data."""


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in models_in(info):
            yield from _keys(inner, f"{prefix}{name}.")


KEYS: Final = frozenset(
    {key for stage in models_in(Stage) for key in _keys(stage)} | set(_keys(Model, "model."))
)
TABLES: Final = frozenset(key.split(".")[0] for key in KEYS if "." in key)


def named(line: str, key: str) -> str:
    """The first key of the schema that a message names, in the stage of `key`; else `key`."""
    for match in DOTTED.finditer(ASIDE.sub("", line)):
        parts = match[0].split(".")
        for at in range(len(parts) - 1):
            known = ".".join(_schema_name(parts[at:]))
            if known in KEYS:
                return known if known.startswith("model.") else f"{_prefix(key)}{known}"
    return key


def _schema_name(parts: list[str]) -> list[str]:
    """Messages about data name one task and the sampling; the schema has lists of tables."""
    names = {"task": "tasks", "sampling": "rollout"}
    return [names.get(parts[0], parts[0]), *parts[1:]]


def _prefix(key: str) -> str:
    """What precedes the name of the key's own table: its stage, and `sampled`."""
    parts = key.split(".")
    for at, part in enumerate(parts):
        if part in TABLES and part != "sampled":
            return "".join(f"{one}." for one in parts[:at])
    return "".join(f"{one}." for one in parts[:-1])
