"""Commands in child processes: real runs, ended in every way a process can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from keel.runs.reader import load
from keel.workflows.processes import Children, CommandEnd
from tests.cluster.commands import steps
from tests.platform.processes import eventually

pytestmark = pytest.mark.slow


def in_thread(children: Children, *words: str) -> Callable[[], CommandEnd]:
    """Start a command; the result waits for its end."""
    found: list[CommandEnd] = []
    thread = threading.Thread(target=lambda: found.append(children.run(words)))
    thread.start()

    def wait() -> CommandEnd:
        thread.join(120)
        return found[0]

    return wait


def a_long_run(children: Children, folder: Path) -> Callable[[], CommandEnd]:
    """A run that has taken its first step."""
    never = ("evaluation.every=100000", "checkpoints.every=100000")
    words = ("tiny", "steps=100000", *never, "--quiet", "--run", str(folder))
    wait = in_thread(children, "train", *words)
    assert eventually(lambda: steps(folder) > 0, 120)
    return wait


def test_failed_command_is_reported_with_its_last_line(capfd: pytest.CaptureFixture) -> None:
    ended = Children().run(["train", "no-such-recipe", "--quiet"])
    assert ended.code == 2
    assert ended.last_line.startswith("keel: error: ")
    assert "no-such-recipe" in ended.last_line
    assert ended.peak_bytes > 50e6
    assert capfd.readouterr() == ("", "")


def test_killed_command_is_reported_with_its_signal(tmp_path: Path) -> None:
    children = Children()
    wait = a_long_run(children, tmp_path / "run")
    (child,) = children._running
    os.kill(child.pid, signal.SIGKILL)
    assert wait().code == -signal.SIGKILL


def test_killed_caller_leaves_a_checkpoint_and_no_memory_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    never = ("evaluation.every=100000", "checkpoints.every=100000")
    words = ["train", "tiny", "steps=100000", *never, "--quiet", "--run", str(folder)]
    script = (
        "from keel.workflows.processes import Children\n"
        "large = b'1' * 10**9\n"
        "assert Children().run(['recipes']).peak_bytes < 8e8\n"
        f"Children().run({words!r})\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as caller:
        assert eventually(lambda: steps(folder) > 0, 120)
        caller.kill()
    assert eventually(lambda: load(folder).checkpoints() != [], 120)


def test_stopped_children_leave_a_checkpoint_and_no_other_starts(tmp_path: Path) -> None:
    children = Children()
    wait = a_long_run(children, tmp_path / "run")
    children.stop()
    assert wait().code != 0
    assert load(tmp_path / "run").checkpoints()
    assert children.run(["recipes"]) == CommandEnd(-signal.SIGTERM, "stopped")
