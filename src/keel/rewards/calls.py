"""Calls of the reward functions on parts of a step, one part or, while a step is sampled, several.

Sampled groups, in the order of their prompts, are divided into at most `PARTS` parts of equal
numbers of groups. A part is scored once all its groups are there and the calls of all parts before
it have begun: what a function is called with, and in which order, depends on the step alone and not
on time. Sync functions are called one at a time; coroutines of several parts run concurrently.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import numpy as np

from keel.config.fields import unknown
from keel.config.secrets import without_secrets
from keel.rewards.batch import Log, RewardBatch, arguments, column_names, without_stop
from keel.rewards.executor import POLL, AsyncCalls, CallOutcome, call, call_each
from keel.rewards.registry import NamedReward
from keel.rewards.validation import BadReturn, RewardOutput, read_rewards
from keel.runs.loop_thread import LoopThread
from keel.runs.watchdog import Cancelled, GivesUp, Hung, place, raise_if_cancelled
from keel.types import Completion, Group, KeelError, Prompt, Task

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

    Gates are called first, and the others with the completions that pass. `run` raises KeelError
    for a failure that stops the run, and Cancelled once `given_up()`.
    """

    def __init__(
        self, config: CallConfig, batch: RewardBatch, given_up: GivesUp | None = None
    ) -> None:
        self.batch = batch
        self.outputs = {f.name: [RewardOutput()] * len(batch) for f in config.functions}
        self.logs: dict[str, tuple[Log, tuple[int, ...]]] = {}
        self._config = config
        self._given_up = given_up
        self._running: AsyncCalls | None = None
        self._indices: list[int] = []
        self._passed = batch

    def run(self, begun: Callable[[], object] = lambda: None) -> None:
        """Call all functions; `begun` is called when only coroutines still run."""
        gates = [f for f in self._config.functions if f.gate_below is not None]
        others = [f for f in self._config.functions if f.gate_below is None]
        passing = list(range(len(self.batch)))
        try:
            if gates and passing:
                self._start(gates, passing)
                self._finish()
                passing = [i for i in passing if not any(self._shuts(gate, i) for gate in gates)]
            if others and passing:
                self._start(others, passing)
            begun()
            self._finish()
        except BaseException:
            if self._running is not None:
                self._running.cancel()
            raise

    def _shuts(self, gate: NamedReward, index: int) -> bool:
        return gate.shuts(self.outputs[gate.name][index].value)

    def _start(self, functions: Sequence[NamedReward], indices: list[int]) -> None:
        """Start coroutines on these completions of the part, and call the sync functions."""
        self._indices, self._passed = indices, self.batch.select(indices)
        calls = {}
        for function in functions:
            log = Log()
            self.logs[function.name] = log, self._passed.places
            if function.function is not None:
                bound = arguments(function, self._passed, log)
                calls[function.name] = functools.partial(function.function, **bound)
        waiting = {f.name: calls[f.name] for f in functions if f.is_async}
        self._running = AsyncCalls(waiting, self._config.timeout, self._config.loop)
        for function in functions:
            if function.function is None:
                self._take(function.name, self._task_results(function.name))
            elif not function.is_async:
                outcome = self._call(function, calls[function.name])
                self._take(function.name, self._read(function.name, outcome))

    def _finish(self) -> None:
        """Wait for the coroutines, and read their outputs."""
        if self._running is not None:
            for name, outcome in self._running.outcomes(self._given_up).items():
                self._take(name, self._read(name, outcome))
            self._running = None

    def _take(self, name: str, outputs: Sequence[RewardOutput]) -> None:
        for index, output in zip(self._indices, outputs, strict=True):
            self.outputs[name][index] = output

    def _call(self, function: NamedReward, bound: Callable[[], Any]) -> CallOutcome:
        # What it started outside of this process would go on.
        abandon = getattr(function.function, "abandon", lambda: None)
        try:
            outcome = call(bound, self._config.timeout, self._given_up)
        except Cancelled:
            abandon()
            raise
        if outcome.timed_out:
            abandon()
        return outcome

    def _read(self, name: str, outcome: CallOutcome) -> list[RewardOutput]:
        """The outputs of one call; a failure stops, or marks the completions and drops the log."""
        batch = self._passed
        wrong = self._failure(outcome) or self.logs[name][0].wrong(len(batch))
        if wrong is None:
            try:
                outputs = _outputs(outcome.value, batch.completions)
            except BadReturn as error:
                wrong = str(error)
            else:
                for index, output in enumerate(outputs):
                    self._stop_at(name, index, output, outcome)
                return outputs
        if self._config.on_error == "stop":
            first, last = batch.prompts[0].id, batch.prompts[-1].id
            range_ = f"{len(batch)} completions, prompts {first!r} to {last!r}"
            line = f"reward {name!r} at step {batch.step} ({range_}): {wrong}"
            raise _error(line, outcome) from outcome.error
        del self.logs[name]
        return [RewardOutput(wrong=wrong)] * len(batch)

    def _task_results(self, name: str) -> list[RewardOutput]:
        """The tasks' own scores; each is a call with its own timeout."""
        calls, tasks, batch = [], self._config.tasks, self._passed
        for prompt, completion in zip(batch.prompts, batch.completions, strict=True):
            if prompt.task not in tasks:
                raise KeelError(f"prompt {prompt.id!r}: {unknown('task', prompt.task, tasks)}")
            calls.append(functools.partial(tasks[prompt.task].score, prompt, completion))
        outputs: list[RewardOutput] = []
        for outcome in call_each(calls, self._config.timeout, self._given_up):
            wrong = self._failure(outcome)
            if wrong is not None:
                output = RewardOutput(wrong=wrong)
            else:
                output = read_rewards([outcome.value], [len(batch.completions[len(outputs)])])[0]
            self._stop_at(name, len(outputs), output, outcome)
            outputs.append(output)
        return outputs

    def _stop_at(self, name: str, index: int, output: RewardOutput, outcome: CallOutcome) -> None:
        """Raise KeelError for a completion that cannot be scored, where that stops the run."""
        if output.wrong is not None and self._config.on_error == "stop":
            batch = self._passed
            sample = f"sample {batch.places[index]} (prompt {batch.prompts[index].id!r})"
            line = f"reward {name!r} at step {batch.step}: {sample}: {output.wrong}"
            raise _error(line, outcome) from outcome.error

    def _failure(self, outcome: CallOutcome) -> str | None:
        if outcome.timed_out:
            where = f" ({place(outcome.stack)})" if outcome.stack else ""
            return (
                f"hangs: no answer within {self._config.timeout:g} s{where}: fix it, or raise "
                "rewards.timeout"
            )
        if outcome.error is None:
            return None
        message = " ".join(str(outcome.error).split())
        if isinstance(outcome.error, KeelError):
            return message
        return f"raised {type(outcome.error).__name__}: {message}{_line(outcome.error)}"


def _outputs(returned: Any, completions: Sequence[Completion]) -> list[RewardOutput]:
    """What a function returned, its step ends moved from written tokens to the completion's.

    Raises BadReturn.
    """
    places = [np.flatnonzero(completion.written).tolist() for completion in completions]
    return [
        replace(one, steps=tuple(replace(step, end=at[step.end]) for step in one.steps))
        if one.steps
        else one
        for one, at in zip(read_rewards(returned, [len(at) for at in places]), places, strict=True)
    ]


def _error(line: str, outcome: CallOutcome) -> KeelError:
    line = without_secrets(line)  # the message of a user's function may hold a key of its own
    return Hung(line, outcome.stack) if outcome.timed_out else KeelError(line)


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
    """Scores a step while it is sampled. To be entered; after leaving, none of its threads is left
    but that of a function that hangs (`rewards.executor`).

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
        self._parts: list[_Part] = []
        self._given_up = False

    def add(self, place: int, group: Group) -> None:
        """Add a group by the place of its prompt.

        Raises Failed where an earlier part could not be scored.
        """
        self._groups[place] = without_stop(group, self._config.stop)
        if self._failed_before(len(self._parts)):
            raise Failed
        while self._first < len(self._groups):
            ready = [g for g in self._groups[self._first :][: self._size] if g is not None]
            if len(ready) < min(self._size, len(self._groups) - self._first):
                return
            self._begin(ready)

    def calls(self) -> list[RewardCall]:
        """The call of each part, once all groups are in.

        Raises the error of the first part that could not be scored.
        """
        if self._first < len(self._groups):
            raise ValueError("not every group was added")
        while self._running():
            raise_if_cancelled()
        self._raise()
        return [part.call for part in self._parts]

    def __enter__(self) -> Overlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._given_up = kind is not None and kind is not Failed
        while self._running():
            pass
        if kind is Failed:
            self._raise()

    def _begin(self, groups: Sequence[Group]) -> None:
        """Score a part in a thread of its own, once the one before has begun."""
        number = len(self._parts)
        batch = RewardBatch.of(groups, self._step, self._names, self._before)

        def given_up() -> bool:
            return self._given_up or self._failed_before(number)

        before = self._parts[-1].begun if self._parts else None
        self._first += len(groups)
        self._before += len(batch)
        self._parts.append(_Part(RewardCall(self._config, batch, given_up), before, given_up))
        self._parts[-1].start()

    def _failed_before(self, number: int) -> bool:
        """Whether a part before this one failed, which is then the one reported."""
        return any(part.error is not None for part in self._parts[:number])

    def _running(self) -> bool:
        """Wait a while for the threads; whether one still runs."""
        for part in self._parts:
            if part.is_alive():  # one that could not be started is not
                part.join(POLL)
                return True
        return False

    def _raise(self) -> None:
        for part in self._parts:
            if part.error is not None:
                raise part.error


class _Part(threading.Thread):
    """The thread that scores a part."""

    def __init__(self, call: RewardCall, before: threading.Event | None, given_up: GivesUp) -> None:
        super().__init__(name="keel-overlap", daemon=True)
        self.call = call
        self.error: BaseException | None = None
        self.begun = threading.Event()
        self._before, self._given_up = before, given_up

    def run(self) -> None:
        try:
            if self._before is not None:
                self._before.wait()  # it is set however the part before ends
            if not self._given_up():
                self.call.run(self.begun.set)
        except Cancelled:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.begun.set()
