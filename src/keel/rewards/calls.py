"""What reward functions say of a part of a step: gates first, then the others."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from keel.config.secrets import without_secrets
from keel.config.suggest import unknown
from keel.rewards.batch import Log, RewardBatch, arguments, columns
from keel.rewards.compose import shut
from keel.rewards.executor import (
    AsyncCalls,
    CallOutcome,
    LoopThread,
    call,
    call_each,
)
from keel.rewards.registry import NamedReward
from keel.rewards.validation import BadReturn, RewardOutput, read_rewards
from keel.runs.cancel import Cancelled, GivesUp
from keel.runs.watchdog import Hung, place
from keel.types import Completion, KeelError, Task


@dataclass(frozen=True, eq=False)
class CallConfig:
    """How functions are called; see `Scorer`."""

    functions: Sequence[NamedReward]
    tasks: Mapping[str, Task]
    timeout: float
    on_error: Literal["stop", "skip"]
    loop: LoopThread

    @property
    def gates(self) -> list[NamedReward]:
        return [f for f in self.functions if f.gate_below is not None]

    @property
    def others(self) -> list[NamedReward]:
        return [f for f in self.functions if f.gate_below is None]


@dataclass(frozen=True, eq=False)
class BatchSlice:
    """Completions of a step that follow each other, `first` of the step the first of them.

    `names` are the columns of the step's prompts, which the functions are handed.
    """

    batch: RewardBatch
    first: int
    names: Sequence[str]


class RewardCall:
    """The functions being asked of one part.

    `begin` calls the gates and then, of what they let through, the others; it returns once the last
    function that is not async has answered. `end` waits for the async ones. Where either raises,
    `cancel`. Both raise KeelError for a failure that is to stop the run, and Cancelled once
    `given_up` says so.
    """

    def __init__(
        self, manner: CallConfig, part: BatchSlice, given_up: GivesUp | None = None
    ) -> None:
        self.part = part
        self.outputs = {f.name: [RewardOutput()] * len(part.batch) for f in manner.functions}
        self.logs: dict[str, tuple[Log, list[int]]] = {}
        """What each function logged, and of which completions of the step."""
        self._manner = manner
        self._given_up = given_up
        self._turn: _CallTurn | None = None

    def begin(self) -> None:
        """Ask, until nothing is left to wait for but coroutines."""
        manner, places = self._manner, list(range(len(self.part.batch)))
        if manner.gates and places:
            self._ask(manner.gates, places)
            self.end()
            places = [at for at in places if not any(self._shut(g, at) for g in manner.gates)]
        if manner.others and places:
            self._ask(manner.others, places)

    def end(self) -> None:
        """Wait for the coroutines under way, and read their outputs."""
        turn = self._turn
        if turn is None:
            return
        for name, outcome in turn.running.outcomes(self._given_up).items():
            turn.outputs[name] = self._read(name, outcome, turn)
        self._turn = None
        for name, ones in turn.outputs.items():
            for at, one in zip(turn.within, ones, strict=True):
                self.outputs[name][at] = one
        for name, log in turn.logs.items():
            self.logs[name] = log, turn.places

    def cancel(self) -> None:
        """Let no coroutine go on after an error."""
        if self._turn is not None:
            self._turn.running.cancel()

    def _shut(self, gate: NamedReward, at: int) -> bool:
        return shut(gate, self.outputs[gate.name][at])

    def _ask(self, functions: Sequence[NamedReward], within: list[int]) -> None:
        """Ask functions side by side of the completions at these places of the part."""
        manner, batch = self._manner, self.part.batch.select(within)
        logs = {f.name: Log() for f in functions}
        found = columns(batch, self.part.names)
        calls = {
            f.name: functools.partial(f.function, **arguments(f, batch, found, logs[f.name]))
            for f in functions
            if f.function is not None
        }
        waiting = {f.name: calls[f.name] for f in functions if f.is_async}
        running = AsyncCalls(waiting, manner.timeout, manner.loop)
        turn = self._turn = _CallTurn(
            batch, within, [self.part.first + at for at in within], logs, running, {}
        )
        for function in functions:
            if function.function is None:
                turn.outputs[function.name] = self._task_verdicts(function.name, turn)
            elif not function.is_async:
                outcome = self._call(function, calls[function.name])
                turn.outputs[function.name] = self._read(function.name, outcome, turn)

    def _call(self, function: NamedReward, bound: functools.partial[Any]) -> CallOutcome:
        # What it started outside of this process would go on.
        abandon = getattr(function.function, "abandon", lambda: None)
        try:
            outcome = call(bound, self._manner.timeout, self._given_up)
        except Cancelled:
            abandon()
            raise
        if outcome.timed_out:
            abandon()
        return outcome

    def _read(self, name: str, outcome: CallOutcome, turn: _CallTurn) -> list[RewardOutput]:
        """The values of one call; a failure stops, or marks the completions and drops the log."""
        batch = turn.batch
        where = f"reward {name!r} at step {batch.step}"
        wrong = self._failure(outcome) or turn.logs[name].wrong(len(batch))
        if wrong is None:
            try:
                outputs = _outputs(outcome.value, batch.completions)
            except BadReturn as error:
                wrong = str(error)
            else:
                for at, one in enumerate(outputs):
                    if one.wrong is not None and self._manner.on_error == "stop":
                        raise _error(f"{where}: {turn.sample(at)}: {one.wrong}", outcome)
                return outputs
        if self._manner.on_error == "stop":
            raise _error(f"{where} ({_range(batch)}): {wrong}", outcome) from outcome.error
        del turn.logs[name]
        return [RewardOutput(wrong=wrong)] * len(batch)

    def _task_verdicts(self, name: str, turn: _CallTurn) -> list[RewardOutput]:
        """The tasks' own verdicts; each is a call with its own timeout."""
        calls, tasks, batch = [], self._manner.tasks, turn.batch
        for prompt, completion in zip(batch.prompts, batch.completions, strict=True):
            if prompt.task not in tasks:
                raise KeelError(f"prompt {prompt.id!r}: {unknown('task', prompt.task, tasks)}")
            calls.append(functools.partial(tasks[prompt.task].score, prompt, completion))
        outputs: list[RewardOutput] = []
        for outcome in call_each(calls, self._manner.timeout, self._given_up):
            wrong = self._failure(outcome)
            one = (
                RewardOutput(wrong=wrong)
                if wrong is not None
                else read_rewards([outcome.value], [len(batch.completions[len(outputs)])])[0]
            )
            if one.wrong is not None and self._manner.on_error == "stop":
                where = f"reward {name!r} at step {batch.step}: {turn.sample(len(outputs))}"
                raise _error(f"{where}: {one.wrong}", outcome) from outcome.error
            outputs.append(one)
        return outputs

    def _failure(self, outcome: CallOutcome) -> str | None:
        if outcome.timed_out:
            where = f" ({place(outcome.stack)})" if outcome.stack else ""
            return (
                f"hangs: no answer within {self._manner.timeout:g} s{where}: fix it, or raise "
                "rewards.timeout"
            )
        if outcome.error is None:
            return None
        message = " ".join(str(outcome.error).split())
        if isinstance(outcome.error, KeelError):
            return message
        return f"raised {type(outcome.error).__name__}: {message}{_line(outcome.error)}"


@dataclass(frozen=True, eq=False)
class _CallTurn:
    """Gates, or the others, being asked: of `batch`, which stands `within` the part and at `places`
    of the step; and their outputs so far."""

    batch: RewardBatch
    within: list[int]
    places: list[int]
    logs: dict[str, Log]
    running: AsyncCalls
    outputs: dict[str, list[RewardOutput]]

    def sample(self, at: int) -> str:
        """A completion by its place among all of the step, those below the gate counted."""
        return f"sample {self.places[at]} (prompt {self.batch.prompts[at].id!r})"


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
    """What a function of the user's says in it may hold a key of its own."""
    line = without_secrets(line)
    return Hung(line, outcome.stack) if outcome.timed_out else KeelError(line)


def _range(batch: RewardBatch) -> str:
    first, last = batch.prompts[0].id, batch.prompts[-1].id
    return f"{len(batch)} completions, prompts {first!r} to {last!r}"


def _line(error: BaseException) -> str:
    """Where an error arose, as ` (file.py:12)`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    name = trace.tb_frame.f_code.co_filename.rpartition("/")[2]
    return f" ({name}:{trace.tb_lineno})"
