"""One process under watch: its input fed, its output read up to a limit, its time kept."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.platform.lifeline import Lifeline

START_SECONDS = 120.0
"""A process that has not reported its start by then is given up; a busy machine takes a while."""
REPORT_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Watched:
    """How a process ended, and what came of it; nothing else counts where it has not `started`."""

    ended: Literal["ended", "timeout", "output"]
    started: bool
    exit_status: int
    stdout: bytes
    stderr: bytes
    report: bytes


@dataclass(slots=True)
class Pipes:
    """The pipes other than the standard ones: what the command reports, and bubblewrap's own word.

    `info` is where bubblewrap says which process it watches over (−1 without bubblewrap), and
    `filter` where it reads its filter of system calls (−1 without one). `further` are the ends of
    pipes that the caller made; they too are the process's alone once it has started. Without
    bubblewrap, which ends with its parent and ends what it watches over, there is a lifeline. The
    process is given the ends `report`, `info`, `filter`, `further` and the lifeline's inner one.
    """

    reading: int
    report: int
    listening: int = -1
    info: int = -1
    filter: int = -1
    lifeline: Lifeline | None = None
    further: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, *, sandboxed: bool, filter: bytes | None = None) -> Pipes:
        """New pipes; that of the filter is full already, being far smaller than a pipe."""
        pipes = cls(*os.pipe(), *(os.pipe() if sandboxed else ()))
        if not sandboxed:
            pipes.lifeline = Lifeline()
        if filter is not None:
            pipes.filter, filling = os.pipe()
            os.write(filling, filter)
            os.close(filling)
        return pipes

    def given(self) -> tuple[int, ...]:
        """The ends that the process is given.

        bubblewrap has the other end of its own pipe too: should this process end before it has
        signalled, it would end of that, and leave behind a process that waits for it for good.
        """
        inner = -1 if self.lifeline is None else self.lifeline.inner
        ends = (self.report, self.info, self.listening, self.filter, inner, *self.further)
        return tuple(end for end in ends if end >= 0)

    def tie(self, group: int) -> None:
        """Let the process group end with this process, unless bubblewrap sees to that."""
        if self.lifeline is not None:
            self.lifeline.tie(group)

    def give(self) -> None:
        """Close the ends that the process was given."""
        if self.lifeline is not None:
            self.lifeline.give()
        for end in (self.report, self.info, self.filter):
            if end >= 0:
                os.close(end)
        close_all(self.further)

    def close(self) -> None:
        """Close the ends that were kept."""
        os.close(self.reading)
        if self.lifeline is not None:
            self.lifeline.cut()
        if self.listening >= 0:
            os.close(self.listening)


def close_all(ends: list[int]) -> None:
    """Close file descriptors, and forget each, so that none is closed twice."""
    while ends:
        os.close(ends.pop())


def watch(
    command: Sequence[str],
    given: bytes,
    pipes: Pipes,
    started: bytes,
    *,
    timeout: float,
    output: int,
    environment: Mapping[str, str],
    folder: str | None,
    stop: threading.Event | None = None,
) -> Watched:
    """Run a command, feed it `given`, and wait for its end; kill all of it at a limit.

    The line `started` on the pipe of the report begins its time of `timeout` seconds; more than
    `output` bytes on standard output and error together end it, and so does `stop`, once it is
    set, as if the time were up. The pipes are closed here.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pipes.given(),
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
            bufsize=0,
        )
        # Before it has its orders, so that it does nothing of which this process's end is no end.
        pipes.tie(process.pid)
    except BaseException:
        pipes.close()
        raise
    finally:
        pipes.give()
    watcher = _Watcher(process, given, pipes, started, timeout, output, stop)
    try:
        return watcher.wait()
    finally:
        watcher.end()


class _Watcher:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        given: bytes,
        pipes: Pipes,
        started: bytes,
        timeout: float,
        output: int,
        stop: threading.Event | None,
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.process, self.given, self.stop = process, memoryview(given), stop
        self.started, self.timeout, self.output = started + b"\n", timeout, output
        self.out, self.err = process.stdout.fileno(), process.stderr.fileno()
        self.into, self.inner, self.pipes = process.stdin.fileno(), pipes.reading, pipes
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
                if not ready and self._has_ended():
                    break  # what it left behind holds the pipes
        self._kill()
        return Watched(
            ended,
            has_started,
            self.process.wait(),
            self.read[self.out],
            self.read[self.err],
            self.read[self.inner][len(self.started) :],
        )

    def end(self) -> None:
        """Kill what is left, and close the pipes."""
        self._kill()
        self.process.wait()
        self.pipes.close()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _serve(self, pipe: int) -> bool:
        """Read or write what can be; false where the pipe is done with."""
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

    def _has_ended(self) -> bool:
        return has_ended(self.process)

    def _kill(self) -> None:
        kill(self.process, self.pipes)


def has_ended(process: subprocess.Popen[Any]) -> bool:
    """Whether a process has; it is left unreaped, so that its group keeps its id."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, flags) is not None


def kill(process: subprocess.Popen[Any], pipes: Pipes) -> None:
    """End a process and what it started."""
    if process.returncode is not None:
        return
    if pipes.listening >= 0 and _kill_inside(process, pipes.listening):
        # bubblewrap ends with what it watches over, and buries it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
            return
    os.killpg(process.pid, signal.SIGKILL)


def _kill_inside(process: subprocess.Popen[Any], listening: int) -> bool:
    """End the sandbox's first process, and so all of them; false where there is none yet."""
    os.set_blocking(listening, False)
    try:
        info = json.loads(os.read(listening, 4096))
    except (BlockingIOError, ValueError):
        return False
    if not has_ended(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(info["child-pid"], signal.SIGKILL)
    return True
