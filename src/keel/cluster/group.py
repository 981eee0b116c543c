"""Processes that compute together with the one that drives them.

Each rank builds a member of its own; `RankGroup.call` runs a function of the member on all ranks at
once, which may use collective operations. Calls go over a pipe, since a rank may wait for the next
one as long as it takes; the workers end when the pipe closes, however the driver ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

from keel.cluster.worker import LONGEST_WAIT, join, leave, lost_another
from keel.learn.finite import NotFinite
from keel.learn.ranks import Ranks
from keel.platform.process import Child, python_environment, python_module
from keel.platform.signals import ProcessLost
from keel.types import KeelError

M = TypeVar("M")
DEADLINE = 1800.0
"""Seconds for a call."""
STARTUP = 300.0
"""Seconds at least for a worker to start: it imports torch."""
PATIENCE = 20.0
"""Seconds to wait for the end of a worker that others have lost, or that is to end."""
WORKER = "keel.cluster.worker"
BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals for the driver alone, which stops between steps and needs its workers until then."""


@dataclass(frozen=True, eq=False)
class RankProcess:
    """Another rank's process, and the pipe to it; it ends with this process, however that ends."""

    number: int
    child: Child
    pipe: Connection

    @property
    def name(self) -> str:
        return f"rank {self.number} (process {self.child.pid})"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.child.process

    def send(self, value: object) -> None:
        # Not `pipe.send`: torch would move tensors into shared memory, a descriptor for each.
        self.pipe.send_bytes(pickle.dumps(value))

    def receive(self) -> str:
        """Why the worker stopped; empty if it did what it was called for."""
        return self.pipe.recv_bytes().decode()


def _started(number: int) -> RankProcess:
    ours, theirs = Pipe()
    with theirs:
        end = os.dup(theirs.fileno())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)  # a process starts with this mask
    try:
        child = Child(
            python_module(WORKER, str(end)), environment=python_environment(), ends=(end,)
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return RankProcess(number, child, ours)


class RankGroup(Generic[M]):
    """The ranks: this process, which is rank 0, and its workers."""

    def __init__(
        self, ranks: Ranks, member: M, workers: list[RankProcess], deadline: float
    ) -> None:
        self.ranks, self.member, self._workers = ranks, member, workers
        self._deadline = deadline

    def call(self, function: Callable[..., Any], *arguments: Any, **here: Any) -> Any:
        """`function(member, *arguments)` on all ranks at once; this rank's result.

        `here` are keyword arguments of this rank alone. The function is one of a module, and raises
        either on all ranks or not at all.

        Raises:
            KeelError: a worker has ended, or has not answered in time; with its rank and why.
        """
        with self.naming_the_lost():
            for worker in self._workers:
                worker.send((function, arguments))
            try:
                result = function(self.member, *arguments, **here)
            except NotFinite:
                self.wait()
                raise
            self.wait()
        return result

    def wait(self, least: float = 0.0) -> None:
        """Until the workers have done what was called, in the deadline or in `least` seconds."""
        seconds = max(self._deadline, least)
        until = time.monotonic() + min(seconds, LONGEST_WAIT)
        waiting = {worker.pipe: worker for worker in self._workers}
        while waiting:
            ready = connection.wait(list(waiting), max(until - time.monotonic(), 0))
            if not ready:
                raise ProcessLost(_late(list(waiting.values()), seconds))
            for worker in [waiting.pop(pipe) for pipe in ready if isinstance(pipe, Connection)]:
                error = worker.receive()
                if error:
                    stopped = f"{worker.name} stopped: {error}"
                    raise ProcessLost(_lost(self._workers, {worker.number: stopped}) or stopped)

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Turns what a lost worker causes here into an error that names it."""
        start = time.monotonic()
        try:
            yield
        except KeelError:
            raise
        except Exception as error:
            late = lost_another(error) and time.monotonic() - start >= self._deadline
            hanging = _silent(self._workers, PATIENCE) if late else []
            lost = _late(hanging, self._deadline) if hanging else _lost(self._workers)
            if lost is None:
                raise
            raise ProcessLost(lost) from error


@contextmanager
def start(
    count: int,
    build: Callable[[Ranks], M],
    others: Callable[[Ranks], M],
    threads: int,
    device: str = "cpu",
    deadline: float = DEADLINE,
) -> Iterator[RankGroup[M]]:
    """A group of `count` processes on this machine, for as long as the block runs.

    `build` makes this rank's member, `others` (a function of a module, or a partial one) that of
    each worker, which has `threads` CPU threads, and a GPU of its own if `device` is "cuda".
    Each has `deadline` seconds to do what is called, after its start. Raises KeelError if a
    worker fails to start.
    """
    with ExitStack() as stack:
        workers: list[RankProcess] = []
        stack.callback(_end, workers)
        for number in range(1, count):
            workers.append(_started(number))
        for worker in workers:
            worker.send((Ranks(worker.number, count), threads, device, deadline, others))
        group: RankGroup[Any] = RankGroup(Ranks(0, count), None, workers, deadline)
        with group.naming_the_lost():
            group.wait(STARTUP)
            # Only at the start, so that a run that is killed later leaves nothing.
            with tempfile.TemporaryDirectory(prefix="keel-ranks-") as folder:
                meeting = f"file://{Path(folder) / 'rendezvous'}"
                for worker in workers:
                    worker.send(meeting)
                join(group.ranks, meeting, device, deadline)
                stack.callback(leave)
                group.member = build(group.ranks)
                group.wait()
        yield group


def _end(workers: list[RankProcess]) -> None:
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(PATIENCE)
        worker.child.end()


def _lost(workers: list[RankProcess], known: Mapping[int, str] | None = None) -> str | None:
    """Which worker has ended and why; None if all are alive. `known` are errors of some.

    One that was killed comes first: the others end because they lost it.
    """
    connection.wait([worker.pipe for worker in workers], PATIENCE)
    errors = dict(known or {})
    for worker in workers:
        with suppress(EOFError, OSError):
            while worker.pipe.poll():
                error = worker.receive()
                if error:
                    errors[worker.number] = f"{worker.name} stopped: {error}"
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(1.0)
    codes = [(worker, worker.process.poll()) for worker in workers]
    for worker, code in codes:
        if code is not None and code < 0:
            return f"{worker.name} was killed by {signal.Signals(-code).name}"
    for worker, code in codes:
        if worker.number in errors:
            return errors[worker.number]
        if code is not None:
            return f"{worker.name} ended with exit status {code}"
    return None


def _silent(workers: list[RankProcess], seconds: float) -> list[RankProcess]:
    """Those that have neither answered nor ended after so many seconds."""
    until = time.monotonic() + seconds
    return [one for one in workers if not one.pipe.poll(max(until - time.monotonic(), 0))]


def _late(workers: list[RankProcess], deadline: float) -> str:
    names = ", ".join(worker.name for worker in workers)
    return f"no answer within {deadline:g} s from {names}: fix it, or raise cluster.deadline"
