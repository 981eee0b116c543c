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
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from keel.platform.loop_thread import LoopThread
from keel.platform.time_limit import (
    Deadline,
    KillTimer,
    raise_if_cancelled,
    stack_of,
    stack_of_task,
)

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
    deadline = Deadline(seconds)
    for wait in deadline:
        timer.renew(deadline.left)
        with contextlib.suppress(queue.Empty):
            return outcomes.get(timeout=min(wait, POLL))
        raise_if_cancelled()
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
