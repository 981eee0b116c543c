"""Commands of Keel in processes of their own, several at a time."""

from __future__ import annotations

import os
import runpy
import signal
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from keel.platform.process import Child, python_environment, python_module
from keel.platform.signals import resident_memory

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended: its exit status (negative: the signal that killed it), the last line of
    its errors, and its peak memory in bytes (0 if it was killed)."""

    code: int
    last_line: str = ""
    peak_bytes: int = 0


class Children:
    """Processes that end with the caller's, each of some threads."""

    def __init__(self, threads: int = 1) -> None:
        self.stopped = threading.Event()
        self._threads = dict.fromkeys(THREADS, str(threads))
        self._running: set[Child] = set()
        self._lock = threading.Lock()

    def run(self, arguments: Sequence[str]) -> CommandEnd:
        """Run `keel ARGUMENTS` with the environment of now, and wait for its end.

        If the caller is killed, the command gets SIGTERM, so that a run writes a checkpoint.
        """
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as peak:
            with self._lock:
                if self.stopped.is_set():
                    return CommandEnd(-signal.SIGTERM, "stopped")
                child = Child(
                    python_module(__name__, *arguments),
                    environment=python_environment(**self._threads),
                    stdin=peak,
                    stderr=errors,
                    by=signal.SIGTERM,
                )
                self._running.add(child)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                self._running.discard(child)
            child.end()
            errors.seek(0)
            peak.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            peak_bytes = int(peak.read() or b"0")
        last_line = lines[-1] if lines else ""
        return CommandEnd(child.process.returncode, last_line, peak_bytes)

    def stop(self) -> None:
        """Ask all to stop, which makes them write a checkpoint; not for a signal handler."""
        self.stopped.set()
        with self._lock:
            for child in self._running:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(child.pid, signal.SIGTERM)


if __name__ == "__main__":
    # What the kernel says of a process that has ended includes its parent's memory.
    report = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        runpy.run_module("keel", run_name="__main__")
    finally:
        os.write(report, str(resident_memory("VmHWM") or 0).encode())
