"""What the system knows of a process and of those that it started."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

WAIT = 120.0
"""Seconds after which a test that waits fails; a busy machine takes a while to import torch."""
TICK = os.sysconf("SC_CLK_TCK")


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
        """Processor time that it took; 0 where it is gone."""
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
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
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
    until = time.monotonic() + seconds
    while left := {process for process in processes if process.lives}:
        if time.monotonic() > until:
            return left
        time.sleep(0.02)
    return set()
