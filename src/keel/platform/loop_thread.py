"""An event loop in a thread of its own, for the coroutines of users and for HTTP."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


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
