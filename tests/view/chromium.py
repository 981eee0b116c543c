"""Debian's Chromium, headless, and tabs that may reach their server alone."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and "KEEL_REQUIRE_SHARED" not in os.environ,
    reason="there is no Chromium (apt install chromium, or set CHROMIUM)",
)
WAIT = 60_000
"""Milliseconds for which a page may take to show something: the machine may be busy."""
sync_api.expect.set_options(timeout=WAIT)


def launch(playwright: Any, *arguments: str) -> Any:
    """A browser."""
    return playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *arguments])


@contextmanager
def tab(browser: Any, url: str, width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A tab that logs no error and asks no address but those of the server at `url`."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(WAIT)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)

    def stays(request: Any) -> None:
        if not request.url.startswith((url, "data:", "blob:")):
            problems.append(f"left the machine: {request.url}")

    page.on("request", stays)
    yield page
    page.close()
    assert problems == []


def free_port() -> int:
    """A port that no one listens on, and that the system gives to no one who asks for any."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
