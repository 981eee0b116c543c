"""Calls of functions that may hang: sync ones in a thread each, async ones in one event loop.

A thread cannot be ended from outside: one that hangs is abandoned (it ends with the process).
Code that hangs inside C without releasing Python's lock cannot be abandoned either: it ends the
process, with its stack on stderr.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from keel.platform.time_limit import (
    KillTimer,
    raise_if_cancelled,
    seconds_since,
    stack_of,
    stack_of_task,
)

T = TypeVar("T")


NOTICE = 5.0
"""Seconds that an event loop gets to act on a timeout. One that takes longer is blocked, not merely
short of processor time; what it has on its way to a server is then lost. Below `GRACE`."""
POLL = 0.1
"""Seconds between two checks whether a call is cancelled."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """How a call ended: with a value, an error, or not within its time (and where it is then)."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    stack: str = ""


def call_with_time_limit(function: Callable[[], Any], seconds: float) -> CallOutcome:
    """Call a function in a thread and wait at most some seconds.

    Raises Cancelled if the caller's work is cancelled (`cancelled_by`).
    """
    return next(call_each([function], seconds))


def call_each(
    functions: Sequence[Callable[[], Any]], seconds: float
) -> Generator[CallOutcome, None, None]:
    """Call functions one after the other in one thread, each with its own time limit.

    After one that hangs, the rest go on in a new thread. Raises Cancelled as
    `call_with_time_limit`.
    """
    left = list(functions)
    with KillTimer() as timer:
        while left:
            outcomes: queue.SimpleQueue[CallOutcome] = queue.SimpleQueue()
            stop = threading.Event()
            thread = threading.Thread(
                target=_run, args=(tuple(left), outcomes, stop), name="keel-reward", daemon=True
            )
            timer.renew(seconds)  # before it runs: it may never let go of the interpreter's lock
            thread.start()
            try:
                while left and not stop.is_set():
                    outcome = _next(outcomes, seconds, timer)
                    if outcome is None:
                        outcome = CallOutcome(timed_out=True, stack=stack_of(thread.ident))
                        stop.set()
                    del left[0]
                    yield outcome
            finally:
                stop.set()


def _next(
    outcomes: queue.SimpleQueue[CallOutcome], seconds: float, timer: KillTimer
) -> CallOutcome | None:
    """The next outcome; None if there is none in time."""
    left = seconds
    while left > 0:
        timer.renew(left)
        start = time.monotonic()
        with contextlib.suppress(queue.Empty):
            return outcomes.get(timeout=min(left, POLL))
        raise_if_cancelled()
        left -= seconds_since(start)
    return None


def _run(
    functions: Sequence[Callable[[], Any]],
    outcomes: queue.SimpleQueue[CallOutcome],
    stop: threading.Event,
) -> None:
    for function in functions:
        if stop.is_set():
            return
        try:
            outcomes.put(CallOutcome(value=function()))
        except BaseException as error:
            outcomes.put(CallOutcome(error=error))


class LoopThread:
    """One event loop for a stage's rewards and programs, in a daemon thread.

    Semaphores and connections that a function keeps between steps belong to it. A loop that a
    coroutine blocked is abandoned for a new one.
    """

    def __init__(self) -> None:
        self._served: Served | None = None
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> tuple[Served, Future[T]]:
        """Let the loop run a coroutine: the loop with its thread, and the outcome."""
        with self._lock:
            served = self._started()
            return served, asyncio.run_coroutine_threadsafe(work, served[0])

    def runs(self, served: Served) -> bool:
        """Whether this is the loop, not one that was abandoned."""
        return self._served is served

    def _started(self) -> Served:
        if self._served is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_serve, args=(loop,), name="keel-async", daemon=True)
            thread.start()
            weakref.finalize(self, _stop, loop)
            self._served = loop, thread
        return self._served

    def abandon(self, blocked: Served) -> None:
        """Leave a blocked loop; it stops when, and if, what blocks it returns."""
        with self._lock:
            _stop(blocked[0])
            if self._served is blocked:
                self._served = None

    def close(self) -> None:
        """End the loop and its thread; one that is blocked is abandoned after a second."""
        if (served := self._served) is not None:
            self.abandon(served)
            served[1].join(1.0)


Served = tuple[asyncio.AbstractEventLoop, threading.Thread]
"""A loop and its thread."""


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then end what still waits in it."""
    loop.run_forever()
    waiting = asyncio.all_tasks(loop)
    for task in waiting:
        task.cancel()
    if waiting:
        loop.run_until_complete(asyncio.wait(waiting, timeout=0.1))
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


class AsyncCall:
    """A call of an async function in an event loop; its time begins when the loop begins it."""

    def __init__(self, function: Callable[[], Any], seconds: float, loop: LoopThread) -> None:
        self._seconds, self._loop = seconds, loop
        self._task: asyncio.Task[Any] | None = None
        self._ended = threading.Event()
        self._late: str | None = None
        """Where it was when its time was over, if the loop could look."""
        self._timer = KillTimer().__enter__()  # left when it has ended or is given up
        self.restart()
        self._served, self._future = loop.run(self._call(function))

    async def _call(self, function: Callable[[], Any]) -> CallOutcome:
        self._task = asyncio.current_task()
        _CALL.set(self)
        self.restart()
        self._expire()
        try:
            return CallOutcome(value=await function())
        except BaseException as error:
            return CallOutcome(error=error)
        finally:
            self._timer.__exit__()  # what else is called has a limit of its own
            self._ended.set()

    def restart(self) -> None:
        """Restart its time limit."""
        self._until = time.monotonic() + self._seconds
        self._timer.renew(self._seconds)

    def _expire(self) -> None:
        """In the loop: end it at its time, whenever its outcome is asked for."""
        assert self._task is not None
        left = self._until - time.monotonic()
        if self._ended.is_set():
            return
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._expire)
            return
        self._timer.__exit__()  # the loop is not blocked
        self._late = stack_of_task(self._task)
        self._task.cancel()

    def outcome(self) -> CallOutcome:
        """Wait until it has ended, or its time is over.

        Raises Cancelled if the caller's work is cancelled; `cancel` is then still to be called.
        """
        while (left := self._until - time.monotonic()) > 0:
            if concurrent.futures.wait([self._future], min(left, POLL)).done:
                break
            raise_if_cancelled()
        self._timer.__exit__()
        if self._late is not None:
            self._ended.set()
            return CallOutcome(timed_out=True, stack=self._late)
        if self._future.done():
            return self._future.result()
        self._ended.set()  # nothing waits for it, which may not let itself be cancelled
        return CallOutcome(timed_out=True, stack=self._stop())

    def _stop(self) -> str:
        """Cancel it; where it was. A loop that it blocks is abandoned."""
        stacks: queue.SimpleQueue[str] = queue.SimpleQueue()

        def look() -> None:
            assert self._task is not None
            stacks.put(stack_of_task(self._task))
            self._task.cancel()

        loop, thread = self._served
        if self._task is not None and self._loop.runs(self._served):
            loop.call_soon_threadsafe(look)
            with contextlib.suppress(queue.Empty):
                return stacks.get(timeout=NOTICE)
        stack = stack_of(thread.ident)
        self._loop.abandon(self._served)
        return stack

    def cancel(self) -> None:
        """Give it up, so that it does not go on after an error of another."""
        self._timer.__exit__()
        self._future.cancel()
        # One that has not begun never will.
        begun = self._task is not None and self._loop.runs(self._served)
        if begun and not self._ended.wait(NOTICE):
            self._loop.abandon(self._served)


_CALL: ContextVar[AsyncCall | None] = ContextVar("_CALL", default=None)
"""The one that a coroutine is."""


def restart_time_limit() -> None:
    """Called by a coroutine that waits its turn: its time has not begun."""
    if (call := _CALL.get()) is not None:
        call.restart()
