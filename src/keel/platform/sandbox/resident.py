"""A process that lives in the sandbox: JSON lines in, JSON lines out, until it is ended.

Its limits are those of `bubblewrap`. It has more than the code under test: memory,
time, and a filter of system calls, with which it confines the processes that it forks for what a
model wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from keel.platform.lifeline import Lifeline
from keel.platform.sandbox.bubblewrap import bubblewrap, environment, no_sandbox, passing_uid, walls
from keel.platform.sandbox.seccomp import computing_filter, seccomp_filter
from keel.platform.sandbox.subprocesses import Pipes, kill
from keel.types import KeelError

PROCESSES = 4
"""Itself, the first of the process space, and the process of one answer; one to spare."""
DISK_MB = 16
"""Of its private folder, which libraries keep their caches in."""
LIBRARY = "/keel"
"""Where the process finds the modules that it is made of."""
HERE = Path(__file__).parent
COMMON = {
    # In place of the package's own, which is the front of what is not in the sandbox.
    "keel/__init__.py": HERE / "__init__.py",
    "keel/platform/__init__.py": HERE / "__init__.py",
    "keel/platform/sandbox/__init__.py": HERE / "__init__.py",
    "keel/platform/sandbox/confined.py": HERE / "confined.py",
    "keel/platform/sandbox/inside.py": HERE / "inside.py",
}
"""Files of each such process; it runs `keel.platform.sandbox.confined.serve`."""


class Resident:
    """`python -m module`, in a sandbox; `modules` are the files that it is made of, by name.

    The process reads its settings from the first line, and answers each further line with one on
    the file descriptor `replies`. From one thread at a time. It ends with this process, however
    that ends. Raises KeelError where bubblewrap or a filter of system calls is missing.
    """

    def __init__(self, module: str, modules: Mapping[str, Path], site: Path | None) -> None:
        outer, inner = seccomp_filter(), computing_filter()
        command = bubblewrap()
        if inner is None:
            raise KeelError(
                f"there is no filter of system calls for {os.uname().machine}, and what a model "
                "wrote is not evaluated without one: use an x86_64 or aarch64 machine"
            )
        self._held = contextlib.ExitStack()
        uid = self._held.enter_context(passing_uid()) if os.geteuid() == 0 else None
        pipes = Pipes.open(sandboxed=True, filter=outer)
        pipes.lifeline = Lifeline()
        files = {f"{LIBRARY}/{name}": path for name, path in {**COMMON, **modules}.items()}
        path = [LIBRARY]
        if site is not None:
            files[str(site)] = site
            path.append(str(site))
        self._errors = self._held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [
                    *(command, *walls(uid is not None, pipes, DISK_MB, files)),
                    *(sys.executable, "-P", "-s", "-m", module),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=pipes.given(),
                env={**environment("/tmp"), "PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,  # Ctrl-C is for the run, which ends this process itself
                bufsize=0,
            )
            # Before it is asked anything: until then it ends with its standard input.
            pipes.lifeline.tie(self._process.pid)
        except BaseException:
            pipes.close()
            self._held.close()
            raise
        finally:
            report = pipes.report
            pipes.give()
        self._replies: queue.Queue[bytes] = queue.Queue()
        replies = os.fdopen(os.dup(pipes.reading), "rb")
        threading.Thread(
            target=_read, args=(replies, self._replies), name="resident", daemon=True
        ).start()
        self.end = weakref.finalize(self, _end, os.getpid(), self._process, pipes, self._held)
        self._send({"replies": report, "uid": uid, "processes": PROCESSES, "filter": inner.hex()})

    @property
    def pid(self) -> int:
        """The process that watches over the sandbox."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether it has ended."""
        return not self.end.alive or self._process.poll() is not None

    def ask(self, seconds: float, request: Mapping[str, Any]) -> Any:
        """The reply to a request.

        Raises TimeoutError where none comes in time, and ends the process; ChildProcessError
        where it ended by itself or was ended from outside.
        """
        try:
            self._send(request)
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            self.end()
            raise TimeoutError from None
        except BaseException:
            self.end()  # interrupted in between: the reply would answer the next request
            raise
        if not line:
            self.end()
            raise ChildProcessError("a process in the sandbox has ended")
        return json.loads(line)

    def first(self, seconds: float, request: Mapping[str, Any]) -> Any:
        """The reply to the first request. Raises KeelError where the process does not start."""
        errors = os.fdopen(os.dup(self._errors.fileno()), "rb")
        with errors:
            try:
                return self.ask(seconds, request)
            except (TimeoutError, ChildProcessError):
                errors.seek(0)
                message = errors.read().decode(errors="replace").strip().rpartition("\n")[2][-200:]
                status = self._process.returncode
                if message.startswith("bwrap"):
                    raise no_sandbox(message, status) from None
                cause = message or f"exit status {status}"
                raise KeelError(f"a process in the sandbox does not start ({cause})") from None

    def _send(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        rest = memoryview(json.dumps(what).encode() + b"\n")
        # It has ended, which the reply tells; or another thread has ended it (ValueError).
        with contextlib.suppress(BrokenPipeError, ValueError):
            while rest:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]


class Restarting:
    """A `Resident` that starts when first asked, and again after it has ended.

    Safe to use from any thread: calls wait for each other.
    """

    def __init__(self, start: Callable[[], Resident]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._closed = False
        self._abandoned = 0
        self.resident: Resident | None = None

    def ask(self, seconds: float, request: Mapping[str, Any]) -> Any:
        """The reply to a request.

        Raises TimeoutError where none comes in time, and KeelError where the process ends twice
        at the request (killed from outside, or for want of memory), or is closed or abandoned.
        """
        abandoned = self._abandoned
        with self._lock:
            for _ in range(2):
                if abandoned != self._abandoned:
                    raise KeelError("the request to a process in the sandbox was abandoned")
                if self.resident is not None and self.resident.ended():
                    self.resident.end()
                    self.resident = None
                self._refuse_closed()
                if self.resident is None:
                    self.resident = self._start()
                self._refuse_closed()
                with contextlib.suppress(ChildProcessError):
                    return self.resident.ask(seconds, request)
        raise KeelError("a process in the sandbox was killed twice: is the machine out of memory?")

    def abandon(self) -> None:
        """End the process, and requests that other threads have made with a KeelError."""
        self._abandoned += 1
        if self.resident is not None:
            self.resident.end()

    def close(self) -> None:
        """End the process. A call that another thread has made ends with a KeelError."""
        self._closed = True
        self.abandon()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise KeelError("the process in the sandbox is closed")


def _read(replies: IO[bytes], lines: queue.Queue[bytes]) -> None:
    with replies:
        for line in replies:
            lines.put(line)
    lines.put(b"")  # the process has ended


def _end(
    owner: int, process: subprocess.Popen[bytes], pipes: Pipes, held: contextlib.ExitStack
) -> None:
    if os.getpid() != owner:
        return  # a fork of this process owns nothing
    try:
        kill(process, pipes)
        process.wait()
    finally:
        pipes.close()
        assert process.stdin is not None
        process.stdin.close()
        held.close()
