"""The scorer: groups of completions in, verdicts out."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from keel.config.secrets import without_secrets
from keel.config.suggest import unknown
from keel.rewards.batch import Batch, Log, Logged, arguments, columns
from keel.rewards.calling import AsyncCalls, LoopThread, Outcome, call, call_each
from keel.rewards.checking import BadReturn, Said, read_rewards
from keel.rewards.compose import Composed, compose, shut
from keel.rewards.loading import RESERVED, TASK, NamedReward
from keel.rewards.overlong import soft_overlong
from keel.runs.watchdog import Hung, place
from keel.types import Completion, Group, KeelError, Prompt, Task, Verdict

OVERLONG = "overlong"
"""The component of soft overlong punishment."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What the rewards said of a step.

    `verdicts` by group; `metrics` are each component's mean and std (`rewards/NAME/mean`, unbiased
    `rewards/NAME/std`; absent where too few spoke) and what functions logged; `extras` what they
    logged a completion, in order; `failures` how many completions each left out by `on_error`.
    """

    verdicts: tuple[tuple[Verdict, ...], ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, list[Any]] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)


class Scorer:
    """Calls reward functions on a step's groups, and weighs what they say.

    With no functions, the task's own verdict is the reward. `timeout` is in seconds, for one call
    of one function (a verdict of a task is a call). With `on_error = "skip"` a completion that a
    function fails on goes without that component; with "stop" the failure is a KeelError that
    names the function, the step and, where it can be told, the sample. `overlong` is the number of
    tokens at the end of the budget `max_tokens` over which length is punished.
    """

    def __init__(
        self,
        functions: Sequence[NamedReward] = (),
        tasks: Mapping[str, Task] | None = None,
        *,
        timeout: float = 60.0,
        on_error: Literal["stop", "skip"] = "stop",
        soft_overlong: int = 0,
        max_tokens: int = 0,
    ) -> None:
        self.tasks = dict(tasks or {})
        self.by_task_alone = not functions
        self.functions = tuple(functions) or (NamedReward(TASK, None),)
        self.timeout = timeout
        self.on_error = on_error
        self.soft_overlong = soft_overlong
        self.max_tokens = max_tokens
        self._loop = LoopThread()
        names = [f.name for f in self.functions]
        for name in names:
            if names.count(name) > 1 or name == OVERLONG:
                raise KeelError(f"two rewards are named {name!r}: give one another `name`")
        if not any(f.weight for f in self.functions):
            raise KeelError(
                f"every reward has weight 0 ({', '.join(names)}), so nothing is learned from: "
                "give one a weight"
            )

    def __call__(self, groups: Sequence[Group], step: int) -> Scored:
        """Score the groups of a step."""
        batch = Batch(
            tuple(group.prompt for group in groups for _ in group.completions),
            tuple(completion for group in groups for completion in group.completions),
            step,
        )
        found = columns(batch)
        for function in self.functions:
            self._check_columns(function, found, batch)
        said, logged = self._said(batch)
        groups_S = [g for g, group in enumerate(groups) for _ in group.completions]
        flat = [
            self._verdict(said, composed, at, completion)
            for at, (completion, composed) in enumerate(
                zip(batch.completions, compose(self.functions, said, groups_S), strict=True)
            )
        ]
        ends = np.cumsum([0, *(len(group.completions) for group in groups)])
        names = [f.name for f in self.functions] + [OVERLONG] * bool(self.soft_overlong)
        gates = [f for f in self.functions if f.gate is not None]
        shares = {
            f"rewards/{f.name}/shut": float(np.mean([shut(f, one) for one in said[f.name]]))
            for f in gates
            if len(batch)
        }
        return Scored(
            verdicts=tuple(tuple(flat[a:b]) for a, b in itertools.pairwise(ends)),
            metrics={**logged.metrics, **_spread(flat, names), **shares},
            extras=logged.extras,
            failures={
                name: count
                for name, ones in said.items()
                if (count := sum(one.wrong is not None for one in ones))
            },
        )

    def close(self) -> None:
        """Let go of what the rewards hold: processes, connections, models; all of it, if some fail.

        The event loop goes last: some have work in it to end.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._loop.close)
            for function in reversed(self.functions):
                close = getattr(function.function, "close", None)
                if close is not None:
                    stack.callback(close)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Whether every column that a function requires is there. Raises KeelError, calls nothing.

        Worth calling before the first step, with the first prompts.
        """
        batch = Batch(tuple(prompts), (), 0)
        for function in self.functions:
            self._check_columns(function, columns(batch), batch)

    def _check_columns(
        self, function: NamedReward, found: Mapping[str, list[Any]], batch: Batch
    ) -> None:
        if len({p.task for p in batch.prompts}) < len(self.tasks):
            return  # the column may be that of a task that this step did not draw from
        for name in function.required:
            if name not in RESERVED and name not in found and batch.prompts:
                known = unknown("column", name, found) if found else "the prompts have none"
                raise KeelError(
                    f"reward {function.name!r} needs the column {name!r}: {known} "
                    "(task.answer names the gold answer's column)"
                )

    def _said(self, batch: Batch) -> tuple[dict[str, list[Said]], Logged]:
        """What each function says of each completion, and what all of them logged.

        Gates come first; what one of them shuts out, the others are not asked about.
        """
        logged = Logged()
        said = {f.name: [Said()] * len(batch) for f in self.functions}
        gates = [f for f in self.functions if f.gate is not None]
        rest = [f for f in self.functions if f.gate is None]
        open_places = list(range(len(batch)))
        for functions in (gates, rest):
            if not functions or not open_places:
                continue
            for name, ones in self._ask(
                functions, batch.select(open_places), logged, open_places, len(batch)
            ).items():
                for at, one in zip(open_places, ones, strict=True):
                    said[name][at] = one
            open_places = [
                at for at in open_places if not any(shut(f, said[f.name][at]) for f in gates)
            ]
        return said, logged

    def _ask(
        self,
        functions: Sequence[NamedReward],
        batch: Batch,
        logged: Logged,
        places: Sequence[int],
        size: int,
    ) -> dict[str, list[Said]]:
        """What these functions say of each completion of a batch, side by side."""
        logs = {f.name: Log() for f in functions}
        found = columns(batch)
        calls = {
            f.name: functools.partial(f.function, **arguments(f, batch, found, logs[f.name]))
            for f in functions
            if f.function is not None
        }
        waiting = {f.name: calls[f.name] for f in functions if f.is_async}
        running = AsyncCalls(waiting, self.timeout, self._loop)
        said: dict[str, list[Said]] = {}
        try:
            for function in functions:
                if function.function is None:
                    said[function.name] = self._task_verdicts(function.name, batch, places)
                elif not function.is_async:
                    outcome = call(calls[function.name], self.timeout)
                    if outcome.timed_out:
                        # What it started outside of this process would go on.
                        getattr(function.function, "abandon", lambda: None)()
                    said[function.name] = self._read(function.name, outcome, batch, places, logs)
            for name, outcome in running.outcomes().items():
                said[name] = self._read(name, outcome, batch, places, logs)
        except BaseException:
            running.cancel()
            raise
        for name, log in logs.items():
            logged.take(name, log, places, size)
        return said

    def _read(
        self,
        name: str,
        outcome: Outcome,
        batch: Batch,
        places: Sequence[int],
        logs: dict[str, Log],
    ) -> list[Said]:
        """The values of one call; a failure stops, or marks the completions and drops the log."""
        where = f"reward {name!r} at step {batch.step}"
        wrong = self._failure(outcome) or logs[name].wrong(len(batch))
        if wrong is None:
            try:
                said = read_rewards(outcome.value, [len(c) for c in batch.completions])
            except BadReturn as error:
                wrong = str(error)
            else:
                for at, one in enumerate(said):
                    if one.wrong is not None and self.on_error == "stop":
                        raise _error(f"{where}: {_sample(batch, at, places)}: {one.wrong}", outcome)
                return said
        if self.on_error == "stop":
            raise _error(f"{where} ({_range(batch)}): {wrong}", outcome) from outcome.error
        del logs[name]
        return [Said(wrong=wrong)] * len(batch)

    def _task_verdicts(self, name: str, batch: Batch, places: Sequence[int]) -> list[Said]:
        """The tasks' own verdicts; each is a call with its own timeout."""
        calls = []
        for prompt, completion in zip(batch.prompts, batch.completions, strict=True):
            if prompt.task not in self.tasks:
                raise KeelError(f"prompt {prompt.id!r}: {unknown('task', prompt.task, self.tasks)}")
            calls.append(functools.partial(self.tasks[prompt.task].score, prompt, completion))
        said: list[Said] = []
        for outcome in call_each(calls, self.timeout):
            wrong = self._failure(outcome)
            one = (
                Said(wrong=wrong)
                if wrong is not None
                else read_rewards([outcome.value], [len(batch.completions[len(said)])])[0]
            )
            if one.wrong is not None and self.on_error == "stop":
                where = f"reward {name!r} at step {batch.step}: {_sample(batch, len(said), places)}"
                raise _error(f"{where}: {one.wrong}", outcome) from outcome.error
            said.append(one)
        if self.by_task_alone:
            _someone_spoke(batch, said)
        return said

    def _failure(self, outcome: Outcome) -> str | None:
        if outcome.timed_out:
            where = f" ({place(outcome.stack)})" if outcome.stack else ""
            return (
                f"hangs: no answer within {self.timeout:g} s{where}: mend it, or raise "
                "rewards.timeout"
            )
        if outcome.error is None:
            return None
        message = " ".join(str(outcome.error).split())
        if isinstance(outcome.error, KeelError):
            return message
        return f"raised {type(outcome.error).__name__}: {message}{_line(outcome.error)}"

    def _verdict(
        self,
        said: Mapping[str, list[Said]],
        composed: Composed,
        at: int,
        completion: Completion,
    ) -> Verdict:
        """What is kept of one completion: its reward, and each component as it was said."""
        components = {f.name: said[f.name][at].value for f in self.functions}
        reward = composed.reward
        if self.soft_overlong:
            # Length alone is no verdict: where nothing else applies, neither does this.
            punishment = soft_overlong(len(completion), self.max_tokens, self.soft_overlong)
            components[OVERLONG] = None if reward is None else punishment
            reward = None if reward is None else reward + punishment
        return Verdict(reward=reward, components=components, steps=composed.steps)


def _error(line: str, outcome: Outcome) -> KeelError:
    """What a function of the user's says in it may hold a key of its own."""
    line = without_secrets(line)
    return Hung(line, outcome.stack) if outcome.timed_out else KeelError(line)


def _someone_spoke(batch: Batch, said: Sequence[Said]) -> None:
    """Raise KeelError where a task is asked for the reward and told nothing of any answer."""
    spoke = {p.task: False for p in batch.prompts}
    for prompt, one in zip(batch.prompts, said, strict=True):
        spoke[prompt.task] |= one.value is not None or one.wrong is not None
    for task, it_did in spoke.items():
        if not it_did:
            raise KeelError(
                f"task {task!r} cannot tell what an answer is worth: set rewards.functions, or "
                "task.answer for exact match with a column"
            )


def _spread(verdicts: Sequence[Verdict], names: Sequence[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in names:
        values = [v.components[name] for v in verdicts if v.components[name] is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = float(np.mean(values))  # type: ignore[arg-type]
        if len(values) > 1:
            metrics[f"rewards/{name}/std"] = float(np.std(values, ddof=1))  # type: ignore[arg-type]
    return metrics


def _sample(batch: Batch, at: int, places: Sequence[int]) -> str:
    """A completion by its place among all of the step, those behind a shut gate counted."""
    return f"sample {places[at]} (prompt {batch.prompts[at].id!r})"


def _range(batch: Batch) -> str:
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
