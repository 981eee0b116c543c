"""Where a server listens, and who may ask it: this machine alone, or who has the token."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import socket
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from keel.types import KeelError

TOKEN = "KEEL_TOKEN"
"""The environment variable of a token that stays the same from start to start."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def token_for(host: str) -> tuple[str | None, tuple[str, ...] | None]:
    """The token that requests need and the names that they may give this machine (None: any).

    The loopback needs no token; another host a new one, or that of `KEEL_TOKEN`.
    """
    if host in LOOPBACK:
        return None, LOOPBACK
    given = os.environ.get(TOKEN)
    if given is not None and not re.fullmatch("[A-Za-z0-9_-]{16,}", given):
        raise KeelError(f"{TOKEN}: use 16 or more letters, digits, - and _, or unset it")
    return given or secrets.token_urlsafe(24), None


def shown_token(token: str) -> str:
    """The token as a command prints it: by the name of its variable if it came from there."""
    return f"${TOKEN}" if os.environ.get(TOKEN) == token else token


def url_of(host: str, port: int) -> str:
    """The address to show; of a server on all interfaces with the machine's name."""
    named = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{named}]:{port}" if ":" in named else f"http://{named}:{port}"


def listen(host: str, wanted: int | None) -> socket.socket:
    """A socket that listens on a port, which no other process can take from then on.

    Raises KeelError if the port is taken, or the host is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (8765, 0) if wanted is None else (wanted,):
        try:
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            why = str(error.strerror or error).partition(" (while")[0]
            if wanted is None and port != 0:
                continue
            raise KeelError(
                f"cannot serve on {host}:{port}: {why}: choose another --port or --host"
            ) from error
        # uvicorn takes a descriptor for one of AF_UNIX, for which asyncio does not set this.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    raise KeelError(f"no free port on {host}: name one with --port")


def wrong_host(headers: Mapping[str, str], hosts: Collection[str] | None) -> str | None:
    """Why a request may not ask, by its headers (names in lower case); None if it may.

    The `Host` must be one of `hosts`, against a foreign name that resolves to this machine (DNS
    rebinding); an `Origin` must be the host, and what browsers say that another site asks for must
    be a page of its own (a followed link), no image or frame of that site.
    """
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        origin = urlsplit(headers.get("origin", "")).netloc
    except ValueError:
        return "this server does not understand the request's host or origin"
    if hosts is not None and host not in hosts:
        return f"this server does not answer for the host {host!r}"
    of_others = headers.get("sec-fetch-site") == "cross-site"
    followed = headers.get("sec-fetch-dest") == "document"
    foreign = "origin" in headers and origin != headers.get("host")
    if foreign or (of_others and not followed):
        return "this server does not answer pages of other sites"
    return None


def fits(given: str, token: str | None) -> bool:
    """Whether it is the token, if one is needed; compared in constant time."""
    return token is None or hmac.compare_digest(given.encode(), token.encode())
