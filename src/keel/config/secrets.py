"""What must not stand in a recipe, since a recipe is written into the run folder. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
KEYS = re.compile(
    r"(?:.*[_-])?(?:api[_-]?key|(?:access|auth|hf|bearer|use_auth)[_-]?token|passw(?:or)?d"
    r"|secret|authorization|credentials?)|token",
    re.IGNORECASE,
)
"""What keys of a table are called whose value is a secret."""
SECRETS = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[opusr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|AIza[\w-]{35})"
)
"""What keys of the well-known services begin with."""
ADDRESS = re.compile(r"\b[A-Za-z][\w+.-]*://[^\s/?#@]*@")
"""An address with a user, and maybe a password."""
VARIABLES = re.compile(r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
SHORTEST = 12
"""Characters of such a variable's value below which it may be a word like any other."""
MEND = (
    "a recipe is kept in the run folder: set it in the environment (a judge's key: name its "
    "variable in api_key_env)"
)


def wrong_secret(recipe: Mapping[str, Any]) -> str | None:
    """Where a recipe holds what looks like a secret, and the mend; never repeats it.

    By the name of its key, by the form of the value, or since an environment variable that is
    called a key, token, secret or password holds the same.
    """
    own = {
        value: name
        for name, value in os.environ.items()
        if VARIABLES.fullmatch(name) and len(value) >= SHORTEST
    }
    for where, key, value in _values(recipe, ""):
        if key is not None and KEYS.fullmatch(key) and value not in ("", "none"):
            return f"{where} would hold a secret: {MEND}"
        if SECRETS.search(value):
            return f"{where} holds what looks like a key: {MEND}"
        if ADDRESS.search(value):
            return f"{where} holds an address with a user or password: {MEND}"
        if (name := next((own[one] for one in own if one in value), None)) is not None:
            return f"{where} holds the value of the environment variable {name}: {MEND}"
    return None


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
