"""Calls that do not come back: named, with the stack they hang in, within their time. Torch-free.

Two clocks. One is a thread, which raises `Hung` where the call waits. The other is the
interpreter's own (faulthandler): it needs no lock, so that it also ends a process whose call sits
in C without ever letting another thread run; the stacks are then on stderr, and the run goes on
from its newest checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import math
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from keel.types import KeelError

GRACE = 10.0
"""Seconds behind its time that a call gets before the process is ended from below."""


class Hung(KeelError):
    """A call that gave no answer in its time; `stack` is where it was then."""

    def __init__(self, line: str, stack: str) -> None:
        super().__init__(line)
        self.stack = stack


class _Expired(BaseException):
    """Raised in the call that hangs; no `except Exception` of its own holds it up."""


@contextlib.contextmanager
def watching(what: str, seconds: float, key: str) -> Iterator[None]:
    """Give the block so many seconds; `key` is what allows more.

    Raises:
        Hung: it took longer.
    """
    watch = _Watch(threading.get_ident())
    timer = threading.Timer(seconds, watch.expire)
    timer.daemon = True
    with _handling(watch), Ending() as end:
        end.renew(seconds)
        timer.start()
        try:
            yield
        except _Expired:
            pass
        finally:
            watch.leave()
            timer.cancel()
    if watch.stack is not None:
        raise Hung(
            f"{what} gives no answer within {seconds:g} s (it is {place(watch.stack)}): mend it, "
            f"or raise {key}",
            watch.stack,
        )


class Ending:
    """Ends the process, with all stacks on stderr, where `renew` was called too long ago."""

    EVERY = 1.0
    """Seconds between two settings of the clock: one costs as much as a quick reward."""

    def __init__(self) -> None:
        self._set = -math.inf

    def renew(self, seconds: float) -> None:
        """So many seconds, and `GRACE`, from now on (a second more at the most)."""
        now = time.monotonic()
        if now - self._set >= self.EVERY and _arm(seconds + GRACE + self.EVERY):
            self._set = now

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, *error: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def stack_of(thread: int | None) -> str:
    """Where a thread is now; empty where it has ended."""
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
    """One call that is watched."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.stack: str | None = None
        self._lock = threading.Lock()
        self._inside = True

    def expire(self) -> None:
        """The time is up: keep the stack, and raise in the thread that waits."""
        with self._lock:
            if not self._inside:
                return
            self.stack = stack_of(self.thread)
            if self.thread == threading.main_thread().ident:
                signal.pthread_kill(self.thread, signal.SIGALRM)  # wakes what waits for a lock
            else:
                kind = ctypes.py_object(_Expired)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), kind)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self._inside:
            self._inside = False
            raise _Expired

    def leave(self) -> None:
        """The block has ended; a signal on its way means nothing any more."""
        self._inside = False
        with self._lock:
            pass


@contextlib.contextmanager
def _handling(watch: _Watch) -> Iterator[None]:
    """SIGALRM is the watch's while the block lasts; only the main thread can have it."""
    if watch.thread != threading.main_thread().ident:
        yield
        return
    before = signal.signal(signal.SIGALRM, watch.handle)
    try:
        yield
    finally:
        time.sleep(0)  # a pending handler runs here, while it is still the watch's
        signal.signal(signal.SIGALRM, before)


def _arm(seconds: float) -> bool:
    if sys.__stderr__ is None:
        return False
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    except (OverflowError, ValueError, OSError):  # years, or a stderr without a file
        return False
    return True
