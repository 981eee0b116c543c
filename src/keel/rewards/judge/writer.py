"""A judge's store at work in a thread of its own: what waits at the same time is one commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from keel.rewards.judge.store import JudgeStore

T = TypeVar("T")


class Disk:
    """A commit waits for the disk, and the event loop must not wait with it."""

    def __init__(self, store: JudgeStore) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, "keel-judge-store")
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callable[[], Any], Future[Any]]] = []

    async def run(self, work: Callable[[], T]) -> T:
        """What a method of the store returns, once it is on the disk.

        Cancelled before it began, it is left undone.
        """
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((work, future))
        self._thread.submit(self._serve)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait for what was begun, and let go of the thread."""
        self._thread.shutdown()

    def _serve(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        begun = [
            (work, future) for work, future in waiting if future.set_running_or_notify_cancel()
        ]
        try:
            ends = self.store.together([work for work, _ in begun])
        except BaseException as error:  # nothing of it is on the disk
            ends = [error] * len(begun)
        for (_, future), end in zip(begun, ends, strict=True):
            if isinstance(end, BaseException):
                future.set_exception(end)
            else:
                future.set_result(end)
