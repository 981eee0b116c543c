"""Calls of functions that may hang: sync ones in a thread each, async ones in one event loop.

A thread cannot be ended from outside: one that hangs is left behind (it ends with the process).
Code that hangs inside C without releasing Python's lock cannot be timed out at all.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: with a value, an error, or not within its time."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False


def call(function: Callable[[], Any], timeout: float) -> Outcome:
    """Call a function in a thread and wait at most `timeout` seconds."""
    return next(call_each([function], timeout))


def call_each(functions: Sequence[Callable[[], Any]], timeout: float) -> Iterator[Outcome]:
    """Call functions one after the other in one thread, each with a timeout of its own.

    After one that hangs, the rest go on in a new thread.
    """
    done = 0
    while done < len(functions):
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        stop = threading.Event()
        rest = functions[done:]
        threading.Thread(
            target=_run, args=(rest, outcomes, stop), name="keel-reward", daemon=True
        ).start()
        try:
            for _ in rest:
                try:
                    outcome = outcomes.get(timeout=timeout)
                except queue.Empty:
                    outcome = Outcome(timed_out=True)
                done += 1
                yield outcome
                if outcome.timed_out:
                    break
        finally:
            stop.set()


def _run(
    functions: Sequence[Callable[[], Any]],
    outcomes: queue.SimpleQueue[Outcome],
    stop: threading.Event,
) -> None:
    for function in functions:
        if stop.is_set():
            return
        try:
            outcomes.put(Outcome(value=function()))
        except BaseException as error:
            outcomes.put(Outcome(error=error))


class AsyncCalls:
    """Coroutines of one step, gathered in one event loop that runs in a thread of its own."""

    def __init__(self, functions: Mapping[str, Callable[[], Any]], timeout: float) -> None:
        self.timeout = timeout
        self._functions = dict(functions)
        self._outcomes: dict[str, Outcome] = {}
        self._ended = threading.Event()
        self._started = time.monotonic()
        if self._functions:
            threading.Thread(target=self._run, name="keel-async-rewards", daemon=True).start()
        else:
            self._ended.set()

    def outcomes(self) -> dict[str, Outcome]:
        """Wait for the calls, each at most its timeout from the start; then how each ended."""
        # The loop keeps time itself, unless a coroutine blocks it: hence the second in hand.
        left = self._started + self.timeout + 1.0 - time.monotonic()
        self._ended.wait(max(0.0, left))
        ended = dict(self._outcomes)
        return {name: ended.get(name, Outcome(timed_out=True)) for name in self._functions}

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._gather())
        finally:
            self._ended.set()
            loop.close()

    async def _gather(self) -> None:
        tasks = {
            asyncio.create_task(self._one(name, function))
            for name, function in self._functions.items()
        }
        # Not wait_for, which waits for a coroutine that will not be cancelled.
        _, pending = await asyncio.wait(tasks, timeout=self.timeout)
        for task in pending:
            task.cancel()
        self._ended.set()
        if pending:
            await asyncio.wait(pending, timeout=0.1)

    async def _one(self, name: str, function: Callable[[], Any]) -> None:
        try:
            self._outcomes[name] = Outcome(value=await function())
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._outcomes[name] = Outcome(error=error)
