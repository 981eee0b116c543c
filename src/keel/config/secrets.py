"""Keeps keys out of recipes, which are written into the run folder, and out of logs. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from keel.types import KeelError

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
KEYS = re.compile(
    r"(?:.*[_-])?(?:api[_-]?key|(?:secret|private|access)[_-]?key|passw(?:or)?d"
    r"|(?:access|auth|hf|bearer)[_-]?token|authorization|credentials?|client[_-]secret)|token",
    re.IGNORECASE,
)
"""Keys of a table whose value is a secret. An option `token` of a reward may be another token."""
VARIABLES = re.compile(r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
SHORTEST = 12
"""Characters of such a variable's value; a shorter one may be an ordinary word."""
FIX = (
    "a recipe is kept in the run folder: set it in the environment (a judge's key: name its "
    "variable in api_key_env)"
)


def wrong_secret(recipe: Mapping[str, Any]) -> str | None:
    """Where a recipe holds a secret, and the fix; never repeats it.

    A secret by the name of its key, or the value of an environment variable that is called a key,
    token, secret or password.
    """
    held = _held()
    for where, key, value in _values(recipe, "", ""):
        named = KEYS.fullmatch(key) and not (key == "token" and ".functions." in where)
        if named and value not in ("", "none"):
            return f"{where} would hold a secret: {FIX}"
        if (name := next((name for one, name in held if one in value), None)) is not None:
            return f"{where} holds the value of the environment variable {name}: {FIX}"
    return None


def without_secrets(message: T) -> T:
    """A text, or the texts in mappings and lists, with $NAME in place of a variable's secret."""
    return cast(T, _without(message, _held()))


def _without(data: Any, held: list[tuple[str, str]]) -> Any:
    if isinstance(data, str):
        for value, name in held:
            data = data.replace(value, f"${name}")
        return data
    if isinstance(data, Mapping):
        return {_without(key, held): _without(value, held) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without(value, held) for value in data]
    return data


def _held() -> list[tuple[str, str]]:
    """The values of environment variables that are called a secret, longest first, with names."""
    found = [
        (value, name)
        for name, value in os.environ.items()
        if VARIABLES.fullmatch(name) and len(value) >= SHORTEST
    ]
    return sorted(found, key=lambda one: -len(one[0]))


def _values(data: Any, where: str, key: str) -> Iterator[tuple[str, str, str]]:
    """Each text of a recipe: its place, the last key on the way there, and itself."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _values(value, f"{where}.{name}".lstrip("."), str(name))
    elif isinstance(data, list | tuple):
        for at, value in enumerate(data):
            yield from _values(value, f"{where}.{at}".lstrip("."), key)
    elif isinstance(data, str):
        yield where, key, data


def variable(key: str, name: str | None) -> str:
    """The value of the environment variable that `key` names; KeelError if it is not set."""
    value = os.environ.get(name or "")
    if not value:
        raise KeelError(f"{key}: the environment variable {name!r} is not set")
    return value


def wrong_key_name(name: str, key: str = "api_key_env") -> str | None:
    """Why a key holds a secret instead of its variable's name; never repeats it."""
    if name in os.environ or NAME.fullmatch(name):
        return None
    return f"{key} wants the NAME of an environment variable, not its value"
