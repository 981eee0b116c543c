"""Commands of Keel in processes forked from a server that has torch and transformers loaded.

Loading them takes several seconds of a core, more than a short run of a small model.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

PRELOADED = ["keel.training.run", "keel.training.export", "keel.models.loading"]


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended: its exit status (negative: the signal that killed it), the last line of
    its errors, and its peak memory in bytes (0 where it was killed)."""

    code: int
    last_line: str = ""
    peak_bytes: int = 0


class Children:
    """Processes that end with the caller's work."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._running: set[ForkServerProcess] = set()
        self._lock = threading.Lock()

    def run(self, arguments: Sequence[str]) -> CommandEnd:
        """Run a command of Keel, as `python -m keel` does, and wait for its end."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=keel, args=(list(arguments), theirs))
        with self._lock, theirs:
            if self.stopped.is_set():
                return CommandEnd(-signal.SIGTERM, "stopped")
            process.start()
            self._running.add(process)
        with ours:
            try:
                line, peak = ours.recv()
            except EOFError:
                line, peak = "", 0
        process.join()
        with self._lock:
            self._running.discard(process)
        return CommandEnd(process.exitcode or 0, line, peak)

    def stop(self) -> None:
        """Ask all to stop, which makes them write a checkpoint."""
        with self._lock:
            self.stopped.set()
            for process in self._running:
                process.terminate()


def keel(arguments: list[str], report: Connection) -> None:
    """Be `python -m keel` in this process, silent; report the last line of errors and the peak."""
    os.setsid()  # Ctrl-C goes to the caller, who ends its children in order
    sys.argv = ["keel", *arguments]
    code: object = 1
    with tempfile.TemporaryFile() as errors, open(os.devnull, "rb+", buffering=0) as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        try:
            runpy.run_module("keel", run_name="__main__")
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report.send((lines[-1] if lines else "", peak))
    sys.exit(code)  # type: ignore[arg-type]
