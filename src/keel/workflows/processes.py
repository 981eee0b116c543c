"""Commands of Keel in processes forked from a server that has torch and transformers loaded.

Loading them takes several seconds of a core, more than a short run of a small model. As with every
process of `multiprocessing`, a script that starts one needs `if __name__ == "__main__":`.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

PRELOADED = ["keel.training.run", "keel.training.export", "keel.models.loading"]
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended: its exit status (negative: the signal that killed it), the last line of
    its errors, and its peak memory in bytes (0 if it was killed)."""

    code: int
    last_line: str = ""
    peak_bytes: int = 0


class Children:
    """Processes that end with the caller's work, each of some threads."""

    def __init__(self, threads: int = 1) -> None:
        self.stopped = threading.Event()
        self._threads = str(threads)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._running: set[ForkServerProcess] = set()
        self._lock = threading.Lock()

    def run(self, arguments: Sequence[str]) -> CommandEnd:
        """Run `keel ARGUMENTS` with the environment of now, and wait for its end."""
        ours, theirs = self._context.Pipe(duplex=False)
        with ours:
            with self._lock, theirs, _server_settings(self._threads):
                if self.stopped.is_set():
                    return CommandEnd(-signal.SIGTERM, "stopped")
                process = self._context.Process(
                    target=keel, args=(list(arguments), dict(os.environ), theirs)
                )
                try:
                    process.start()
                except (OSError, EOFError) as error:
                    return CommandEnd(1, f"cannot start a process: {error}")
                self._running.add(process)
            try:
                line, peak = json.loads(ours.recv_bytes())  # text: no pickle of a child is read
            except EOFError:
                line, peak = "", 0
        process.join()
        with self._lock:
            self._running.discard(process)
        return CommandEnd(process.exitcode or 0, line, peak)

    def stop(self) -> None:
        """Ask all to stop, which makes them write a checkpoint; not for a signal handler."""
        self.stopped.set()
        with self._lock:
            for process in self._running:
                process.terminate()


@contextmanager
def _server_settings(threads: str) -> Iterator[None]:
    """What the server inherits if the block starts it: the number of threads, which libraries
    read as they are loaded, and a blocked SIGINT, since Ctrl-C ends a server that still loads."""
    before = {name: os.environ.get(name) for name in THREADS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(dict.fromkeys(THREADS, threads))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def keel(arguments: list[str], environment: dict[str, str], report: Connection) -> None:
    """Be `python -m keel` in this process, silent; report the last line of errors and the peak."""
    os.setsid()  # Ctrl-C goes to the caller, who ends its children in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
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
        atexit._run_exitfuncs()  # multiprocessing ends a process without them
        sys.stderr.flush()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report.send_bytes(json.dumps([lines[-1] if lines else "", peak]).encode())
    sys.exit(code)  # type: ignore[arg-type]


def _end_with_parent() -> None:
    """Stop at a checkpoint if the caller was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
