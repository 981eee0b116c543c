"""Two people label 48 pairs; a browser and the server are killed: each label is there once."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keel.preferences.store import PreferenceStore
from tests.preferences.made import taken
from tests.shared import needs_chromium
from tests.view.annotating import Annotator, Server, pair
from tests.view.chromium import WAIT, launch, sync_api

pytestmark = [pytest.mark.slow, needs_chromium]
PAIRS, BROWSER_KILL = 48, 12
SERVER_KILLS = {20: 0.0, 28: 0.02, 36: 0.2}
"""After how many labels the server is killed, and how many seconds after a key."""
KEYS = {"1": "left", "ArrowLeft": "left", "2": "right", "ArrowRight": "right", "t": "tie"}
Confirmed = dict[str, tuple[str, float]]
"""Of each question whose label the page confirmed: who labelled it, and with what value."""


class OwnBrowser:
    """A browser of its own, which can be killed as a whole."""

    def __init__(self, playwright: Any) -> None:
        self.mark = f"--keel-test={uuid.uuid4().hex}"
        self.browser = launch(playwright, self.mark)

    def tab(self) -> Any:
        page = self.browser.new_context().new_page()
        page.set_default_timeout(WAIT)
        return page

    def kill(self) -> int:
        """SIGKILL every process that was started with the mark; how many there were."""
        found = self._processes()
        for process in found:
            os.kill(process, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while self._processes():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return len(found)

    def _processes(self) -> list[int]:
        numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [number for number in numbers if self.mark.encode() in _command(number)]


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def value_of(one: Annotator, key: str) -> float:
    """P(the pair's first answer is better) that a key says of what is shown."""
    if KEYS[key] == "tie":
        return 0.5
    first = one.part("left").inner_text().startswith("first")
    return float(first == (KEYS[key] == "left"))


def label(one: Annotator, key: str, done: Confirmed) -> str:
    """Press a key, at times twice, and note what the page confirmed."""
    value = value_of(one, key)
    question = one.press(*[key] * (1 + len(done) % 2))
    assert question not in done, f"{question} was shown again"
    done[question] = (one.name, value)
    return question


def test_labels_survive_a_killed_browser_and_a_killed_server(tmp_path: Path) -> None:
    path, generator = tmp_path / "a.db", random.Random(0)
    with PreferenceStore(path, create=True) as store:
        texts = [(f"first {n}", f"second {n}") for n in range(PAIRS)]
        store.add(record for n in range(PAIRS) for record in pair(n, texts[n]))
    done: Confirmed = {}
    with (
        Server(path) as server,
        sync_api.sync_playwright() as playwright,
        PreferenceStore(path) as store,
    ):
        browsers = [OwnBrowser(playwright) for _ in range(2)]
        people = [
            Annotator(browser.tab(), server.url, name)
            for browser, name in zip(browsers, ("ann", "bob"), strict=True)
        ]
        turn, closed, kills = 0, False, dict(SERVER_KILLS)
        while any(one.question for one in people):
            one = people[turn % 2]
            turn += 1
            if not one.question:
                continue
            key = generator.choice(list(KEYS))
            if len(done) >= BROWSER_KILL and one.name == "bob" and not closed:
                question, left = one.question, one.part("left").inner_text()
                closed = browsers[1].kill() >= 1
                browsers[1] = OwnBrowser(playwright)
                one = people[1] = Annotator(browsers[1].tab(), server.url, "bob")
                assert (one.question, one.part("left").inner_text()) == (question, left)
            elif len(done) in kills:
                killed_server(server, people, key, kills.pop(len(done)), done, store)
                continue
            question = label(one, key, done)
            if len(done) % 16 == 7:  # take it back, and label it again
                assert one.press("u")
                assert one.question == question
                del done[question]
                label(one, key, done)
        for browser in browsers:
            browser.browser.close()
        assert closed
        assert kills == {}
        labels = list(store.labels())
        found = {f"question {one.pair[1:]}": (one.annotator, one.value) for one in labels}
        assert len(labels) == PAIRS
        assert set(Counter(one.pair for one in labels).values()) == {1}
        assert found == done
        assert min(Counter(one.annotator for one in labels).values()) > PAIRS / 4
        # The first pair after a start may be seen before its window is connected.
        assert all(one.seconds is not None and one.seconds < 60 for one in labels)
        assert sum(one.seconds > 0.3 for one in labels if one.seconds) > PAIRS - 12
        assert store.database.rows("PRAGMA integrity_check") == [("ok",)]
        assert taken(store)


def killed_server(
    server: Server,
    people: list[Annotator],
    key: str,
    after: float,
    done: Confirmed,
    store: PreferenceStore,
) -> None:
    """Kill the server right after a key, and start it again; the page goes on by itself."""
    one, other = people
    one.ready()
    question, value, waiting = one.question, value_of(one, key), other.question
    before = store.counts()["labels"]
    for page in (one.page, other.page):
        page.evaluate("window.stale = true")
    one.page.keyboard.press(key)
    time.sleep(after)
    server.kill()
    stored = store.counts()["labels"] - before
    assert stored in (0, 1)
    time.sleep(1.0)
    server.start()
    for page in (one.page, other.page):
        # The page reloads by itself once it reaches the server; its progress is the store's.
        page.wait_for_function("window.stale === undefined", timeout=3 * WAIT)
        page.wait_for_function(
            "(made) => document.querySelector('[data-testid=progress]')?.innerText"
            ".startsWith(made)",
            arg=f"{before + stored} of {PAIRS}",
        )
    assert (one.see() == question) == (stored == 0)
    assert other.see() == waiting
    if stored:
        done[question] = (one.name, value)
