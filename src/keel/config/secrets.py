"""What must not stand in a recipe, since a recipe is written into the run folder. Torch-free."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


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
