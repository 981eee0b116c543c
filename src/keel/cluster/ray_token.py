"""What Ray reads from the environment when it is imported."""

from __future__ import annotations

import os
import secrets
import sys


def before_import(address: str) -> None:
    """Call it before Ray is imported, with the address of `cluster.ray`.

    A Ray on this machine listens on all its interfaces, so it gets a token of its own, without
    which no call is answered, unless the program that calls Keel has imported Ray already.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # they do the work, and yield to nothing
    if address == "local" and "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
