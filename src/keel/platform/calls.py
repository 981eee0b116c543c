"""Calls of functions that may hang: sync ones in a thread each, async ones in one event loop.

A thread cannot be ended from outside: one that hangs is abandoned (it ends with the process).
Code that hangs inside C without releasing Python's lock cannot be abandoned either: it ends the
process, with its stack on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from keel.platform.loop_thread import LoopThread, Served
from keel.platform.time_limit import (
    Cancelled,
    Deadline,
    GivesUp,
    KillTimer,
    raise_if_cancelled,
    stack_of,
    stack_of_task,
)

NOTICE = 5.0
"""Seconds that an event loop gets to act on a timeout. One that takes longer is blocked, not merely
short of processor time; what it has on its way to a server is then lost. Below watchdog.GRACE."""
POLL = 0.1
"""Seconds between two checks whether a call is given up."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """How a call ended: with a value, an error, or not within its time (and where it is then)."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    stack: str = ""


def call(
    function: Callable[[], Any], timeout: float, given_up: GivesUp | None = None
) -> CallOutcome:
    """Call a function in a thread and wait at most `timeout` seconds.

    Raises Cancelled once `given_up` says so.
    """
    return next(call_each([function], timeout, given_up))


def call_each(
    functions: Sequence[Callable[[], Any]], timeout: float, given_up: GivesUp | None = None
) -> Iterator[CallOutcome]:
    """Call functions one after the other in one thread, each with a timeout of its own.

    After one that hangs, the rest go on in a new thread. Raises Cancelled as `call`.
    """
    done = 0
    with KillTimer() as end:
        while done < len(functions):
            for outcome in _in_one_thread(functions[done:], timeout, end, given_up):
                done += 1
                yield outcome


def _in_one_thread(
    functions: Sequence[Callable[[], Any]], timeout: float, end: KillTimer, given_up: GivesUp | None
) -> Iterator[CallOutcome]:
    """The outcomes up to the first that hangs."""
    outcomes: queue.SimpleQueue[CallOutcome] = queue.SimpleQueue()
    stop = threading.Event()
    thread = threading.Thread(
        target=_run, args=(functions, outcomes, stop), name="keel-reward", daemon=True
    )
    end.renew(timeout)  # before it runs: it may never let go of the interpreter's lock
    thread.start()
    try:
        for _ in functions:
            outcome = _wait(outcomes, timeout, end, given_up)
            if outcome is None:
                outcome = CallOutcome(timed_out=True, stack=stack_of(thread.ident))
            yield outcome
            if outcome.timed_out:
                return
    finally:
        stop.set()


def _wait(
    outcomes: queue.SimpleQueue[CallOutcome],
    timeout: float,
    end: KillTimer,
    given_up: GivesUp | None,
) -> CallOutcome | None:
    """The next outcome; None where there is none in time."""
    patience = Deadline(timeout)
    for wait in patience:
        end.renew(patience.left)
        with contextlib.suppress(queue.Empty):
            return outcomes.get(timeout=min(wait, POLL))
        raise_if_cancelled()
        if given_up is not None and given_up():
            raise Cancelled
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


def restart_time_limit() -> None:
    """Called by a coroutine that waits its turn: its time has not begun."""
    if (calls := _CALLS.get()) is not None:
        task = asyncio.current_task()
        assert task is not None
        calls.restart(task.get_name())


class AsyncCalls:
    """Coroutines of one step, gathered in the event loop of a thread of its own."""

    def __init__(
        self, functions: Mapping[str, Callable[[], Any]], timeout: float, loop: LoopThread
    ) -> None:
        self.timeout = timeout
        self._loop = loop
        self._functions = dict(functions)
        self._outcomes: dict[str, CallOutcome] = {}
        self._stacks: dict[str, str] = {}
        self._ended = threading.Event()
        self._gone = threading.Event()
        self._over = False
        self._task: asyncio.Task[None] | None = None
        self._until = dict.fromkeys(functions, time.monotonic() + timeout)
        self._ending = KillTimer()
        self._served: Served | None = None
        if self._functions:
            self._ending.__enter__()  # left in outcomes() or cancel()
            self._ending.renew(timeout)
            self._served = loop.submit(self._gather())
        else:
            self._ended.set()

    def restart(self, name: str) -> None:
        """Restart the time limit of a call."""
        self._until[name] = time.monotonic() + self.timeout
        self._ending.renew(self.timeout)

    def outcomes(self, given_up: GivesUp | None = None) -> dict[str, CallOutcome]:
        """Wait for the calls, each at most its timeout from the start; then how each ended.

        Raises Cancelled once `given_up` says so; `cancel` is then still to be called.
        """
        blocked = ""
        if not self._wait(given_up):
            assert self._served is not None
            blocked = stack_of(self._served[1].ident)
            self._loop.abandon(self._served)
            self._gone.set()
        self._ending.__exit__()
        ended = dict(self._outcomes)
        return {
            name: ended.get(
                name, CallOutcome(timed_out=True, stack=self._stacks.get(name, "") or blocked)
            )
            for name in self._functions
        }

    def _wait(self, given_up: GivesUp | None) -> bool:
        """Whether the loop reported in time how the calls ended."""
        # It keeps time itself, unless a coroutine blocks it.
        while True:
            until = max(self._until.values(), default=0.0) + NOTICE
            if self._ended.wait(min(max(0.0, until - time.monotonic()), POLL)):
                return True
            raise_if_cancelled()
            if given_up is not None and given_up():
                raise Cancelled
            if time.monotonic() >= until:
                return False

    def cancel(self) -> None:
        """Give the calls up, so that none goes on after an error of another."""
        self._ending.__exit__()
        if self._served is not None and not self._gone.is_set():
            with contextlib.suppress(RuntimeError):  # abandoned by another, and closed since
                self._served[0].call_soon_threadsafe(self._drop)
            if not self._gone.wait(NOTICE):
                self._loop.abandon(self._served)

    def _drop(self) -> None:
        self._over = True
        if self._task is not None:
            self._task.cancel()

    async def _gather(self) -> None:
        if self._over:  # before it began
            self._gone.set()
            return
        self._task = asyncio.current_task()
        _CALLS.set(self)
        # From here on, however long the loop's thread took to begin.
        self._until = dict.fromkeys(self._functions, time.monotonic() + self.timeout)
        tasks = {
            asyncio.create_task(self._one(name, function), name=name)
            for name, function in self._functions.items()
        }
        try:
            # Not wait_for, which waits for a coroutine that will not be cancelled.
            waiting: set[asyncio.Task[None]] = tasks
            while waiting := waiting - self._stop_late(waiting):
                left = min(self._until[task.get_name()] for task in waiting) - time.monotonic()
                _, waiting = await asyncio.wait(waiting, timeout=left)
        finally:
            self._over = True
            pending = [task for task in tasks if not task.done()]
            for task in pending:
                task.cancel()
            self._ended.set()
            self._ending.__exit__()  # what else is called has a limit of its own
            try:
                if pending:
                    await asyncio.wait(pending, timeout=0.1)
            finally:
                self._gone.set()

    def _stop_late(self, waiting: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Cancel those whose time is over, and keep where they were."""
        now = time.monotonic()
        late = {task for task in waiting if self._until[task.get_name()] <= now}
        for task in late:
            self._stacks[task.get_name()] = stack_of_task(task)
            task.cancel()
        return late

    async def _one(self, name: str, function: Callable[[], Any]) -> None:
        try:
            outcome = CallOutcome(value=await function())
        except BaseException as error:
            stopped = self._over or name in self._stacks
            if stopped and isinstance(error, asyncio.CancelledError):
                raise
            # A CancelledError before that the function raised itself.
            outcome = CallOutcome(error=error)
        if name not in self._stacks:  # else too late
            self._outcomes[name] = outcome


_CALLS: ContextVar[AsyncCalls | None] = ContextVar("_CALLS", default=None)
"""Those that a coroutine is one of."""
