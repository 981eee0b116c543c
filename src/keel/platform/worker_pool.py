"""Worker processes that can be killed, for calls that may hang, crash or eat memory.

A thread cannot be ended from outside and an alarm fails off the main thread; a process can be
killed from anywhere. Items and answers are JSON lines over pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from keel.platform.worker import READY
from keel.types import KeelError

START_SECONDS = 120.0
"""A worker that has not started by then never will; imports on a busy machine take a while."""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What became of an item: a value, or how it went wrong and a message."""

    value: Any = None
    wrong: Literal["timed out", "died", "raised"] | None = None
    message: str = ""


class Worker:
    """One process, and the item that it has (None while it starts or idles)."""

    def __init__(self, module: str, memory_mb: int) -> None:
        inner, self._lifeline = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._buffer = b""
        self.ready = False
        self.item: int | None = None
        self.deadline = time.monotonic() + START_SECONDS
        package_root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        try:
            self.process = subprocess.Popen(
                # -P: no file of the working folder stands in for a module.
                [sys.executable, "-P", "-m", module, str(inner), str(memory_mb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                pass_fds=(inner,),
                env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
                start_new_session=True,
                bufsize=0,
            )
        finally:
            os.close(inner)

    @property
    def output(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, at: int, item: Any, timeout: float) -> None:
        """Hand over an item; a worker that died meanwhile says so when it is read."""
        self.item, self.deadline = at, time.monotonic() + timeout
        assert self.process.stdin is not None
        try:
            rest = memoryview(json.dumps(item).encode() + b"\n")
            while rest:
                rest = rest[os.write(self.process.stdin.fileno(), rest) :]
        except BrokenPipeError:
            pass

    def receive(self) -> Any:
        """What it wrote, once a line is whole; None before. Raises EOFError where it died."""
        some = os.read(self.output, 65536)
        if not some:
            raise EOFError
        self._buffer += some
        line, whole, rest = self._buffer.partition(b"\n")
        if not whole:
            return None
        self._buffer = rest
        return json.loads(line)

    def last_words(self) -> str:
        """The last line of its standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def kill(self) -> None:
        """End the process and give back what it held."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            assert pipe is not None
            pipe.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class WorkerPool:
    """Up to `workers` processes `python -m module`, started when first needed.

    The module calls `keel.platform.worker.serve`. A worker whose item takes too long, or that dies,
    is replaced; the item is not tried again. Safe to use from any thread; calls wait for each
    other. No process outlives `close`, the pool, or this process, however it ends.
    """

    def __init__(self, module: str, *, workers: int = 2, memory_mb: int = 2048) -> None:
        if workers < 1:
            raise KeelError(f"workers = {workers}: give at least 1")
        self.module, self.size, self.memory_mb = module, workers, memory_mb
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())

    def map(self, items: Sequence[Any], timeout: float) -> list[WorkerResult]:
        """Each item's answer, in order; an item has `timeout` seconds once a worker takes it.

        Raises KeelError where a worker does not start, or the pool is closed.
        """
        judged: dict[int, WorkerResult] = {}
        with self._lock:
            try:
                self._judge(items, timeout, judged)
            except BaseException:
                # Those at work would answer the next call, about items of this one.
                _kill_all(self._workers, os.getpid())
                raise
        return [judged[at] for at in range(len(items))]

    def close(self) -> None:
        """End the workers. A call under way in another thread ends with a KeelError."""
        self._closed = True
        for worker in tuple(self._workers):
            # That call hears it, and lets go of the pipes: closed under it, they would say nothing.
            worker.process.kill()
        with self._lock:
            self._finalizer()

    def _judge(self, items: Sequence[Any], timeout: float, judged: dict[int, WorkerResult]) -> None:
        """Hand the items out, and hear until each is judged."""
        waiting = list(range(len(items)))[::-1]
        while len(judged) < len(items):
            if self._closed:
                raise KeelError("the pool of workers is closed")
            busy = [w for w in self._workers if w.item is not None or not w.ready]
            idle = [w for w in self._workers if w.item is None and w.ready]
            for worker in idle[: len(waiting)]:
                at = waiting.pop()
                worker.send(at, items[at], timeout)
                busy.append(worker)
            starting = sum(not w.ready for w in self._workers)
            while len(waiting) > starting and len(self._workers) < self.size:
                self._workers.append(Worker(self.module, self.memory_mb))
                if self._closed:
                    raise KeelError("the pool of workers is closed")
                busy.append(self._workers[-1])
                starting += 1
            self._listen(busy, judged)

    def _listen(self, busy: Sequence[Worker], judged: dict[int, WorkerResult]) -> None:
        """Wait until some worker says something, dies, or is out of time."""
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            left = min(w.deadline for w in busy) - time.monotonic()
            heard = [key.data for key, _ in selector.select(max(0.0, left))]
        for worker in heard:
            self._hear(worker, judged)
        for worker in busy:
            late = worker.deadline < time.monotonic()
            if worker not in heard and late and (worker.item is not None or not worker.ready):
                self._lose(worker, "timed out", judged)

    def _hear(self, worker: Worker, judged: dict[int, WorkerResult]) -> None:
        try:
            reply = worker.receive()
        except (EOFError, OSError, ValueError):
            self._lose(worker, "died", judged)
            return
        if reply is None:
            return
        if not worker.ready:
            worker.ready = reply == READY
        elif worker.item is not None:
            fine, value = reply
            judged[worker.item] = (
                WorkerResult(value=value)
                if fine
                else WorkerResult(wrong="raised", message=str(value))
            )
            worker.item = None

    def _lose(
        self, worker: Worker, wrong: Literal["timed out", "died"], judged: dict[int, WorkerResult]
    ) -> None:
        """Kill a worker; its item is judged so."""
        if self._closed:
            raise KeelError("the pool of workers is closed")
        self._workers.remove(worker)
        words = worker.last_words()
        worker.kill()
        if not worker.ready:
            raise KeelError(f"a worker of {self.module} does not start ({wrong}): {words}")
        assert worker.item is not None
        judged[worker.item] = WorkerResult(wrong=wrong, message=words)


def _kill_all(workers: list[Worker], owner: int) -> None:
    if os.getpid() == owner:  # a fork of this process owns nothing
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                workers.pop().kill()
