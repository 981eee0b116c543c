"""Work in a thread of its own that nobody wants any longer: told so, it ends at its next look.

It is not raised into the thread from outside: an error raised by a thread's id may meet the thread
that this one is just starting, which has the same id until it runs, and both then hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

GivesUp = Callable[[], bool]
"""Whether nobody wants the outcome any longer."""


class Cancelled(BaseException):
    """Nobody wants the outcome of a call any longer; what hangs in it is left behind."""


_TOLD: ContextVar[threading.Event | None] = ContextVar("_TOLD", default=None)
"""Of this thread's own context; a thread begins without, what is asked of an event loop with it."""


@contextmanager
def until(told: threading.Event) -> Iterator[None]:
    """Within the block `look` raises Cancelled once the event is set."""
    before = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(before)


def look() -> None:
    """To be called at every step of long work, and between the slices of a wait.

    Raises Cancelled where the thread was told that nobody wants the outcome.
    """
    told = _TOLD.get()
    if told is not None and told.is_set():
        raise Cancelled
