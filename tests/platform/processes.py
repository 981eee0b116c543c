"""What the tests of processes ask of the system, and what they need of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.source_tree import ROOT

WAIT = 120.0
"""Seconds after which a test that waits fails; a busy machine takes a while to import torch."""
TICK = os.sysconf("SC_CLK_TCK")


def run_python(
    code: str, *words: str, check: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What Python makes of code in a process of its own, with these environment variables."""
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        timeout=WAIT,
        capture_output=True,
        text=True,
        check=check,
    )


@dataclass(frozen=True)
class Process:
    """A process; a number alone may be another's later."""

    pid: int
    started: int

    @property
    def lives(self) -> bool:
        """Whether it runs; one that ended and waits to be reaped does not."""
        found = look(self.pid)
        return found is not None and found[0] == self and found[1] != "Z"

    @property
    def seconds(self) -> float:
        """Processor time that it took; 0 if it is gone."""
        found = look(self.pid)
        return found[2] if found is not None and found[0] == self else 0.0

    @property
    def command(self) -> str:
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return ""


def look(pid: int) -> tuple[Process, str, float] | None:
    """A process, its state, and the processor time that it took."""
    try:
        # The name, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    seconds = (int(fields[11]) + int(fields[12])) / TICK
    return Process(pid, int(fields[19])), fields[0], seconds


def descendants(pid: int) -> set[Process]:
    """The processes that a process started, that these started, and so on."""
    found: set[Process] = set()
    for child in children(pid):
        seen = look(child)
        found |= ({seen[0]} if seen else set()) | descendants(child)
    return found


def end(processes: set[Process]) -> None:
    """Kill what a test that failed left behind."""
    for process in processes:
        if process.lives:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def gone(processes: set[Process], seconds: float = WAIT) -> set[Process]:
    """Wait until all have ended; those that did not."""
    eventually(lambda: not any(process.lives for process in processes), seconds)
    return {process for process in processes if process.lives}


def processes_with(word: str) -> list[int]:
    """The processes whose command line holds a word; those that ended and wait to be reaped not."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def children(pid: int | None = None) -> set[int]:
    """The processes that one started (this one, if none is given) and that were not reaped."""
    pid, found = pid or os.getpid(), set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def resident_mb() -> float:
    """The memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something comes to hold; a minute is far more than any kernel needs."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
