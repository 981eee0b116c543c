"""What the tests of processes ask of the system, and what they need of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


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


def children() -> set[int]:
    """The processes that this one started and that were not reaped."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
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
