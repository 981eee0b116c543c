"""A server of `keel prefs annotate`, and an annotator's browser tab, for tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.preferences.records import Record
from tests.preferences import made
from tests.view.chromium import free_port

MODEL = "secret-model"
"""In the name of every model of the pairs: no page may hold it."""
SHORTEST = 0.35
"""Seconds after which a key on a new pair counts."""

PRESS = """(keys) => keys.forEach((key) =>
    document.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true})))"""
"""Presses keys one right after the other."""


def pair(number: int, texts: Sequence[str] = ("alpha", "beta"), prompt: str = "") -> list[Record]:
    """A question, two answers by named models, and their pair p0, p1, ..."""
    models = (f"{MODEL}-0", f"{MODEL}-1")
    return made.pair(number, 0, texts, models, prompt or f"question {number}", by=MODEL)


class Server:
    """The command in a process of its own, which can be killed and started again."""

    def __init__(self, store: Path, *options: str, token: str | None = None) -> None:
        self.port = free_port()
        self.store, self.options, self.token = store, options, token
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "keel", "prefs", "annotate", str(self.store)]
        command += ["--no-browser", "--port", str(self.port), *self.options]
        # NiceGUI serves its own tests differently.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        environment |= {} if self.token is None else {"KEEL_TOKEN": self.token}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(2)]
        found = [re.search(r"http://\S+", line) for line in lines]
        assert all(found), lines
        self.printed = [match[0] for match in found if match]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill(self) -> None:
        """SIGKILL: nothing is written, no connection is closed in order."""
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()


class Annotator:
    """A person at a page: presses keys once a pair can have been seen."""

    def __init__(self, page: Any, url: str, name: str) -> None:
        self.page, self.url, self.name = page, url, name
        self.open()

    def open(self) -> None:
        self.page.goto(f"{self.url}/?annotator={self.name}")
        self.see()

    def part(self, name: str) -> Any:
        return self.page.locator(f"[data-testid={name}]")

    @property
    def question(self) -> str:
        """The prompt that is shown; empty where no pair is left."""
        prompt = self.part("prompt")
        return str(prompt.inner_text()) if prompt.count() else ""

    def see(self) -> str:
        """Wait for a pair, or for the end; the prompt."""
        self.page.locator("[data-testid=prompt], [data-testid=finished]").first.wait_for()
        self.since = time.monotonic()
        return self.question

    def ready(self) -> None:
        """Wait until a key counts."""
        time.sleep(max(0.0, self.since + SHORTEST - time.monotonic()))

    def press(self, *keys: str) -> str:
        """Press keys on the pair, wait for the next; the prompt of the one that was labelled."""
        self.ready()
        before = self.question
        if len(keys) == 1:
            self.page.keyboard.press(keys[0])
        else:  # faster than any answer of the server
            self.page.evaluate(PRESS, list(keys))
        self.page.wait_for_function(
            "(before) => (document.querySelector('[data-testid=prompt]')?.innerText ?? '')"
            " !== before",
            arg=before,
        )
        self.see()
        return before
