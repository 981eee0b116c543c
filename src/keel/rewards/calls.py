"""Calls of the reward functions on the completions of a step: call, time limit, validation.

While a step is sampled, its groups, in the order of their prompts, are divided into at most `PARTS`
parts of equal numbers of groups, which are scored one after the other: what a function is called
with, and in which order, depends on the step alone and not on time. Sync functions are called one
at a time; coroutines of several parts run concurrently.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Literal

import numpy as np

from keel.config.fields import unknown
from keel.config.secrets import without_secrets
from keel.graders.formats import before_stop
from keel.platform.calls import (
    POLL,
    AsyncCall,
    CallOutcome,
    LoopThread,
    call_each,
    call_with_time_limit,
)
from keel.platform.time_limit import Cancelled, Hung, cancelled_by, place, raise_if_cancelled
from keel.rewards.outputs import BadReturn, Log, RewardOutput, read_rewards
from keel.rewards.registry import RESERVED, NamedReward
from keel.types import Completion, Group, KeelError, Message, Prompt, Task, one_line, text_of


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """Completions of a step with the prompt of each, and their `places` among all of the step.

    `names` are the columns of the step's prompts.
    """

    prompts: tuple[Prompt, ...]
    completions: tuple[Completion, ...]
    places: tuple[int, ...]
    names: tuple[str, ...]
    step: int

    @classmethod
    def of(
        cls, groups: Sequence[Group], step: int, names: tuple[str, ...], first: int = 0
    ) -> RewardBatch:
        """The completions of groups, the first of which is number `first` of the step."""
        pairs = [(group.prompt, one) for group in groups for one in group.completions]
        places = tuple(range(first, first + len(pairs)))
        return cls(tuple(p for p, _ in pairs), tuple(c for _, c in pairs), places, names, step)

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, indices: Sequence[int]) -> RewardBatch:
        """Some of them, in this order."""
        return RewardBatch(
            tuple(self.prompts[i] for i in indices),
            tuple(self.completions[i] for i in indices),
            tuple(self.places[i] for i in indices),
            self.names,
            self.step,
        )


def without_stop(group: Group, stop: Sequence[str]) -> Group:
    """The group with the texts of its completions up to the stop string that ended them."""

    def cut(one: Completion) -> Completion:
        *turns, last = one.conversation
        written = text_of(last)
        left = before_stop(written, stop)
        if one.finish != "stop" or left == written or last["role"] != "assistant":
            return one
        changed: Message = {**last, "content": left}
        text = one.text.removesuffix(written) + left
        return replace(one, text=text, turns=(*turns, changed) if one.turns else ())

    return replace(group, completions=tuple(map(cut, group.completions)))


def column_names(prompts: Iterable[Prompt | Completion]) -> tuple[str, ...]:
    """Every column that some prompt, or completion, has."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return tuple(name for name in names if name not in RESERVED)


def arguments(function: NamedReward, batch: RewardBatch, log: Log) -> dict[str, Any]:
    """The keyword arguments of a call: the bound options, and what the function wants.

    Of each column a value for each completion, None if its prompt has none.
    """
    any_tools = any(p.tools for p in batch.prompts)
    given: dict[str, Any] = {
        **dict.fromkeys(function.required, [None] * len(batch)),
        **{
            name: [
                c.columns.get(name, p.columns.get(name))
                for p, c in zip(batch.prompts, batch.completions, strict=True)
            ]
            for name in (*batch.names, *column_names(batch.completions))
        },
        # As the chat template gets them, also if the data have JSON text.
        **({"tools": [list(p.tools) for p in batch.prompts]} if any_tools else {}),
        "prompts": [
            p.content if isinstance(p.content, str) else _turns(p.content) for p in batch.prompts
        ],
        # What the policy wrote: a reply of the environment may spell the answer.
        "completions": [
            c.text
            if isinstance(p.content, str)
            else [turn for turn in _turns(c.conversation) if turn["role"] == "assistant"]
            for p, c in zip(batch.prompts, batch.completions, strict=True)
        ],
        "completion_ids": [c.tokens[c.written].tolist() for c in batch.completions],
        "openings": [p.opening for p in batch.prompts],
        "turns": [_turns(c.conversation) for c in batch.completions],
        "trainer_state": SimpleNamespace(global_step=batch.step),
        "log_extra": log.extra,
        "log_metric": log.metric,
        "log_summary": log.summarise,
    }
    # Copies: what one function does to its arguments, no other sees, and no later step.
    return {
        **function.options,
        **{name: _copy(value) for name, value in given.items() if function.wants(name)},
    }


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(turn) for turn in messages]


def _copy(value: Any) -> Any:
    """Lists and dicts copied all the way down; what else there is stays the same object."""
    if isinstance(value, list):
        return [_copy(one) for one in value]
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return value


PARTS = 8
"""Calls of each function in a step, at the most: a call may work in parallel, and does it the
better the more it gets, so that many small ones could take longer than they save."""


class StepCalls:
    """The calls of all functions on the parts of a step, and what they gave.

    `outputs` are by function and by the place of the completion in the step; `logs` are of each
    call that succeeded, with the places of its completions. `add` and `finish` raise KeelError for
    a failure that stops the run, and Cancelled if the thread's work is.
    """

    def __init__(
        self,
        functions: Sequence[NamedReward],
        tasks: Mapping[str, Task],
        *,
        timeout: float,
        on_error: Literal["stop", "skip"],
        loop: LoopThread,
    ) -> None:
        self.functions, self.tasks = functions, tasks
        self.timeout, self.on_error, self.loop = timeout, on_error, loop
        self.outputs: dict[str, dict[int, RewardOutput]] = {f.name: {} for f in functions}
        self.logs: dict[str, list[tuple[Log, tuple[int, ...]]]] = {f.name: [] for f in functions}
        self._running: list[tuple[str, AsyncCall, RewardBatch, Log]] = []

    def add(self, part: RewardBatch) -> None:
        """Call gates, and the other functions with the completions that pass.

        Coroutines that are no gates still run after it. Completions whose program failed are shown
        to no function.
        """
        gates = [f for f in self.functions if f.source.gate_below is not None]
        others = [f for f in self.functions if f.source.gate_below is None]
        part = part.select([at for at, one in enumerate(part.completions) if not one.failed])
        if gates and part:
            before = len(self._running)
            self._start(gates, part)
            self._finish_from(before)
            part = part.select(
                [
                    at
                    for at, place in enumerate(part.places)
                    if not any(g.gates(self.outputs[g.name][place].value) for g in gates)
                ]
            )
        if others and part:
            self._start(others, part)

    def finish(self) -> None:
        """Wait for the coroutines, and read their outputs."""
        self._finish_from(0)

    def cancel(self) -> None:
        """Give up the coroutines that still run."""
        for _, running, _, _ in self._running:
            running.cancel()

    def _start(self, functions: Sequence[NamedReward], part: RewardBatch) -> None:
        """Start coroutines, and call the other functions."""
        logs = {f.name: Log(len(part)) for f in functions}
        bound = {
            f.name: functools.partial(f.function, **arguments(f, part, logs[f.name]))
            for f in functions
            if f.function is not None
        }
        for function in functions:
            if function.is_async:
                running = AsyncCall(bound[function.name], self.timeout, self.loop)
                self._running.append((function.name, running, part, logs[function.name]))
        for function in functions:
            if function.function is None:
                self._score_by_task(function.name, part)
            elif not function.is_async:
                outcome = self._call(function, bound[function.name])
                self._read(function.name, outcome, part, logs[function.name])

    def _finish_from(self, first: int) -> None:
        """Wait for the coroutines from a number on, and read their outputs."""
        while len(self._running) > first:
            name, running, part, log = self._running[first]
            outcome = running.outcome()
            del self._running[first]
            self._read(name, outcome, part, log)

    def _call(self, function: NamedReward, bound: Callable[[], Any]) -> CallOutcome:
        # What it started outside of this process would go on.
        abandon = getattr(function.function, "abandon", lambda: None)
        try:
            outcome = call_with_time_limit(bound, self.timeout)
        except Cancelled:
            abandon()
            raise
        if outcome.timed_out:
            abandon()
        return outcome

    def _read(self, name: str, outcome: CallOutcome, part: RewardBatch, log: Log) -> None:
        """Read the outputs of one call; a failure stops, or marks the completions and drops the
        log."""
        wrong = self._failure(outcome)
        if wrong is None:
            written = [np.flatnonzero(one.written).tolist() for one in part.completions]
            try:
                outputs = read_rewards(outcome.value, written)
            except BadReturn as error:
                wrong = str(error)
            else:
                for at, output in enumerate(outputs):
                    self._take(name, part, at, output, outcome)
                self.logs[name].append((log, part.places))
                return
        first, last = part.prompts[0].id, part.prompts[-1].id
        where = f" ({len(part)} completions, prompts {first!r} to {last!r})"
        self._stop(name, part.step, where, wrong, outcome)
        self.outputs[name] |= dict.fromkeys(part.places, RewardOutput(wrong=wrong))

    def _score_by_task(self, name: str, part: RewardBatch) -> None:
        """Read the tasks' own scores; each is a call with its own timeout."""
        calls = []
        for prompt, completion in zip(part.prompts, part.completions, strict=True):
            if prompt.task not in self.tasks:
                known = unknown("task", prompt.task, self.tasks)
                raise KeelError(f"prompt {prompt.id!r}: {known}")
            calls.append(functools.partial(self.tasks[prompt.task].score, prompt, completion))
        with closing(call_each(calls, self.timeout)) as outcomes:
            for at, outcome in enumerate(outcomes):
                output = RewardOutput(wrong=self._failure(outcome))
                if output.wrong is None:
                    (output,) = read_rewards([outcome.value], [range(len(part.completions[at]))])
                self._take(name, part, at, output, outcome)

    def _take(
        self, name: str, part: RewardBatch, at: int, output: RewardOutput, outcome: CallOutcome
    ) -> None:
        """Keep the output for one completion of a part."""
        place = part.places[at]
        if output.wrong is not None:
            where = f": sample {place} (prompt {part.prompts[at].id!r})"
            self._stop(name, part.step, where, output.wrong, outcome)
        self.outputs[name][place] = output

    def _stop(self, name: str, step: int, where: str, wrong: str, outcome: CallOutcome) -> None:
        """Raise KeelError for a failure, if it stops the run."""
        if self.on_error == "skip":
            return
        # The message of a user's function may hold a key of its own.
        line = without_secrets(f"reward {name!r} at step {step}{where}: {wrong}")
        error = Hung(line, outcome.stack) if outcome.timed_out else KeelError(line)
        raise error from outcome.error

    def _failure(self, outcome: CallOutcome) -> str | None:
        if outcome.timed_out:
            where = f" ({place(outcome.stack)})" if outcome.stack else ""
            return (
                f"hangs: no answer within {self.timeout:g} s{where}: fix it, or raise "
                "rewards.timeout"
            )
        if outcome.error is None:
            return None
        if isinstance(outcome.error, KeelError):
            return one_line(outcome.error)
        return f"raised {one_line(outcome.error, named=True)}{_line(outcome.error)}"


def _line(error: BaseException) -> str:
    """Where an error arose, as ` (file.py:12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


class Failed(BaseException):
    """A part could not be scored: no more needs to be sampled. `Overlap` raises the cause."""


class Overlap:
    """Scores a step while it is sampled, in one thread. To be entered; after leaving, no thread is
    left but that of a function that hangs (`keel.platform.calls`).

    Leaving with an error of the sampling gives up the calls that run.
    """

    def __init__(
        self, calls: StepCalls, prompts: Sequence[Prompt], step: int, stop: Sequence[str]
    ) -> None:
        self._calls = calls
        self._step, self._stop = step, stop
        self._names = column_names(prompts)
        self._size = max(1, -(-len(prompts) // PARTS))
        self._groups: list[Group | None] = [None] * len(prompts)
        self._first = self._before = 0
        """Groups that are in parts, and the completions in them."""
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._thread = ThreadPoolExecutor(1, "keel-overlap")

    def add(self, place: int, group: Group) -> None:
        """Add a group by the place of its prompt. Raises Failed if a part could not be scored."""
        self._groups[place] = without_stop(group, self._stop)
        if self._error is not None:
            raise Failed
        while self._first < len(self._groups):
            ready = [g for g in self._groups[self._first :][: self._size] if g is not None]
            if len(ready) < min(self._size, len(self._groups) - self._first):
                return
            part = RewardBatch.of(ready, self._step, self._names, self._before)
            self._first += len(ready)
            self._before += len(part)
            self._thread.submit(self._run, functools.partial(self._calls.add, part))

    def finish(self) -> StepCalls:
        """The calls, once all groups are in and scored. Raises the error of a part that failed."""
        if self._first < len(self._groups):
            raise ValueError("not every group was added")
        last = self._thread.submit(self._run, self._calls.finish)
        while not wait([last], POLL).done:
            raise_if_cancelled()
        self._raise()
        return self._calls

    def __enter__(self) -> Overlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._cancelled.set()
        self._thread.shutdown(cancel_futures=kind is not None)
        self._calls.cancel()
        if kind is Failed:
            self._raise()

    def _run(self, work: Callable[[], None]) -> None:
        """In the thread; after an error nothing more is done."""
        if self._error is None:
            try:
                with cancelled_by(self._cancelled):
                    work()
            except BaseException as error:
                self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
