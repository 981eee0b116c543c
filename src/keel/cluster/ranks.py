"""Processes that compute together: this one, rank 0, drives the others.

Each rank builds a member of its own; `RankGroup.call` runs a function of the member on all ranks at
once, which may use collective operations. Calls go over a process group of their own, since a rank
may wait for the next one as long as it takes. The other ranks are started here, or are those that
torchrun has started, each a process of the same `keel train`.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from keel.learn.optimizer import NotFinite
from keel.learn.ranks import Ranks
from keel.platform.process import Child, python_environment, python_module
from keel.platform.signals import ProcessLost, keep_freed
from keel.types import KeelError, one_line

M = TypeVar("M")
DEADLINE = 1800.0
"""Seconds for a call."""
STARTUP = 300.0
"""Seconds at least for a worker to start: it imports torch."""
PATIENCE = 20.0
"""Seconds in which the end of a process has to be known, after others have lost it."""
LONGEST_WAIT = 20 * 86_400.0
"""Seconds; in milliseconds it still is a 32-bit number."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The network interface that each listens on; else it is that of the machine's own name."""
BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals for the driver alone, which stops between steps and needs the others until then."""
READY = b"ready\n"
MODULE = "keel.cluster.ranks"


# ---------------------------------------------------------------- every rank


def join(ranks: Ranks, meeting: str, device: str, seconds: float, loopback: bool = True) -> None:
    """Meet the other ranks; when it returns, all have, and no one needs `meeting` any more.

    On CUDA each has the GPU of its number, or the only one that it sees, and NCCL. A rank waits
    for others `seconds` long. Without `loopback` they may be on several machines.
    """
    if device == "cuda":
        torch.cuda.set_device(ranks.number % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with _on_loopback() if loopback else nullcontext():
        dist.init_process_group(
            backend,
            init_method=meeting,
            rank=ranks.number,
            world_size=ranks.count,
            timeout=timedelta(seconds=min(seconds, LONGEST_WAIT)),
        )
        met = torch.ones((), device=device)
        dist.all_reduce(met)
        assert float(met) == ranks.count


def leave() -> None:
    """Close the connections, of which some may lead to ranks that are gone."""
    _open_calls.cache_clear()
    with suppress(Exception):
        dist.destroy_process_group()


def lost_another(error: BaseException) -> bool:
    """Whether an error says that the connection to another rank has ended, or that one is late."""
    text = str(error)
    late = "monitoredBarrier" in text or "gloo" in text
    return isinstance(error, dist.DistBackendError) or late


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let the backends listen on the loopback interface, unless the user has named another."""
    # lo on Linux, lo0 on macOS
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    own = [name for name in INTERFACES if name not in os.environ]
    os.environ.update(dict.fromkeys(own, loopback))
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]


@cache
def _open_calls() -> Any:
    """The process group that calls go over, opened once by all ranks; none needs the meeting after
    that."""
    with _on_loopback():
        calls = dist.new_group(backend="gloo", timeout=timedelta(seconds=LONGEST_WAIT))
    dist.barrier(calls)
    return calls


def _send(message: Any, calls: Any) -> Any:
    """What rank 0 sends to all ranks."""
    box = [message]
    dist.broadcast_object_list(box, src=0, group=calls)
    return box[0]


def serve(ranks: Ranks, meeting: str, device: str, seconds: float) -> None:
    """Do what rank 0 calls, until it leaves."""
    keep_freed()
    join(ranks, meeting, device, seconds)
    for signum in BLOCKED:
        signal.signal(signum, signal.SIG_IGN)
    calls, member = _open_calls(), None
    while (order := _send(None, calls)) is not None:
        function, arguments = order
        if arguments is None:
            member = function(ranks)
        else:
            with suppress(NotFinite):  # rank 0 reports it
                function(member, *arguments)
        dist.monitored_barrier(calls, timedelta(seconds=LONGEST_WAIT))
    leave()


# ---------------------------------------------------------------- rank 0


class RankGroup(Generic[M]):
    """The ranks: this process, which is rank 0, and the others, of which it has started some."""

    def __init__(self, ranks: Ranks, workers: Sequence[RankProcess], deadline: float) -> None:
        self.ranks, self._workers, self._deadline = ranks, workers, min(deadline, LONGEST_WAIT)
        self._calls, self._idle = _open_calls(), True
        self.member: M

    def build(self, own: Callable[[Ranks], M], others: Callable[[Ranks], M]) -> None:
        """Make every rank's member."""
        self.member = self._ordered((others, None), partial(own, self.ranks))

    def call(self, function: Callable[..., Any], *arguments: Any, **here: Any) -> Any:
        """`function(member, *arguments)` on all ranks at once; this rank's result.

        `here` are keyword arguments of this rank alone. The function is one of a module, and raises
        either on all ranks or not at all.

        Raises:
            KeelError: a rank has ended, or has not answered in time; with its number and why.
        """
        own = partial(function, self.member, *arguments, **here)
        return self._ordered((function, arguments), own)

    def close(self) -> None:
        """Let the other ranks end; those in the middle of a call do when the connections close."""
        if self._idle:
            with suppress(Exception):
                _send(None, self._calls)

    def _ordered(self, order: tuple[Any, Any], own: Callable[[], Any]) -> Any:
        self._idle = False
        with self._naming_the_lost():
            _send(order, self._calls)
            try:
                result = own()
            except NotFinite:
                self._wait()
                raise
            self._wait()
        return result

    def _wait(self) -> None:
        """Until the others have done what was called; at most the deadline."""
        limit = timedelta(seconds=self._deadline)
        dist.monitored_barrier(self._calls, limit, wait_all_ranks=True)
        self._idle = True

    @contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """Turns what a lost rank causes here into an error that names it."""
        start = time.monotonic()
        try:
            yield
        except KeelError:
            raise
        except Exception as error:
            if not lost_another(error):
                raise
            late = time.monotonic() - start >= self._deadline
            missing = re.search(r"Ranks? ([\d, ]+) failed to pass", str(error))
            numbers = re.findall(r"\d+", missing[1]) if missing else []
            named = [worker for worker in self._workers if str(worker.number) in numbers]
            lost = _lost(named or self._workers, self._deadline if late else None)
            raise ProcessLost(
                lost or "another rank of torchrun has ended: see its error above"
            ) from error


class RankProcess(Child):
    """Another rank's process, which writes a line once it is ready, and else its error."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(
            python_module(MODULE, str(number)),
            environment=python_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def name(self) -> str:
        return f"rank {self.number} (process {self.pid})"

    @property
    def code(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll()

    def meet(self, settings: str, seconds: float) -> None:
        """Wait until it is ready, then have it meet the others. Raises ProcessLost."""
        output, given = self.process.stdout, self.process.stdin
        assert output is not None
        assert given is not None
        if not select.select([output], [], [], seconds)[0]:
            raise ProcessLost(_late([self.name], seconds))
        if output.readline() != READY:
            raise ProcessLost(_lost([self]) or f"{self.name} does not start")
        given.write(settings.encode() + b"\n")

    def why(self) -> str:
        """Why it has ended."""
        code = self.code or 0
        if code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        assert self.process.stdout is not None
        error = self.process.stdout.read().decode(errors="replace").strip()
        return f"{self.name} {f'stopped: {error}' if error else f'ended with exit status {code}'}"

    def close(self) -> None:
        """Give it a while to end by itself."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        self.end()


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
    each other rank, which has `threads` CPU threads, and a GPU of its own if `device` is "cuda".
    Each has `deadline` seconds to do what is called. With torchrun the ranks are there, and have no
    deadline. Raises KeelError if a worker fails to start.
    """
    each = partial(_with_threads, threads, others)
    if dist.is_initialized():  # by torchrun
        ranks = ranks_of(os.environ)
        check(count, None, ranks)
        there: RankGroup[M] = RankGroup(ranks, (), LONGEST_WAIT)
        there.build(build, each)
        yield there
        return
    with ExitStack() as stack:
        workers = [RankProcess(number) for number in range(1, count)]
        for worker in workers:
            stack.callback(worker.close)
        # Only at the start, so that a run that is killed later leaves nothing.
        with tempfile.TemporaryDirectory(prefix="keel-ranks-") as folder:
            meeting = f"file://{Path(folder) / 'rendezvous'}"
            for worker in workers:
                worker.meet(f"{count} {device} {deadline} {meeting}", max(deadline, STARTUP))
            join(Ranks(0, count), meeting, device, deadline)
            stack.callback(leave)
            group: RankGroup[M] = RankGroup(Ranks(0, count), workers, deadline)
            stack.callback(group.close)
        group.build(build, each)
        yield group


def _with_threads(threads: int, build: Callable[[Ranks], M], ranks: Ranks) -> M:
    torch.set_num_threads(threads)
    return build(ranks)


def _lost(workers: Sequence[RankProcess], deadline: float | None = None) -> str | None:
    """Which worker has ended and why; with a `deadline`, which still runs; None if all do.

    One that was killed comes first: the others end because they lost it. Then one with an error.
    """
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and any(worker.code is None for worker in workers):
        if any((worker.code or 0) < 0 for worker in workers):
            break
        time.sleep(0.05)
    running = [worker.name for worker in workers if worker.code is None]
    if deadline is not None and running:
        return _late(running, deadline)
    reasons = [worker.why() for worker in workers if worker.code]
    known = [why for why in reasons if "killed" in why] or [why for why in reasons if ":" in why]
    return next(iter(known or reasons), None)


def _late(names: Sequence[str], deadline: float) -> str:
    listed = ", ".join(names)
    return f"no answer within {deadline:g} s from {listed}: fix it, or raise cluster.deadline"


# ---------------------------------------------------------------- torchrun


def ranks_of(environment: Mapping[str, str]) -> Ranks:
    """This process among those of torchrun; the only one without torchrun.

    Raises KeelError if torchrun has started some on other machines.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return Ranks(0, 1)
    count = int(environment["WORLD_SIZE"])
    if int(environment["LOCAL_WORLD_SIZE"]) != count:
        raise KeelError(
            f"torchrun started {count} processes on several machines, and ranks of Keel share one: "
            "use --nnodes 1"
        )
    return Ranks(int(environment["RANK"]), count)


def check(processes: int, ray: str | None, ranks: Ranks) -> None:
    """Raises KeelError if a recipe asks for other processes than torchrun's `ranks`."""
    if ray is not None:
        raise KeelError(
            f'cluster.ray = "{ray}" starts its own processes: run keel train without torchrun, or '
            "leave cluster.ray out"
        )
    if processes != ranks.count:
        raise KeelError(
            f"cluster.processes = {processes}, but torchrun started {ranks.count}: set it to "
            f"{ranks.count}, or --nproc-per-node to {processes}"
        )


def _device(ranks: Ranks) -> str:
    return "cuda" if torch.cuda.device_count() >= ranks.count else "cpu"


@contextmanager
def driving(ranks: Ranks) -> Iterator[None]:
    """The command of torchrun's rank 0. An exception ends the others too, by torchrun."""
    join(ranks, "env://", _device(ranks), LONGEST_WAIT)  # it may be in a stage that it runs alone
    calls = _open_calls()
    yield
    _send(None, calls)
    leave()


def serve_launched(ranks: Ranks) -> int:
    """Another of torchrun's ranks, to the end of rank 0's command; the exit code."""
    try:
        serve(ranks, "env://", _device(ranks), LONGEST_WAIT)
    except Exception as error:
        if not lost_another(error):
            print(f"keel: rank {ranks.number} stopped: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


def main(number: int) -> int:
    """The process of a `RankProcess`; the exit code."""
    output = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    output.write(READY)
    count, device, deadline, meeting = sys.stdin.readline().rstrip("\n").split(" ", 3)
    try:
        serve(Ranks(number, int(count)), meeting, device, float(deadline))
    except Exception as error:  # of gloo too, if another rank is gone
        if not lost_another(error):
            output.write(one_line(error, named=not isinstance(error, KeelError)).encode())
        return 1
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)  # the end of an interpreter with torch takes seconds
