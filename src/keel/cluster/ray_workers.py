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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keel.cluster.ranks import lost_another
from keel.platform.signals import ProcessLost, keep_freed
from keel.platform.time_limit import heartbeat, raise_if_cancelled
from keel.types import KeelError

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RaySystemError, RayTaskError
except ImportError as error:
    raise KeelError("cluster.ray needs Ray: pip install 'keel-rl[ray]'") from error

T = TypeVar("T")
POLL = 0.2
"""Seconds between two looks at what is running."""
PATIENCE = 20.0
"""Seconds in which the end of a process has to be known, after others have lost it."""
COMMANDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals for the process that runs the loop; Ray itself shields its processes from SIGINT."""
ATTEMPTS = 10
"""How often a unit of work is done again, or a process that fails to start is started again."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What Ray reserves for each process."""

    cpus: float = 1.0
    gpus: float = 0.0


@contextmanager
def connected(address: str, cpus: float) -> Iterator[None]:
    """Connect to Ray while the block runs.

    `address` is that of a cluster, or "local": then a Ray on this machine is started, with so many
    CPUs to reserve, and ends with the block. Raises KeelError where there is none.
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
        """The error where it is not there after so many seconds."""
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

        Raises KeelError where one is not there within the deadline.
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
        """Raise ProcessLost where the error of one came of the end of another, or of waiting."""
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


class UnitFuture(Future[T]):
    """What a unit of work will give; `begun`: a process has it."""

    begun = False


@dataclass(eq=False)
class _Unit:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: UnitFuture[Any] = field(default_factory=UnitFuture)
    attempts: int = 0


class RayPool:
    """Processes, each of which does one unit of work at a time, in order."""

    def __init__(
        self,
        roles: Sequence[str],
        build: tuple[Callable[..., Any], tuple[Any, ...]],
        start: Callable[[str], RayProcess],
        seconds: float,
        note: Callable[[str], None],
    ) -> None:
        """`build` makes what a process holds; `start` starts one, `note` tells of a loss, in
        another thread."""
        self.count = len(roles)
        self._build, self._start_one = build, start
        self._seconds, self.note = seconds, note
        self._queue: deque[_Unit] = deque()
        self._free: list[RayProcess] = []
        self._running: dict[Any, tuple[RayProcess, _Unit | None, float]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._failures = 0
        for role in roles:
            self._begin_worker(start(role))
        self._thread = threading.Thread(target=self._run, name=f"keel-{roles[0]}", daemon=True)
        self._thread.start()

    @property
    def workers(self) -> list[RayProcess]:
        return [*self._free, *(worker for worker, _, _ in self._running.values())]

    def submit(self, function: Callable[..., Any], *arguments: Any) -> UnitFuture[Any]:
        """Have `function(held, *arguments)` done by the next free process.

        The outcome raises what the function raised; KeelError where the unit was lost too often, or
        cannot be sent.
        """
        unit = _Unit(function, arguments)
        with self._changed:
            if self._error is not None:
                unit.future.set_exception(self._error)
            else:
                self._queue.append(unit)
                self._changed.notify()
        return unit.future

    def wait(self, futures: Sequence[Future[T]]) -> Iterator[tuple[int, T]]:
        """The place and result of each, as they come. Raises the first error."""
        waiting = dict(enumerate(futures))
        while waiting:
            done = [at for at, future in waiting.items() if future.done()]
            for at in done:
                yield at, waiting.pop(at).result()
            if not done:
                heartbeat()
                raise_if_cancelled()
                time.sleep(0.005)

    def close(self) -> None:
        """End the processes."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(PATIENCE)
        self._fail(KeelError("the processes have ended"))
        ended(self.workers)

    def _begin_worker(self, worker: RayProcess) -> None:
        call = worker.handle.build.remote(*self._build)
        self._running[call] = (worker, None, time.monotonic())

    def _run(self) -> None:
        try:
            while not self._closed:
                self._hand_out()
                self._collect()
        except KeelError as error:
            self._fail(error)
        except Exception as error:  # Ray's, where it has ended
            self._fail(KeelError(f"the processes of Ray cannot be reached: {_line(error)}"))

    def _hand_out(self) -> None:
        with self._changed:
            if not self._running and not (self._queue and self._free) and not self._closed:
                self._changed.wait(POLL)
            while self._queue and self._free:
                unit = self._queue.popleft()
                if unit.future.cancelled():
                    continue
                worker = self._free[0]
                try:
                    call = worker.handle.call.remote(unit.function, unit.arguments)
                except Exception as error:
                    sent = f"what {worker.name} is to do cannot be sent to it: {_line(error)}"
                    _settle(unit, error=KeelError(sent))
                    continue
                self._free.pop(0)
                unit.future.begun = True
                self._running[call] = (worker, unit, time.monotonic())

    def _collect(self) -> None:
        if not self._running:
            return
        # Short, so that a unit that comes meanwhile soon begins.
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=0.02)
        for call in done:
            worker, unit, _ = self._running.pop(call)
            try:
                result = ray.get(call)
            except RayTaskError as error:
                self._free.append(worker)
                cause = error.cause
                known = isinstance(cause, KeelError)
                raised = cause if known else KeelError(f"{worker.name} failed: {_line(cause)}")
                if unit is None:
                    raise raised from error
                _settle(unit, error=raised)
                continue
            except RaySystemError as error:  # as where a result cannot be read
                unread = KeelError(f"no result of {worker.name}: {_line(error)}")
                if unit is None:
                    raise unread from error
                self._free.append(worker)
                _settle(unit, error=unread)
                continue
            except RayError as error:
                self._replace(worker, unit, f"has ended ({_line(error)})")
                continue
            self._failures = 0
            self._free.append(worker)
            if unit is None:
                worker.where = result
            else:
                _settle(unit, result)
        late = time.monotonic() - self._seconds
        for call, (worker, unit, since) in list(self._running.items()):
            if unit is not None and unit.future.cancelled():
                del self._running[call]
                self._replace(worker, None, "was to stop what it did")
            elif since < late and unit is None:
                raise worker.missing(self._seconds)
            elif since < late:
                del self._running[call]
                self._replace(worker, unit, f"gave no answer within {self._seconds:g} s")

    def _replace(self, worker: RayProcess, unit: _Unit | None, why: str) -> None:
        ended([worker])
        self._failures += 1
        redone = ""
        if unit is not None:
            unit.attempts += 1
            unit.future.begun = False
            redone = "; what it was doing is done again"
            with self._changed:
                self._queue.appendleft(unit)
        if self._failures > ATTEMPTS or (unit is not None and unit.attempts >= ATTEMPTS):
            raise KeelError(
                f"{worker.name} {why}, as others did before it: fix that, or raise cluster.deadline"
            )
        self.note(f"{worker.name} {why}: replaced{redone}")
        self._begin_worker(self._start_one(worker.role))

    def _fail(self, error: BaseException) -> None:
        """No unit can be done any more."""
        with self._changed:
            units = [*self._queue, *(u for _, u, _ in self._running.values() if u is not None)]
            self._queue.clear()
            self._error = error
        for unit in units:
            _settle(unit, error=error)


def _settle(unit: _Unit, result: Any = None, error: BaseException | None = None) -> None:
    """Give a unit its outcome, unless it is cancelled."""
    with suppress(InvalidStateError):
        if error is None:
            unit.future.set_result(result)
        else:
            unit.future.set_exception(error)


def _line(error: BaseException) -> str:
    """The reason, without what Ray adds on where to look."""
    text = str(error)
    detail = text.partition("Worker exit detail: ")[2] or text
    words = " ".join(detail.split())
    kind = "" if isinstance(error, RayError | KeelError) else f"{type(error).__name__}: "
    return kind + words[:300].partition(". ")[0]
