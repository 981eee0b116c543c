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
from concurrent.futures import Future
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
    """The next outcome; None if there is none in time."""
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
    if (call := _CALL.get()) is not None:
        call.restart()


class _AsyncCall:
    """A coroutine in the event loop, which ends it when its time is over."""

    def __init__(self, timeout: float, timer: KillTimer, ended: Callable[[], None]) -> None:
        self.timeout, self.outcome = timeout, CallOutcome(timed_out=True)
        self.done = threading.Event()
        self.until = time.monotonic() + timeout
        self._timer, self._ended = timer, ended
        self._task: asyncio.Task[Any] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def begun(self) -> bool:
        return self._task is not None

    async def run(self, function: Callable[[], Any]) -> None:
        self._task = asyncio.current_task()
        _CALL.set(self)
        self.restart()  # from here on, however long the loop's thread took to begin
        try:
            outcome = CallOutcome(value=await function())
        except BaseException as error:
            outcome = CallOutcome(error=error)
        self.end(outcome)

    def restart(self) -> None:
        """Restart its time limit."""
        if self._expiry is not None:
            self._expiry.cancel()
        self.until = time.monotonic() + self.timeout
        self._timer.renew(self.timeout)
        self._expiry = asyncio.get_running_loop().call_later(self.timeout, self._expire)

    def _expire(self) -> None:
        # Not awaited: it may not let itself be cancelled.
        assert self._task is not None
        self.end(CallOutcome(timed_out=True, stack=stack_of_task(self._task)))
        self._task.cancel()

    def end(self, outcome: CallOutcome) -> None:
        """Keep its first outcome."""
        if not self.done.is_set():
            self.outcome = outcome
            if self._expiry is not None:
                self._expiry.cancel()
            self.done.set()
            self._ended()


class AsyncCalls:
    """Coroutines of one step, in the event loop of a thread of its own."""

    def __init__(
        self, functions: Mapping[str, Callable[[], Any]], timeout: float, loop: LoopThread
    ) -> None:
        self._loop, self._timer = loop, KillTimer()
        self._calls: dict[str, _AsyncCall] = {}
        self._futures: list[Future[None]] = []
        self._served: Served | None = None
        if functions:
            self._timer.__enter__()  # left when all have ended, or in outcomes() or cancel()
            self._timer.renew(timeout)
        for name in functions:
            self._calls[name] = _AsyncCall(timeout, self._timer, self._one_ended)
        for name, call in self._calls.items():
            self._served, future = loop.run(call.run(functions[name]))
            self._futures.append(future)

    def _one_ended(self) -> None:
        if all(call.done.is_set() for call in self._calls.values()):
            self._timer.__exit__()  # what else is called has a limit of its own

    def outcomes(self, given_up: GivesUp | None = None) -> dict[str, CallOutcome]:
        """Wait for the calls, each at most its timeout from the start; then how each ended.

        Raises Cancelled once `given_up` says so; `cancel` is then still to be called.
        """
        for call in self._calls.values():
            while not call.done.wait(POLL):
                raise_if_cancelled()
                if given_up is not None and given_up():
                    raise Cancelled
                # The loop keeps time itself, unless a coroutine blocks it.
                if time.monotonic() >= max(one.until for one in self._calls.values()) + NOTICE:
                    self._abandon()
        self._timer.__exit__()
        return {name: call.outcome for name, call in self._calls.items()}

    def _abandon(self) -> None:
        assert self._served is not None
        stack = stack_of(self._served[1].ident)
        self._loop.abandon(self._served)
        for call in self._calls.values():
            call.end(CallOutcome(timed_out=True, stack=stack))

    def cancel(self) -> None:
        """Give the calls up, so that none goes on after an error of another."""
        self._timer.__exit__()
        for future in self._futures:
            future.cancel()
        # One that has not begun never will.
        begun = [call for call in self._calls.values() if call.begun]
        if not all(call.done.wait(NOTICE) for call in begun):
            self._abandon()


_CALL: ContextVar[_AsyncCall | None] = ContextVar("_CALL", default=None)
"""The one that a coroutine is."""
