"""The key that the line of an error names, as the user writes it."""

from __future__ import annotations

import re

from keel.preflight.always_effective import ALWAYS
from keel.preflight.unused_keys import IDLE

KEYS = frozenset({*ALWAYS, *IDLE})
TABLES = frozenset(key.split(".")[0] for key in KEYS if "." in key)
DOTTED = re.compile(r"(?<![\w./-])[a-z_][\w-]*(?:\.[\w-]+)+")
ASIDE = re.compile(r"\([^()]*\)|'[^']*'|\"[^\"]*\"")
"""What a line says beside its mend, or quotes from data."""


def named(line: str, key: str) -> str:
    """The first key of the schema that the line names, below the stage of `key`; else `key`."""
    for match in DOTTED.finditer(ASIDE.sub("", line)):
        parts = match[0].split(".")
        for at in range(len(parts) - 1):
            known = ".".join(_plural(parts[at:]))
            if known in KEYS:
                return known if known.startswith("model.") else f"{_before(key)}{known}"
    return key


def _plural(parts: list[str]) -> list[str]:
    """Tables as the schema names them: errors of rows speak of one task, of one sampling."""
    names = {"task": "tasks", "sampling": "rollout"}
    return [names.get(parts[0], parts[0]), *parts[1:]]


def _before(key: str) -> str:
    """What stands in front of a key's own table: its stage, and `sampled`."""
    parts = key.split(".")
    for at, part in enumerate(parts):
        if part in TABLES and part != "sampled":
            return "".join(f"{one}." for one in parts[:at])
    return "".join(f"{one}." for one in parts[:-1])
