"""Debian's Chromium, headless, with tabs that may reach their server alone, and a server."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.shared import CHROMIUM

sync_api = pytest.importorskip("playwright.sync_api")
WAIT = 60_000
"""Milliseconds for which a page may take to show something: the machine may be busy."""
sync_api.expect.set_options(timeout=WAIT)
NAMELESS = """() => [...document.querySelectorAll('button, input, [role=slider], a')]
    .filter(e => e.offsetParent !== null && e.type !== 'hidden')
    .filter(e => !(e.innerText?.trim() || e.ariaLabel || e.title || e.labels?.length
        || e.getAttribute('aria-labelledby')))
    .map(e => e.outerHTML.slice(0, 200))"""
"""Controls that have no name for a screen reader."""


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


@dataclass(frozen=True)
class Served:
    folder: Path
    url: str


@contextmanager
def serve(folder: Path) -> Iterator[Served]:
    """A server of the runs in a folder."""
    command = [sys.executable, "-m", "keel", "view", str(folder), "--no-browser", "--port"]
    # NiceGUI serves its own tests differently.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    with subprocess.Popen(
        [*command, str(free_port())], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found is not None, line
        try:
            yield Served(folder, found[0])
        finally:
            server.terminate()


def part(page: Any, name: str) -> Any:
    """The part of a page that has the name as its test id."""
    return page.locator(f"[data-testid={name}]")
