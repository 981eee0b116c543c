"""Runs in a real notebook kernel: what cells show, and what an interrupt leaves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

import keel
from tests.shared import ROOT
from tests.soak.killing import differences
from tests.training.test_live import arguments
from tests.view.test_report import Elements

pytestmark = [
    pytest.mark.slow,
    # jupyter_client leaves event loops and sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LONG = 120
"""Seconds that no cell takes."""
SETUP = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import keel
from tests.training.test_live import arguments, first, length

class Slow:
    def on_step(self, state):
        if state.step >= 2:
            time.sleep(self.seconds)

    def __init__(self, seconds):
        self.seconds = seconds
"""


class Session:
    """A kernel, as a notebook uses it."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str) -> list[dict[str, Any]]:
        """The messages of a cell but for its state, in order."""
        messages: list[dict[str, Any]] = []
        self.client.execute_interactive(code, timeout=LONG, output_hook=messages.append)
        return [one for one in messages if one["msg_type"] not in ("status", "execute_input")]

    def interrupt(self, when: Path, times: int) -> threading.Thread:
        """Interrupt the cell that runs, once a file has two lines."""

        def wait() -> None:
            end = time.monotonic() + LONG
            while time.monotonic() < end:
                if when.is_file() and when.read_bytes().count(b"\n") >= 1:
                    break
                time.sleep(0.05)
            time.sleep(0.5)  # so that it is in the slow step
            for _ in range(times):
                os.kill(self.manager.provisioner.pid, signal.SIGINT)  # as Jupyter does
                time.sleep(0.6)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    manager = KernelManager()
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LONG)
    made = Session(manager, client)
    try:
        errors = [one for one in made.run(SETUP) if one["msg_type"] == "error"]
        assert errors == []
        yield made
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_cell_shows_one_display_and_the_run(session: Session, tmp_path: Path) -> None:
    code = f"run = keel.train(folder={str(tmp_path / 'run')!r}, **arguments(progress=True))"
    found = session.run(code)
    kinds = [one["msg_type"] for one in found]
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) == {"update_display_data"}, kinds
    last = found[-1]["content"]["data"]
    assert "rl  ████████████████████████ 4/4" in last["text/plain"]
    assert "validation greedy reward" in last["text/html"]
    (result,) = session.run("run")
    shown = Elements()
    shown.feed(result["content"]["data"]["text/html"])
    assert {"svg", "table", "pre"} <= shown.names
    assert result["content"]["data"]["text/plain"].startswith("TrainedRun(")
    assert "\n" not in result["content"]["data"]["text/plain"]
    (figure,) = session.run("run.plot('reward')")
    assert "data:image/png" in figure["content"]["data"]["text/html"]
    assert session.run("keel.load(run).plot('reward');") == []


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_cell_leaves_a_run_that_goes_on(
    session: Session, times: int, tmp_path: Path
) -> None:
    """A second interrupt ends the cell at once, not the kernel with its variables."""
    given = f"checkpoints={{'every': 1}}, callbacks=Slow({3 if times == 1 else 60})"
    waiting = session.interrupt(tmp_path / "run/metrics.jsonl", times)
    found = session.run(
        f"keel.train(folder={str(tmp_path / 'run')!r}, **arguments({given}, progress=False))"
    )
    waiting.join()
    error = found[-1]["content"]
    assert error["ename"] == ("Interrupted" if times == 1 else "KeyboardInterrupt"), error
    assert keel.load(tmp_path / "run").state() == "interrupted"
    code = f"keel.load({str(tmp_path / 'run')!r}, [first, length]).continue_(progress=False)"
    (result,) = session.run(f"{code}.state()")
    assert result["content"]["data"]["text/plain"] == "'finished'"
    keel.train(folder=tmp_path / "whole", **arguments(checkpoints={"every": 1}))
    assert differences(tmp_path / "whole", tmp_path / "run") == []
