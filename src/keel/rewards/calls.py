"""Calls of the reward functions on the completions of a step: call, time limit, validation.

While a step is sampled, its groups, in the order of their prompts, are divided into at most `PARTS`
parts of equal numbers of groups, which are scored one after the other: what a function is called
with, and in which order, depends on the step alone and not on time. Sync functions are called one
at a time; coroutines of several parts run concurrently.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np

from keel.config.fields import unknown
from keel.config.secrets import without_secrets
from keel.platform.calls import (
    POLL,
    AsyncCall,
    CallOutcome,
    GivesUp,
    call_each,
    call_with_time_limit,
)
from keel.platform.loop_thread import LoopThread
from keel.platform.time_limit import Cancelled, Hung, place, raise_if_cancelled
from keel.rewards.batch import Log, RewardBatch, arguments, column_names, without_stop
from keel.rewards.registry import NamedReward
from keel.rewards.validation import BadReturn, RewardOutput, read_rewards
from keel.types import Group, KeelError, Prompt, Task, one_line

PARTS = 8
"""Calls of each function in a step, at the most: a call may work in parallel, and does it the
better the more it gets, so that many small ones could take longer than they save."""


@dataclass(frozen=True, eq=False)
class CallConfig:
    """How functions are called; see `Scorer`."""

    functions: Sequence[NamedReward]
    tasks: dict[str, Task]
    timeout: float
    on_error: Literal["stop", "skip"]
    loop: LoopThread
    stop: Sequence[str] = ()


class RewardCall:
    """The call of all functions on one part of a step: `outputs` by function, and their `logs`
    with the places of the completions in the step.

    `start` calls gates first, and the others with the completions that pass; `finish` waits for the
    coroutines. Both raise KeelError for a failure that stops the run, and Cancelled once
    `given_up()`. Completions whose program failed are shown to no function.
    """

    def __init__(
        self, config: CallConfig, batch: RewardBatch, given_up: GivesUp | None = None
    ) -> None:
        self.batch = batch
        self.outputs = {f.name: [RewardOutput()] * len(batch) for f in config.functions}
        self.logs: dict[str, tuple[Log, tuple[int, ...]]] = {}
        self._config = config
        self._given_up = given_up
        self._running: dict[str, AsyncCall] = {}
        self._indices: list[int] = []
        self._called = batch

    def start(self) -> None:
        """Call all functions; only coroutines of those that are no gates still run."""
        gates = [f for f in self._config.functions if f.gate_below is not None]
        others = [f for f in self._config.functions if f.gate_below is None]
        passing = [at for at, one in enumerate(self.batch.completions) if not one.failed]
        self._call_all(gates, passing)
        self.finish()
        passing = [
            at
            for at in passing
            if not any(gate.gates(self.outputs[gate.name][at].value) for gate in gates)
        ]
        self._call_all(others, passing)

    def finish(self) -> None:
        """Wait for the coroutines, and read their outputs."""
        while self._running:
            name = next(iter(self._running))
            outcome = self._running[name].outcome(self._given_up)
            del self._running[name]
            self._read(name, outcome)

    def cancel(self) -> None:
        """Give up the coroutines that still run."""
        for call in self._running.values():
            call.cancel()

    def _call_all(self, functions: Sequence[NamedReward], indices: list[int]) -> None:
        """Start coroutines on these completions of the part, and call the sync functions."""
        if not functions or not indices:
            return
        self._indices, self._called = indices, self.batch.select(indices)
        calls = {}
        for function in functions:
            log = Log(len(indices))
            self.logs[function.name] = log, self._called.places
            if function.function is not None:
                bound = arguments(function, self._called, log)
                calls[function.name] = functools.partial(function.function, **bound)
        for function in functions:
            if function.is_async:
                self._running[function.name] = AsyncCall(
                    calls[function.name], self._config.timeout, self._config.loop
                )
        for function in functions:
            if function.function is None:
                self._score_by_task(function.name)
            elif not function.is_async:
                self._read(function.name, self._call(function, calls[function.name]))

    def _call(self, function: NamedReward, bound: Callable[[], Any]) -> CallOutcome:
        # What it started outside of this process would go on.
        abandon = getattr(function.function, "abandon", lambda: None)
        try:
            outcome = call_with_time_limit(bound, self._config.timeout, self._given_up)
        except Cancelled:
            abandon()
            raise
        if outcome.timed_out:
            abandon()
        return outcome

    def _read(self, name: str, outcome: CallOutcome) -> None:
        """Read the outputs of one call; a failure stops, or marks the completions and drops the
        log."""
        batch = self._called
        wrong = self._failure(outcome)
        if wrong is None:
            written = [np.flatnonzero(one.written).tolist() for one in batch.completions]
            try:
                outputs = read_rewards(outcome.value, written)
            except BadReturn as error:
                wrong = str(error)
            else:
                for index, output in enumerate(outputs):
                    self._take(name, index, output, outcome)
                return
        first, last = batch.prompts[0].id, batch.prompts[-1].id
        self._stop(
            name, f" ({len(batch)} completions, prompts {first!r} to {last!r})", wrong, outcome
        )
        del self.logs[name]
        for index in range(len(batch)):
            self.outputs[name][self._indices[index]] = RewardOutput(wrong=wrong)

    def _score_by_task(self, name: str) -> None:
        """Read the tasks' own scores; each is a call with its own timeout."""
        calls, tasks, batch = [], self._config.tasks, self._called
        for prompt, completion in zip(batch.prompts, batch.completions, strict=True):
            if prompt.task not in tasks:
                raise KeelError(f"prompt {prompt.id!r}: {unknown('task', prompt.task, tasks)}")
            calls.append(functools.partial(tasks[prompt.task].score, prompt, completion))
        for index, outcome in enumerate(call_each(calls, self._config.timeout, self._given_up)):
            wrong = self._failure(outcome)
            if wrong is not None:
                output = RewardOutput(wrong=wrong)
            else:
                (output,) = read_rewards([outcome.value], [range(len(batch.completions[index]))])
            self._take(name, index, output, outcome)

    def _take(self, name: str, index: int, output: RewardOutput, outcome: CallOutcome) -> None:
        """Keep the output for one completion of the call."""
        if output.wrong is not None:
            place, prompt = self._called.places[index], self._called.prompts[index]
            self._stop(name, f": sample {place} (prompt {prompt.id!r})", output.wrong, outcome)
        self.outputs[name][self._indices[index]] = output

    def _stop(self, name: str, where: str, wrong: str, outcome: CallOutcome) -> None:
        """Raise KeelError for a failure, if it stops the run."""
        if self._config.on_error == "skip":
            return
        # The message of a user's function may hold a key of its own.
        line = without_secrets(f"reward {name!r} at step {self.batch.step}{where}: {wrong}")
        error = Hung(line, outcome.stack) if outcome.timed_out else KeelError(line)
        raise error from outcome.error

    def _failure(self, outcome: CallOutcome) -> str | None:
        if outcome.timed_out:
            where = f" ({place(outcome.stack)})" if outcome.stack else ""
            return (
                f"hangs: no answer within {self._config.timeout:g} s{where}: fix it, or raise "
                "rewards.timeout"
            )
        if outcome.error is None:
            return None
        if isinstance(outcome.error, KeelError):
            return one_line(outcome.error)
        return f"raised {one_line(outcome.error, named=True)}{_line(outcome.error)}"


def _line(error: BaseException) -> str:
    """Where an error arose, as ` (file.py:12)`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    name = trace.tb_frame.f_code.co_filename.rpartition("/")[2]
    return f" ({name}:{trace.tb_lineno})"


class Failed(BaseException):
    """A part could not be scored: no more needs to be sampled. `Overlap` raises the cause."""


class Overlap:
    """Scores a step while it is sampled, in one thread. To be entered; after leaving, no thread is
    left but that of a function that hangs (`rewards.executor`).

    Leaving with an error of the sampling gives up the calls that run.
    """

    def __init__(self, config: CallConfig, prompts: Sequence[Prompt], step: int) -> None:
        self._config = config
        self._step = step
        self._names = column_names(prompts)
        self._size = max(1, -(-len(prompts) // PARTS))
        self._groups: list[Group | None] = [None] * len(prompts)
        self._first = self._before = 0
        """Groups that are in parts, and the completions in them."""
        self._parts: queue.SimpleQueue[RewardCall | None] = queue.SimpleQueue()
        self._calls: list[RewardCall] = []
        self._given_up = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._score, name="keel-overlap", daemon=True)

    def add(self, place: int, group: Group) -> None:
        """Add a group by the place of its prompt. Raises Failed if a part could not be scored."""
        self._groups[place] = without_stop(group, self._config.stop)
        if self._error is not None:
            raise Failed
        while self._first < len(self._groups):
            ready = [g for g in self._groups[self._first :][: self._size] if g is not None]
            if len(ready) < min(self._size, len(self._groups) - self._first):
                return
            batch = RewardBatch.of(ready, self._step, self._names, self._before)
            self._first += len(ready)
            self._before += len(batch)
            self._parts.put(RewardCall(self._config, batch, lambda: self._given_up))

    def calls(self) -> list[RewardCall]:
        """The call of each part, once all groups are in. Raises the error of one that failed."""
        if self._first < len(self._groups):
            raise ValueError("not every group was added")
        self._parts.put(None)
        while self._thread.is_alive():
            self._thread.join(POLL)
            raise_if_cancelled()
        self._raise()
        return self._calls

    def __enter__(self) -> Overlap:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._given_up = kind is not None
        self._parts.put(None)
        self._thread.join()
        if kind is Failed:
            self._raise()

    def _score(self) -> None:
        try:
            while (part := self._parts.get()) is not None:
                self._calls.append(part)
                part.start()
            for part in self._calls:
                part.finish()
        except Cancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            for part in self._calls:
                part.cancel()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
