"""Processes that Ray places and watches: the adapter to Ray.

Each process holds one object, and runs functions on it (`Host`). `RayGroup` are processes that
compute together; `RayPool` are processes that each do units of work, of which one that dies or
takes too long is replaced and its unit done again. Every wait has a deadline, whose error names
what is waited for.

Ray serializes calls and results with pickle: who can call its processes can run code, so that one
that is started here has a token (`ray_token`), which is to be set before this is imported.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keel.cluster.ranks import PATIENCE, lost_another
from keel.platform.extras import install_command
from keel.platform.signals import ProcessLost, keep_freed
from keel.platform.time_limit import heartbeat, raise_if_cancelled
from keel.types import KeelError

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RaySystemError, RayTaskError
except ImportError as error:
    raise KeelError(f"cluster.ray needs Ray: {install_command('ray')}") from error

POLL = 0.2
"""Seconds between two looks at what is running."""
COMMANDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals for the process that runs the loop; Ray itself shields its processes from SIGINT."""
ATTEMPTS = 10
"""How often a unit of work is begun, or a process is started, before the pool gives up."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What Ray reserves for each process."""

    cpus: float = 1.0
    gpus: float = 0.0


@contextmanager
def connected(address: str, cpus: float) -> Iterator[None]:
    """Connect to Ray while the block runs.

    `address` is that of a cluster, or "local": then a Ray on this machine is started, with `cpus`
    CPUs to reserve, and ends with the block. Raises KeelError if there is none.
    """
    local = address == "local"
    options = {"include_dashboard": False, "num_cpus": math.ceil(cpus)} if local else {}
    try:
        with _own_signals():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # it raises some as they are
        message = " ".join(str(error).split())
        raise KeelError(f'cluster.ray = "{address}": no connection: {message}') from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Signals stay the command's, which stops between steps and needs Ray's processes until then.

    Ray would handle SIGTERM itself; its processes, which are in this process's group, start with
    this mask.
    """
    before = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, COMMANDS)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@dataclass(frozen=True, slots=True)
class SentTensors:
    """Tensors by name that are sent once, and that processes read where they need them."""

    reference: Any

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> SentTensors:
        """Tensors from any device."""
        content = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        return cls(_put(content))

    def get(self) -> dict[str, Tensor]:
        return load(ray.get(self.reference))


def _keep_running() -> None:
    """Signals that are the command's (`_own_signals`) leave this process running, and end what it
    starts as anywhere else."""
    for signum in COMMANDS:
        signal.signal(signum, lambda *_: None)
    os.register_at_fork(after_in_child=_default_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, COMMANDS)


def _default_signals() -> None:
    for signum in COMMANDS:
        signal.signal(signum, signal.SIG_DFL)


class Host:
    """A process that holds one object."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        keep_freed()
        _keep_running()
        self._held: Any = None

    def place(self) -> tuple[int, str]:
        """Its process and node."""
        return os.getpid(), socket.gethostname()

    def address(self) -> str:
        """Where other processes can meet: this node and a port on which this one listens.

        Their store of the same address, made by `init_process_group`, is the one made here.
        """
        node = ray.util.get_node_ip_address()
        self._store = TCPStore(node, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return f"{node}:{self._store.port}"

    def build(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[int, str]:
        """Make the object; where this is."""
        self._held = function(*arguments)
        return self.place()

    def call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], answers: bool = True
    ) -> Any:
        result = function(self._held, *arguments)
        return result if answers else None


class TrainerHost(Host):
    """A Host by the name that the system shows its process with, as the next two."""


class RolloutHost(Host):
    """See `TrainerHost`."""


class RewardHost(Host):
    """See `TrainerHost`."""


KINDS = {"trainer": TrainerHost, "rollout worker": RolloutHost, "reward worker": RewardHost}


@dataclass(eq=False)
class RayProcess:
    """The handle of a Host; `where` is its process and node, once it is there."""

    role: str
    handle: Any
    resources: Resources
    where: tuple[int, str] | None = None

    @property
    def name(self) -> str:
        if self.where is None:
            return self.role
        return f"{self.role} (process {self.where[0]} on {self.where[1]})"

    def missing(self, seconds: float) -> KeelError:
        """The error if it is not there after that many seconds."""
        free = ray.available_resources()
        return KeelError(
            f"{self.role} was not ready within {seconds:g} s: it needs {self.resources.cpus:g} "
            f"CPUs and {self.resources.gpus:g} GPUs, and the cluster has {free.get('CPU', 0):g} "
            f"and {free.get('GPU', 0):g} free: lower cluster.cpus, cluster.gpus or the numbers of "
            "processes, or raise cluster.deadline"
        )


def started(role: str, resources: Resources, threads: int) -> RayProcess:
    """A new process, which may take a while to be there; `role` is one of `KINDS` with a number."""
    kind = KINDS[role.rstrip(" 0123456789")]
    remote = ray.remote(num_cpus=resources.cpus, num_gpus=resources.gpus, max_restarts=0)(kind)
    return RayProcess(role, remote.remote(threads), resources)


def ended(workers: Sequence[RayProcess]) -> None:
    """End processes, whatever they do."""
    for worker in workers:
        with suppress(Exception):
            ray.kill(worker.handle)


class RayGroup:
    """Processes that compute together: each call runs on all at once."""

    def __init__(self, workers: Sequence[RayProcess], seconds: float) -> None:
        self._workers, self._seconds = workers, seconds

    def meet(self) -> None:
        """Wait until all are there.

        Raises KeelError if one is not there within the deadline.
        """
        places = [worker.handle.place.remote() for worker in self._workers]
        for worker, place in zip(self._workers, places, strict=True):
            try:
                worker.where = ray.get(place, timeout=self._seconds)
            except GetTimeoutError as error:
                raise worker.missing(self._seconds) from error
            except RayError as error:
                raise ProcessLost(f"{worker.role} ended at its start: {_line(error)}") from error

    def address(self) -> str:
        """Where they can meet, as HOST:PORT; the first listens there, on all interfaces."""
        found: str = self._wait([self._workers[0].handle.address.remote()])[0]
        return found

    def build(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> None:
        """Make the object that each holds, by the function with the arguments of each."""
        pairs = zip(self._workers, arguments, strict=True)
        self._wait([worker.handle.build.remote(function, own) for worker, own in pairs])

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(held, *arguments)` on all; the result of the first.

        Raises:
            ProcessLost: one has ended; with its name.
            KeelError: one raised it, or there is no result within the deadline.
        """
        sent = _put(arguments)
        first = self._workers[0]
        calls = [w.handle.call.remote(_with, (function, [sent]), w is first) for w in self._workers]
        return self._wait(calls)[0]

    def _wait(self, calls: Sequence[Any]) -> list[Any]:
        names = dict(zip(calls, self._workers, strict=False))  # some calls are of the first alone
        # Time for one to say that another is late.
        until = time.monotonic() + self._seconds + (PATIENCE if len(calls) > 1 else 0)
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=POLL)
            heartbeat()
            raise_if_cancelled()
            for call in done:
                try:
                    ray.get(call)
                except RayTaskError as error:
                    if isinstance(error.cause, KeelError):
                        raise error.cause from None
                    self._raise_lost(error)
                    raise KeelError(f"{names[call].name} failed: {_line(error.cause)}") from error
                except RayError as error:
                    raise ProcessLost(f"{names[call].name} has ended: {_line(error)}") from error
            if waiting and time.monotonic() > until:
                raise self._late([names[call] for call in waiting])
        try:
            results: list[Any] = ray.get(list(calls))
        except RayError as error:
            raise ProcessLost(f"results of {self._workers[0].name}: {_line(error)}") from error
        return results

    def _raise_lost(self, error: RayTaskError) -> None:
        """Raise ProcessLost if the error of one came of the end of another, or of waiting."""
        until = time.monotonic() + PATIENCE
        places = {w.handle.place.remote(): w for w in self._workers}
        waiting = list(places)
        while waiting and time.monotonic() < until:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=POLL)
            for call in done:
                try:
                    ray.get(call)
                except RayError as lost:
                    raise ProcessLost(f"{places[call].name} has ended: {_line(lost)}") from error
        if waiting and lost_another(error.cause):
            raise self._late([places[call] for call in waiting]) from error

    def _late(self, workers: Sequence[RayProcess]) -> ProcessLost:
        names = ", ".join(worker.name for worker in workers)
        return ProcessLost(
            f"no answer within {self._seconds:g} s from {names}: fix it, or raise cluster.deadline"
        )


def _put(value: Any) -> Any:
    try:
        return ray.put(value)
    except RayError as error:
        raise KeelError(f"Ray cannot take over what is to be sent: {_line(error)}") from error


def _with(held: Any, function: Callable[..., Any], sent: list[Any]) -> Any:
    """Arguments that all processes share are sent once, and fetched by each."""
    return function(held, *ray.get(sent[0]))


class Unit(Future[Any]):
    """What `function(held, *arguments)` will give; `begun`: a process has it."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments
        self.begun = False

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """Give it its outcome, unless it is cancelled."""
        with suppress(InvalidStateError):
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)


class _Lost(Exception):
    """Why a process is to be replaced."""


class RayPool:
    """Processes, each of which does one unit of work at a time, in order, watched by a thread."""

    def __init__(
        self,
        roles: Sequence[str],
        build: tuple[Callable[..., Any], tuple[Any, ...]],
        start: Callable[[str], RayProcess],
        seconds: float,
        note: Callable[[str], None],
    ) -> None:
        """`build` makes what a process holds; `start` starts one, `note` reports a loss, in
        another thread."""
        self.count = len(roles)
        self._build, self._start_one = build, start
        self._seconds, self.note = seconds, note
        self._units: SimpleQueue[Unit | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        """Why no unit can be done any more."""
        self._workers = {role: start(role) for role in roles}
        self._threads = [
            threading.Thread(target=self._serve, args=[role], name=f"keel-{role}", daemon=True)
            for role in roles
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Unit:
        """Have `function(held, *arguments)` done by the next free process.

        The outcome raises what the function raised; KeelError if the unit was lost too often, or
        cannot be sent.
        """
        unit = Unit(function, arguments)
        with self._lock:
            if self._error is None:
                self._units.put(unit)
            else:
                unit.settle(error=self._error)
        return unit

    def wait(self, units: Sequence[Unit]) -> Iterator[tuple[int, Any]]:
        """The place and result of each, as they come. Raises the first error."""
        waiting: dict[Future[Any], int] = {unit: at for at, unit in enumerate(units)}
        while waiting:
            done, _ = futures.wait(waiting, POLL, futures.FIRST_COMPLETED)
            heartbeat()
            raise_if_cancelled()
            for unit in sorted(done, key=waiting.__getitem__):
                yield waiting.pop(unit), unit.result()

    def close(self) -> None:
        """End the processes."""
        self._fail(KeelError("the processes have ended"))
        for thread in self._threads:
            thread.join(PATIENCE)
        ended(list(self._workers.values()))

    def _serve(self, role: str) -> None:
        """Have the process of a role do unit after unit."""
        unit = None
        try:
            self._prepare(role)
            while (unit := self._units.get()) is not None:
                self._do(role, unit)
        except KeelError as error:
            self._fail(error, unit)
        except Exception as error:  # Ray's, if it has ended
            reason = KeelError(f"the processes of Ray cannot be reached: {_line(error)}")
            self._fail(reason, unit)

    def _prepare(self, role: str) -> None:
        """Have the process of a role make what it holds."""
        for _ in range(ATTEMPTS):
            worker = self._workers[role]
            try:
                worker.where = self._outcome(worker, worker.handle.build.remote(*self._build))
                return
            except _Lost as lost:
                why = str(lost)
                self._replace(role, why)
        raise self._lost_too_often(role, why)

    def _do(self, role: str, unit: Unit) -> None:
        for _ in range(ATTEMPTS):
            if unit.cancelled():
                return
            worker = self._workers[role]
            try:
                call = worker.handle.call.remote(unit.function, unit.arguments)
            except Exception as error:
                sent = f"what {worker.name} is to do cannot be sent to it: {_line(error)}"
                return unit.settle(error=KeelError(sent))
            unit.begun = True
            try:
                return unit.settle(self._outcome(worker, call, unit))
            except _Lost as lost:
                unit.begun, why = False, str(lost)
                self._replace(role, why, redone=not unit.cancelled())
                self._prepare(role)
            except KeelError as error:
                return unit.settle(error=error)
        raise self._lost_too_often(role, why)

    def _outcome(self, worker: RayProcess, call: Any, unit: Unit | None = None) -> Any:
        """What a process gives, without a unit what it is made of. Raises _Lost if the process is
        to be replaced, KeelError for what the call raised."""
        until = time.monotonic() + self._seconds
        while not ray.wait([call], timeout=POLL)[0]:
            if self._error is not None:
                raise self._error
            if unit is not None and unit.cancelled():
                raise _Lost("was to stop what it did")
            if time.monotonic() > until and unit is None:
                raise worker.missing(self._seconds)
            if time.monotonic() > until:
                raise _Lost(f"gave no answer within {self._seconds:g} s")
        try:
            return ray.get(call)
        except RayTaskError as error:
            if isinstance(error.cause, KeelError):
                raise error.cause from None
            raise KeelError(f"{worker.name} failed: {_line(error.cause)}") from error
        except RaySystemError as error:  # for example if a result cannot be read
            raise KeelError(f"no result of {worker.name}: {_line(error)}") from error
        except RayError as error:
            raise _Lost(f"has ended ({_line(error)})") from error

    def _replace(self, role: str, why: str, redone: bool = False) -> None:
        worker = self._workers[role]
        ended([worker])
        again = "; what it was doing is done again" if redone else ""
        self.note(f"{worker.name} {why}: replaced{again}")
        self._workers[role] = self._start_one(role)

    def _lost_too_often(self, role: str, why: str) -> KeelError:
        return KeelError(
            f"{self._workers[role].name} was replaced {ATTEMPTS} times, and again {why}: fix the "
            "reason, or raise cluster.deadline"
        )

    def _fail(self, error: BaseException, unit: Unit | None = None) -> None:
        """End the units that wait, and the given one, with an error, and take no others."""
        waiting = [] if unit is None else [unit]
        with self._lock:
            self._error = self._error or error
            with suppress(Empty):  # a worker may take the last one meanwhile
                while True:
                    waiting += [one for one in [self._units.get_nowait()] if one is not None]
            for _ in self._threads:
                self._units.put(None)
        for one in waiting:
            one.settle(error=self._error)


def _line(error: BaseException) -> str:
    """The reason, without what Ray adds on where to look."""
    text = str(error)
    detail = text.partition("Worker exit detail: ")[2] or text
    words = " ".join(detail.split())
    kind = "" if isinstance(error, RayError | KeelError) else f"{type(error).__name__}: "
    return kind + words[:300].partition(". ")[0]
