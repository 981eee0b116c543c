"""Time limits of calls that may hang, and cancellation of work in other threads. Torch-free.

A block that must run in its caller's thread is limited by `time_limit`; functions and coroutines of
users by `keel.platform.calls`. Two clocks limit a block. A thread raises `Hung` where the block
waits. The interpreter's own clock (faulthandler) needs no lock, so that it also ends a process
whose call is in C and never lets another thread run: the stacks are then on stderr, and the run can
be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import math
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

from keel.types import KeelError

GRACE = 10.0
"""Seconds after its time limit until the interpreter's clock ends the process."""
TICK = 1.0
"""Seconds between two checks of the time. Much longer ones found the process suspended (Ctrl-Z, a
debugger), and do not count."""


class Hung(KeelError):
    """A call that exceeded its time limit; `stack` is where it was then."""

    def __init__(self, line: str, stack: str) -> None:
        super().__init__(line)
        self.stack = stack


class _Expired(BaseException):
    """Raised in the block that hangs; its own `except Exception` does not catch it."""


@contextlib.contextmanager
def time_limit(what: str, seconds: float, advice: str, *, in_c: bool = False) -> Iterator[None]:
    """Limit how long the block runs without a call of `heartbeat`; `advice` says what to change.

    It costs microseconds. With `in_c`, which costs a tenth of a millisecond, a call into C that
    keeps the interpreter's lock ends the process.

    Raises:
        Hung: it was silent for longer.
    """
    watch = _Watch(seconds, KillTimer() if in_c else None)
    ended = False
    try:
        with watch:
            yield
        ended = True
    except _Expired:
        if watch.stack is None:  # that of a limit around this one
            raise
    if watch.stack is not None and not ended:
        raise Hung(
            f"{what} gives no answer within {seconds:g} s (it is {place(watch.stack)}): {advice}",
            watch.stack,
        )


def heartbeat() -> None:
    """Restart the innermost time limit of this thread."""
    thread = threading.get_ident()
    for watch in reversed(_TICKER.watches):
        if watch.thread == thread:
            watch.silent = 0.0
            return


def seconds_since(start: float, tick: float | None = None) -> float:
    """Seconds of a wait that was to last at most a tick, by the monotonic clock; time in which the
    process was suspended does not count."""
    return min(time.monotonic() - start, 2 * (TICK if tick is None else tick))


class KillTimer:
    """Ends the process, with all stacks on stderr, if `renew` was called too long ago.

    The process has one clock, which is set to the earliest of all timers.
    """

    EVERY = 1.0
    """Seconds between two settings of the clock: one costs as much as a quick reward."""

    def __init__(self) -> None:
        self._set = self.due = -math.inf  # by the monotonic clock

    def renew(self, seconds: float) -> None:
        """Set it to that many seconds from now, and `GRACE` (at most one more)."""
        now = time.monotonic()
        if now - self._set >= self.EVERY:
            self._set, self.due = now, now + seconds + GRACE + self.EVERY
            _arm()

    def __enter__(self) -> KillTimer:
        with _LOCK:
            _TIMERS.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        with _LOCK, contextlib.suppress(ValueError):
            _TIMERS.remove(self)
        _arm()


_LOCK = threading.Lock()
_TIMERS: list[KillTimer] = []


def _arm() -> None:
    """Set the interpreter's clock to the earliest timer."""
    with _LOCK:
        due = [timer.due for timer in _TIMERS if timer.due > -math.inf]
        faulthandler.cancel_dump_traceback_later()
        if not due or sys.__stderr__ is None:
            return
        left = max(min(due) - time.monotonic(), 0.1)
        with contextlib.suppress(OverflowError, ValueError, OSError):  # a stderr without a file
            faulthandler.dump_traceback_later(left, exit=True, file=sys.__stderr__)


def stack_of(thread: int | None) -> str:
    """Where a thread is now; empty if it has ended."""
    frame = sys._current_frames().get(thread or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))


def stack_of_task(task: asyncio.Task[Any]) -> str:
    """Where a coroutine waits, what it waits for inside it last."""
    frames: list[tuple[FrameType, int]] = []
    waits: Any = task.get_coro()
    while (frame := getattr(waits, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        waits = waits.cr_await
    return "".join(traceback.StackSummary.extract(iter(frames)).format())


_LINE = re.compile(r'File "(?P<path>.*)", line (?P<line>\d+), in (?P<function>.*)')
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib"))


def place(stack: str) -> str:
    """The innermost line of a stack that is in no library, as `in f (file.py:12)`."""
    lines = [match for line in stack.splitlines() if (match := _LINE.fullmatch(line.strip()))]
    own = [match for match in lines if not match["path"].startswith(_LIBRARIES)]
    if not lines:
        return "nowhere to be seen"
    last = (own or lines)[-1]
    return f"in {last['function']} ({last['path'].rpartition('/')[2]}:{last['line']})"


class _Watch:
    """A block of this thread, whose time the ticker counts while it lasts."""

    def __init__(self, seconds: float, timer: KillTimer | None) -> None:
        self.thread, self.seconds, self.timer = threading.get_ident(), seconds, timer
        self.tick = min(TICK, seconds / 10)
        self.silent = 0.0
        self.stack: str | None = None
        self._lock = threading.Lock()
        self._left = False
        self._handler: Any = None
        self._main = self.thread == threading.main_thread().ident

    def __enter__(self) -> None:
        if self._main:
            # A signal ends what the thread waits for; the pending error is then raised.
            self._handler = signal.signal(signal.SIGALRM, lambda *_: None)
        if self.timer is not None:
            self.timer.__enter__().renew(self.seconds)
        _TICKER.add(self)

    def __exit__(self, *error: object) -> None:
        try:
            with self._lock:
                self._left = True
                if self.stack is not None:
                    _raise_in(self.thread, None)
        finally:
            _TICKER.remove(self)
            if self.timer is not None:
                self.timer.__exit__()
            if self._main:
                time.sleep(0)  # a pending signal is handled here
                signal.signal(signal.SIGALRM, self._handler)

    def count(self, seconds: float) -> None:
        """Count seconds without a heartbeat; raise in the thread if they are too many."""
        if self._left or self.stack is not None:
            return
        self.silent += seconds
        if self.silent < self.seconds:
            if self.timer is not None:
                self.timer.renew(self.seconds - self.silent)
            return
        with self._lock:
            if not self._left:
                self.stack = stack_of(self.thread)
                _raise_in(self.thread, _Expired)
                if self._main:
                    signal.pthread_kill(self.thread, signal.SIGALRM)


class _Ticker:
    """The one thread that counts for all watches, from the first on."""

    def __init__(self) -> None:
        self.watches: tuple[_Watch, ...] = ()
        self._lock = threading.Lock()
        self._sooner = threading.Event()
        self._started = False

    def add(self, watch: _Watch) -> None:
        with self._lock:
            if not self._started:
                threading.Thread(target=self._run, name="keel-watch", daemon=True).start()
                self._started = True
            self.watches = (*self.watches, watch)
        if watch.tick < TICK:
            self._sooner.set()

    def remove(self, watch: _Watch) -> None:
        with self._lock:
            self.watches = tuple(one for one in self.watches if one is not watch)

    def _run(self) -> None:
        while True:
            watches = self.watches
            tick = min((watch.tick for watch in watches), default=TICK)
            start = time.monotonic()
            self._sooner.wait(tick)
            self._sooner.clear()
            for watch in watches:  # those of the whole tick
                with contextlib.suppress(Exception):  # one that cannot be ended; the others count
                    watch.count(seconds_since(start, tick))


_TICKER = _Ticker()


def _without_thread() -> None:
    """A forked child has none of the threads."""
    global _TICKER
    _TICKER = _Ticker()


os.register_at_fork(after_in_child=_without_thread)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in a thread at its next step; None takes back one that is still pending.

    A thread that is just starting another one may hang by it, since the two have one id until then.
    Work that can check for cancellation is better cancelled (`raise_if_cancelled`).
    """
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


# ---------------------------------------------------------------- cancellation
#
# Work in another thread checks for it. No exception is raised into that thread from outside: one
# raised by a thread's id can reach a thread that this one is just starting, which has the same id
# until it runs, and both then hang.


class Cancelled(BaseException):
    """The outcome of a call is no longer needed."""


_EVENT: ContextVar[threading.Event | None] = ContextVar("_EVENT", default=None)
"""Of this thread's context; a new thread has none, a task of an event loop inherits it."""


@contextlib.contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """Within the block `raise_if_cancelled` raises Cancelled once the event is set."""
    before = _EVENT.set(event)
    try:
        yield
    finally:
        _EVENT.reset(before)


def raise_if_cancelled() -> None:
    """Raise Cancelled if this work is cancelled. Call it at every step of long work, and regularly
    while waiting."""
    event = _EVENT.get()
    if event is not None and event.is_set():
        raise Cancelled
