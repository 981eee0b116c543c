"""Cancellation of work in another thread, which checks for it with `look`.

No exception is raised into the thread from outside: one raised by a thread's id can reach a thread
that this one is just starting, which has the same id until it runs, and both then hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

GivesUp = Callable[[], bool]
"""Whether the outcome is no longer needed."""


class Cancelled(BaseException):
    """The outcome of a call is no longer needed; a part of it that hangs is abandoned."""


_TOLD: ContextVar[threading.Event | None] = ContextVar("_TOLD", default=None)
"""Of this thread's context; a new thread has none, a task of an event loop inherits it."""


@contextmanager
def until(told: threading.Event) -> Iterator[None]:
    """Within the block `look` raises Cancelled once the event is set."""
    before = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(before)


def look() -> None:
    """Raise Cancelled if this work is cancelled. Call it at every step of long work, and regularly
    while waiting."""
    told = _TOLD.get()
    if told is not None and told.is_set():
        raise Cancelled
