"""Commands of Keel in processes of their own, several at a time."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from keel.platform.process import Child, python_environment, python_module

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended: its exit status (negative: the signal that killed it), the last line of
    its errors, and its peak memory in bytes."""

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
        """Run `keel ARGUMENTS` with the environment of now, and wait for its end."""
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self.stopped.is_set():
                    return CommandEnd(-signal.SIGTERM, "stopped")
                command = python_module("keel", *arguments)
                environment = python_environment(**self._threads)
                child = Child(command, environment=environment, stderr=errors)
                self._running.add(child)
            _, status, used = os.wait4(child.pid, 0)
            with self._lock:
                self._running.discard(child)
            child.process.returncode = os.waitstatus_to_exitcode(status)
            child.end()
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
        last_line = lines[-1] if lines else ""
        return CommandEnd(child.process.returncode, last_line, used.ru_maxrss * 1024)

    def stop(self) -> None:
        """Ask all to stop, which makes them write a checkpoint; not for a signal handler."""
        self.stopped.set()
        with self._lock:
            for child in self._running:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(child.pid, signal.SIGTERM)
