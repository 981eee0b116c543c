"""RankProcess processes that compute together with the one that drives them.

Each rank builds a member of its own; `RankGroup.call` runs a function of the member on all ranks at
once, which may use collective operations. Calls go over a pipe, since a rank may wait for the next
one as long as it takes; the workers end when the pipe closes, however the driver ends.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from keel.learn.finite import NotFinite
from keel.learn.ranks import Ranks
from keel.types import KeelError

M = TypeVar("M")
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The driver's to act on: it stops between steps, for which it needs its workers."""
PATIENCE = 20.0
"""Seconds to wait for the end of a worker that others have lost, or that is to end."""


@dataclass(frozen=True, eq=False)
class RankProcess:
    """Another rank's process, and the pipe to it."""

    number: int
    process: SpawnProcess
    pipe: Connection


class RankGroup(Generic[M]):
    """The ranks: this process, which is rank 0, and its workers."""

    def __init__(self, ranks: Ranks, member: M, workers: list[RankProcess]) -> None:
        self.ranks, self.member, self._workers = ranks, member, workers

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(member, *arguments)` on all ranks at once; this rank's result.

        The function is one of a module, and raises either on all ranks or not at all.

        Raises:
            KeelError: a worker has ended; with its rank and why.
        """
        try:
            for worker in self._workers:
                worker.pipe.send((function, arguments))
            try:
                result = function(self.member, *arguments)
            except NotFinite:
                self._wait()
                raise
            self._wait()
        except KeelError:
            raise
        except Exception as error:
            lost = _lost(self._workers)
            if lost is None:
                raise
            raise KeelError(lost) from error
        return result

    def _wait(self) -> None:
        """Until the workers have done what was called."""
        for worker in self._workers:
            error = worker.pipe.recv()
            if error is not None:
                raise KeelError(f"rank {worker.number}: {error}")


@contextmanager
def start(
    count: int, build: Callable[[Ranks], M], others: Callable[[Ranks], M], threads: int
) -> Iterator[RankGroup[M]]:
    """A group of `count` processes on this machine, for as long as the block runs.

    `build` makes this rank's member, `others` (a function of a module, or a partial one) that of
    each worker, which has `threads` CPU threads. Raises KeelError where a worker fails to start.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="keel-ranks-"))
        meeting = f"file://{Path(folder) / 'rendezvous'}"
        workers: list[RankProcess] = []
        stack.callback(_end, workers)
        spawn = get_context("spawn")
        for number in range(1, count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_work,
                args=(Ranks(number, count), meeting, threads, others, theirs),
                name=f"keel-rank-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            workers.append(RankProcess(number, process, ours))
        for worker in workers:
            _began(worker)
        ranks = Ranks(0, count)
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=count)
        stack.callback(_leave)
        group = RankGroup(ranks, build(ranks), workers)
        group._wait()
        yield group


def _began(worker: RankProcess) -> None:
    """Wait for a worker's process to be there."""
    connection.wait([worker.pipe, worker.process.sentinel])
    try:
        worker.pipe.recv()
    except EOFError:
        raise KeelError(_lost([worker]) or f"rank {worker.number} did not start") from None


def _leave() -> None:
    with suppress(Exception):  # of connections to ranks that are gone
        dist.destroy_process_group()


def _end(workers: list[RankProcess]) -> None:
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        worker.process.join(PATIENCE)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _lost(workers: list[RankProcess]) -> str | None:
    """Which worker has ended and why; None where all are alive.

    One that was killed comes first: the others end because they lost it.
    """
    connection.wait([worker.process.sentinel for worker in workers], PATIENCE)
    names = {worker: f"rank {worker.number} (process {worker.process.pid})" for worker in workers}
    for worker, name in names.items():
        code = worker.process.exitcode
        if code is not None and code < 0:
            return f"{name} was killed by {signal.Signals(-code).name}"
    for worker, name in names.items():
        with suppress(EOFError, OSError):
            while worker.pipe.poll():
                error = worker.pipe.recv()
                if error is not None:
                    return f"{name} stopped: {error}"
    for worker, name in names.items():
        if worker.process.exitcode is not None:
            return f"{name} ended with exit status {worker.process.exitcode}"
    return None


# ---------------------------------------------------------------- in a worker


def _work(
    ranks: Ranks,
    meeting: str,
    threads: int,
    build: Callable[[Ranks], Any],
    pipe: Connection,
) -> None:
    """A worker's life: what the driver calls, until the pipe closes."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        pipe.send(None)
        dist.init_process_group(
            "gloo", init_method=meeting, rank=ranks.number, world_size=ranks.count
        )
        member = build(ranks)
        pipe.send(None)
        while True:
            function, arguments = pipe.recv()
            with suppress(NotFinite):
                function(member, *arguments)
            pipe.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except KeelError as error:
        with suppress(OSError):
            pipe.send(str(error))
    except Exception as error:  # of gloo too, where another rank is gone
        kind, text = type(error).__name__, " ".join(str(error).split())
        with suppress(OSError):
            pipe.send(f"{kind}: {text}")
    finally:
        _leave()
