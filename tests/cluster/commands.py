"""The command `keel` in processes of its own, and the processes that Ray has started for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.durability.processes import Keel
from tests.platform.processes import descendants

Running = Keel | subprocess.Popen[str]

WAIT = 300.0
"""Seconds: Ray alone takes 15 to start, and each of its processes imports torch."""
WORDS = (
    "threads=1",
    "checkpoints.every=2",
    "cluster.ray=local",
    "cluster.rollout_workers=2",
    "cluster.reward_workers=1",
)
AHEAD = ("rollout.async_level=2", "algorithm.corrections.kind=truncate")


def keel(*words: str | Path) -> subprocess.Popen[str]:
    """A command of Keel in a session of its own, so that all of it can be ended."""
    return subprocess.Popen(
        [sys.executable, "-m", "keel", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(run: Running, seconds: float = WAIT) -> str:
    """Wait for the end of a run that is to be without error; what it printed."""
    printed = run.communicate(timeout=seconds)[1]
    assert run.returncode == 0, printed
    return printed


def steps(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def until_step(run: Running, folder: Path, step: int) -> None:
    end = time.monotonic() + WAIT
    while steps(folder) < step:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def workers(kind: str, run: int) -> list[int]:
    """The processes of Ray of one kind, as `RolloutHost`, that a run has started."""
    return sorted(one.pid for one in descendants(run) if one.command.startswith(f"ray::{kind}"))


def kill(run: Running, kind: str, number: int = 0) -> int:
    """Kill a process of a kind as soon as there is one; its id."""
    end = time.monotonic() + WAIT
    while len(found := workers(kind, run.pid)) <= number:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(found[number], signal.SIGKILL)
    return found[number]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
