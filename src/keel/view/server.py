"""Where the pages are served, and who may ask for them. Torch-free."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence

from keel.types import KeelError

TOKEN = "KEEL_TOKEN"
"""The environment variable of a token that stays the same from start to start."""
MAX_UNOPENED = 64
"""Pages that wait for their browser at most: each holds some 300 kB, for a minute."""


def require_nicegui(command: str, instead: str = "") -> None:
    """Raises KeelError if NiceGUI is not installed; `instead` names another way."""
    if importlib.util.find_spec("nicegui") is None:
        raise KeelError(f"{command} needs NiceGUI: pip install 'keel-rl[view]'{instead}")


def serve_pages(
    command: str,
    start: str,
    *,
    host: str,
    port: int | None,
    browser: bool,
    announce: Callable[[str], None],
    others: Sequence[str] = (),
) -> None:
    """Serve the pages that were defined until interrupted; `start` and `others` are announced.

    `port` None takes 8765, or a free one if that is taken. On another host than the loopback a
    token is needed, which the announced addresses hold: a new one, or that of `KEEL_TOKEN`.

    Raises KeelError if the address is taken.
    """
    from nicegui import app, ui

    from keel.view.guard import LOOPBACK, Guard

    local = host in LOOPBACK
    token = None if local else _token()
    hosts = LOOPBACK if local else None
    app.add_middleware(Guard, hosts=hosts, token=token, before=forget_unopened)
    named = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        named = socket.gethostname()
    query = "" if token is None else f"?token={token}"
    with listen(host, port) as listener:
        port = int(listener.getsockname()[1])
        url = f"http://{named}:{port}"

        def ready() -> None:
            announce(f"{command}: {url}{start}{query} (Ctrl-C stops it)")
            for path in others:
                announce(f"{path.strip('/')}: {url}{path}{query}")

        app.on_startup(ready)
        ui.run(
            host=host,
            port=port,
            fd=listener.fileno(),
            title="Keel",
            favicon="📈",
            dark=None,
            reload=False,
            show=f"{start}{query}" if browser else False,
            show_welcome_message=False,
        )


def forget_unopened() -> None:
    """Delete the oldest pages to which no browser is connected, all but `MAX_UNOPENED`."""
    from nicegui import Client

    waiting = [one for one in Client.instances.values() if not one.has_socket_connection]
    for client in waiting[:-MAX_UNOPENED]:
        client.delete()


def _token() -> str:
    given = os.environ.get(TOKEN)
    if given is not None and not re.fullmatch("[A-Za-z0-9_-]{16,}", given):
        raise KeelError(f"{TOKEN}: use 16 or more letters, digits, - and _, or unset it")
    return given or secrets.token_urlsafe(24)


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
