"""One process of a sandbox: its orders sent, its output read up to a limit, its time kept."""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import secrets
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from keel.platform.process import Child, has_ended, kill_group

START_SECONDS = 120.0
"""A process that has not reported its start by then is given up; a busy machine takes a while."""
REPORT_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Watched:
    """How a process ended, and what came of it; nothing else counts if it has not `started`."""

    ended: Literal["ended", "timeout", "output"]
    started: bool
    exit_status: int
    stdout: bytes
    stderr: bytes
    report: bytes


def watch(
    command: Sequence[str],
    orders: Mapping[str, Any],
    *,
    timeout: float,
    output: int,
    environment: Mapping[str, str],
    folder: str | None,
    ends: Sequence[int] = (),
    stop: threading.Event | None = None,
    kill: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Watched:
    """Run a command, give it orders, and wait for its end; kill all of it at a limit.

    The orders are marshalled to its standard input, with three more: `report`, the file descriptor
    that it reports to; `started`, the first line of its report, which begins its `timeout` seconds;
    and its `lifeline`. More than `output` bytes on standard output and error together end it, and
    so does `stop`, once it is set, as if the time were up. It is given `ends`, which are closed
    here, and killed by `kill`.
    """
    started = secrets.token_hex(16)
    reading, report = os.pipe()
    pipe = subprocess.PIPE
    try:
        child = Child(
            command,
            environment=environment,
            folder=folder,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            ends=(report, *ends),
            kill=kill,
        )
        try:
            own = {"report": report, "started": started, "lifeline": child.lifeline}
            given = marshal.dumps({**own, **orders})
            return _Watcher(child, given, reading, started, timeout, output, stop).wait()
        finally:
            child.end()
    finally:
        os.close(reading)


class _Watcher:
    def __init__(
        self,
        child: Child,
        given: bytes,
        reading: int,
        started: str,
        timeout: float,
        output: int,
        stop: threading.Event | None,
    ) -> None:
        process = child.process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.child, self.process, self.given, self.stop = child, process, memoryview(given), stop
        self.started, self.timeout, self.output = f"{started}\n".encode(), timeout, output
        self.out, self.err = process.stdout.fileno(), process.stderr.fileno()
        self.into, self.inner = process.stdin.fileno(), reading
        self.read = {self.out: b"", self.err: b"", self.inner: b""}

    def wait(self) -> Watched:
        """Serve the pipes until all are closed, or a limit is passed."""
        ended: Literal["ended", "timeout", "output"] = "ended"
        has_started = False
        deadline = time.monotonic() + START_SECONDS
        with selectors.DefaultSelector() as selector:
            for pipe in self.read:
                selector.register(pipe, selectors.EVENT_READ)
            os.set_blocking(self.into, False)
            selector.register(self.into, selectors.EVENT_WRITE)
            while len(selector.get_map()) > 0:
                left = deadline - time.monotonic()
                if left <= 0 or (self.stop is not None and self.stop.is_set()):
                    ended = "timeout"
                    break
                ready = selector.select(min(left, 0.2))
                for key, _ in ready:
                    if not self._serve(key.fd):
                        selector.unregister(key.fd)
                if not has_started and self.read[self.inner].startswith(self.started):
                    has_started = True
                    deadline = time.monotonic() + self.timeout
                if len(self.read[self.out]) + len(self.read[self.err]) > self.output:
                    ended = "output"
                    break
                if not ready and has_ended(self.process):
                    break  # what it left behind holds the pipes
        self.child.end()
        return Watched(
            ended,
            has_started,
            self.process.returncode,
            self.read[self.out],
            self.read[self.err],
            self.read[self.inner][len(self.started) :],
        )

    def _serve(self, pipe: int) -> bool:
        """Read or write what can be; false if the pipe is done with."""
        if pipe == self.into:
            with contextlib.suppress(BrokenPipeError):
                self.given = self.given[os.write(pipe, self.given[:65536]) :]
                if self.given:
                    return True
            assert self.process.stdin is not None
            self.process.stdin.close()
            return False
        some = os.read(pipe, 65536)
        self.read[pipe] += some
        return bool(some) and len(self.read[self.inner]) <= REPORT_BYTES


class Enclosure:
    """What bubblewrap reads and says on pipes of its own, until `close`.

    It reads its `filter` of system calls there (-1 without one), and says on `info` which process
    it watches over. `ends` are what it is given.
    """

    def __init__(self, filter: bytes | None) -> None:
        self.listening, self.info = os.pipe()
        # Should this process end before bubblewrap has signalled, bubblewrap would end of that, and
        # leave behind a process that waits for it for good; so it has the other end too.
        self.ends = [self.info, os.dup(self.listening)]
        self.filter = -1
        if filter is not None:
            self.filter, filling = os.pipe()
            os.write(filling, filter)  # far smaller than a pipe
            os.close(filling)
            self.ends.append(self.filter)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End all by the sandbox's first process: bubblewrap ends with it, and reaps it."""
        os.set_blocking(self.listening, False)
        try:
            info = json.loads(os.read(self.listening, 4096))
        except (BlockingIOError, ValueError):  # there is none yet
            return kill_group(process)
        if not has_ended(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(info["child-pid"], signal.SIGKILL)
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            kill_group(process)

    def close(self) -> None:
        os.close(self.listening)
