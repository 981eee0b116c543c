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


_EVENT: ContextVar[threading.Event | None] = ContextVar("_EVENT", default=None)
"""Of this thread's context; a new thread has none, a task of an event loop inherits it."""


@contextmanager
def until(event: threading.Event) -> Iterator[None]:
    """Within the block `look` raises Cancelled once the event is set."""
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
