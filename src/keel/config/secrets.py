"""Rejects secrets in a recipe, which is written into the run folder. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
KEYS = re.compile(
    r"(?:.*[_-])?(?:api[_-]?key|(?:secret|private|access)[_-]?key|passw(?:or)?d"
    r"|(?:access|auth|hf|bearer|use_auth)[_-]?token|authorization|credentials?|secret)|token",
    re.IGNORECASE,
)
"""What keys of a table are called whose value is a secret."""
MAYBE = re.compile(r"token|secret", re.IGNORECASE)
"""What options of a reward are called whose value may be one, or a word of a game."""
LIKELY = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])\S{8,}|\S{16,}")
"""A value of such a key that looks like a secret."""
DIGITS = 6
"""Digits from which on a number may be a secret."""
SECRETS = re.compile(
    r"\b(?:sk-(?=[\w-]*\d)[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[opusr]_[A-Za-z0-9]{20,}"
    r"|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|AIza[\w-]{35}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|^Bearer \S{12,}$|[?&](?:\w+_)?(?:token|key)=[^&\s]{8,}"
)
"""How keys of the well-known services begin, and in what secrets are handed on."""
ADDRESS = re.compile(
    r"\b[A-Za-z][\w+.-]*://[^\s/?#@:]*:[^\s/?#@]+@|^[A-Za-z][\w+.-]*://[^\s/?#@]+@\S*$"
)
"""An address with a password, or one with a user that is all there is."""
VARIABLES = re.compile(r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
SHORTEST = 12
"""Characters of such a variable's value below which it may be a word like any other."""
CUT = 8
"""Characters from which on such a value is cut out of messages; a word lost harms little."""
FIX = (
    "a recipe is kept in the run folder: set it in the environment (a judge's key: name its "
    "variable in api_key_env)"
)


def wrong_secret(recipe: Mapping[str, Any]) -> str | None:
    """Where a recipe holds what looks like a secret, and the fix; never repeats it.

    By the name of its key, by the form of the value, or since an environment variable that is
    called a key, token, secret or password holds the same.
    """
    own = _held(SHORTEST)
    for where, key, value in _values(recipe, ""):
        if key is not None and _secret(where, key, value):
            return f"{where} would hold a secret: {FIX}"
        if SECRETS.search(value):
            return f"{where} holds what looks like a key: {FIX}"
        if ADDRESS.search(value):
            return f"{where} holds an address with a user or password: {FIX}"
        if (name := next((own[one] for one in own if one in value), None)) is not None:
            return f"{where} holds the value of the environment variable {name}: {FIX}"
    return None


def without_secrets(message: T) -> T:
    """A text, or the texts in mappings and lists, with $NAME where a variable's secret stood.

    For what others have written and Keel shows: the error of a user's function may hold its key.
    """
    return cast(T, _without(message, sorted(_held(CUT).items(), key=lambda one: -len(one[0]))))


def _without(data: Any, held: Sequence[tuple[str, str]]) -> Any:
    if isinstance(data, str):
        for value, name in held:
            data = data.replace(value, f"${name}")
        return data
    if isinstance(data, Mapping):
        return {_without(key, held): _without(value, held) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without(value, held) for value in data]
    return data


def _held(shortest: int) -> dict[str, str]:
    """The values of environment variables that are called a secret, and the variables' names."""
    return {
        value: name
        for name, value in os.environ.items()
        if VARIABLES.fullmatch(name) and len(value) >= shortest
    }


def _secret(where: str, key: str, value: str) -> bool:
    """Whether the value of a key is a secret, by what the key is called."""
    if MAYBE.fullmatch(key) and ".functions." in where:
        return LIKELY.fullmatch(value) is not None
    return KEYS.fullmatch(key) is not None and value not in ("", "none")


def _values(data: Any, where: str, key: str | None = None) -> Iterator[tuple[str, str | None, str]]:
    """Each text of a recipe: its place, the last key on the way there, and itself.

    A key is a text too: it is not shown where it may be a secret.
    """
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield f"a key of {where or 'the recipe'}", None, str(name)
            yield from _values(value, f"{where}.{name}".lstrip("."), str(name))
    elif isinstance(data, list | tuple):
        for at, value in enumerate(data):
            yield from _values(value, f"{where}.{at}".lstrip("."), key)
    elif isinstance(data, str):
        yield where, key, data
    elif isinstance(data, int) and abs(data) >= 10**DIGITS:
        yield where, key, hex(data)  # some numbers have more digits than str takes


def wrong_key_name(name: str) -> str | None:
    """Why `api_key_env` holds a key instead of a variable's name; never repeats it."""
    if name in os.environ or NAME.fullmatch(name):
        return None
    return "api_key_env wants the NAME of an environment variable, not its value"


def wrong_address(url: str) -> str | None:
    """Why a server's address may hold a secret; never repeats it."""
    try:
        place = urlsplit(url).netloc
    except ValueError:
        place = url
    if "?" in url or "#" in url or "@" in (place or url):
        return (
            "url may hold no user, password, query or fragment: write http://HOST:PORT/v1, and "
            "name the environment variable of the key in api_key_env"
        )
    return None
