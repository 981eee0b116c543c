"""The scorer: groups of completions in, verdicts out."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from keel.config.suggest import unknown
from keel.rewards.calling import AsyncCalls, LoopThread, Outcome, call, call_each
from keel.rewards.checking import BadReturn, Said, read_rewards
from keel.rewards.loading import RESERVED, TASK, NamedReward
from keel.rewards.overlong import soft_overlong
from keel.types import Completion, Group, KeelError, Prompt, Step, Task, Verdict

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


@dataclass(frozen=True, slots=True)
class Batch:
    """The completions of a step one after the other, with the prompt of each."""

    prompts: tuple[Prompt, ...]
    completions: tuple[Completion, ...]
    step: int

    def __len__(self) -> int:
        return len(self.completions)


class Log:
    """What one call logs; kept apart, so that a call left behind writes nowhere."""

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def extra(self, name: str, values: Sequence[Any]) -> None:
        """A value for each completion."""
        self.extras[name] = list(values)

    def metric(self, name: str, value: float) -> None:
        """A number for the step; the mean where it comes several times."""
        self.metrics.setdefault(name, []).append(float(value))


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

    def __call__(self, groups: Sequence[Group], step: int) -> Scored:
        """Score the groups of a step."""
        batch = Batch(
            tuple(group.prompt for group in groups for _ in group.completions),
            tuple(completion for group in groups for completion in group.completions),
            step,
        )
        columns = _columns(batch)
        for function in self.functions:
            self._check_columns(function, columns, batch)
        logs = {f.name: Log() for f in self.functions}
        said, failures = self._said(batch, columns, logs) if len(batch) else ({}, {})
        flat = [self._verdict(said, at, c) for at, c in enumerate(batch.completions)]
        ends = np.cumsum([0, *(len(group.completions) for group in groups)])
        names = [f.name for f in self.functions] + [OVERLONG] * bool(self.soft_overlong)
        extras: dict[str, list[Any]] = {}
        for name, log in logs.items():
            extras |= _checked_extras(name, log, len(batch))
        return Scored(
            verdicts=tuple(tuple(flat[a:b]) for a, b in itertools.pairwise(ends)),
            metrics={**_logged(logs), **_spread(flat, names)},
            extras=extras,
            failures=failures,
        )

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Whether every column that a function requires is there. Raises KeelError, calls nothing.

        Worth calling before the first step, with the first prompts.
        """
        batch = Batch(tuple(prompts), (), 0)
        for function in self.functions:
            self._check_columns(function, _columns(batch), batch)

    def _check_columns(
        self, function: NamedReward, columns: Mapping[str, list[Any]], batch: Batch
    ) -> None:
        if len({p.task for p in batch.prompts}) < len(self.tasks):
            return  # the column may be that of a task that this step did not draw from
        for name in function.required:
            if name not in RESERVED and name not in columns and batch.prompts:
                known = unknown("column", name, columns) if columns else "the prompts have none"
                raise KeelError(
                    f"reward {function.name!r} needs the column {name!r}: {known} "
                    "(task.answer names the gold answer's column)"
                )

    def _said(
        self, batch: Batch, columns: Mapping[str, list[Any]], logs: Mapping[str, Log]
    ) -> tuple[dict[str, list[Said]], dict[str, int]]:
        """What each function says of each completion, and how many it failed on."""
        calls = {
            f.name: functools.partial(f.function, **_arguments(f, batch, columns, logs[f.name]))
            for f in self.functions
            if f.function is not None
        }
        waiting = {f.name: calls[f.name] for f in self.functions if f.is_async}
        running = AsyncCalls(waiting, self.timeout, self._loop)
        said: dict[str, list[Said]] = {}
        for function in self.functions:
            if function.function is None:
                said[function.name] = self._task_verdicts(function.name, batch)
            elif not function.is_async:
                outcome = call(calls[function.name], self.timeout)
                said[function.name] = self._read(function.name, outcome, batch)
        for name, outcome in running.outcomes().items():
            said[name] = self._read(name, outcome, batch)
        failures = {
            f.name: count
            for f in self.functions
            if (count := sum(s.wrong is not None for s in said[f.name]))
        }
        return said, failures

    def _read(self, name: str, outcome: Outcome, batch: Batch) -> list[Said]:
        """The values of one call; a failure stops, or marks the completions."""
        where = f"reward {name!r} at step {batch.step}"
        wrong = self._failure(outcome)
        if wrong is None:
            try:
                said = read_rewards(outcome.value, [len(c) for c in batch.completions])
            except BadReturn as error:
                wrong = str(error)
            else:
                for at, one in enumerate(said):
                    if one.wrong is not None and self.on_error == "stop":
                        raise KeelError(f"{where}: {_sample(batch, at)}: {one.wrong}")
                return said
        if self.on_error == "stop":
            raise KeelError(f"{where} ({_range(batch)}): {wrong}") from outcome.error
        return [Said(wrong=wrong)] * len(batch)

    def _task_verdicts(self, name: str, batch: Batch) -> list[Said]:
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
                where = f"reward {name!r} at step {batch.step}: {_sample(batch, len(said))}"
                raise KeelError(f"{where}: {one.wrong}") from outcome.error
            said.append(one)
        if self.by_task_alone:
            _someone_spoke(batch, said)
        return said

    def _failure(self, outcome: Outcome) -> str | None:
        if outcome.timed_out:
            return f"hangs: no answer within {self.timeout:g} s: mend it, or raise rewards.timeout"
        if outcome.error is None:
            return None
        message = " ".join(str(outcome.error).split())
        if isinstance(outcome.error, KeelError):
            return message
        return f"raised {type(outcome.error).__name__}: {message}{_line(outcome.error)}"

    def _verdict(self, said: Mapping[str, list[Said]], at: int, completion: Completion) -> Verdict:
        """The weighted sum of what was said of one completion."""
        components = {f.name: said[f.name][at].value for f in self.functions}
        weights = {f.name: f.weight for f in self.functions}
        spoke = any(value is not None for value in components.values())
        if self.soft_overlong:
            # Length alone is no verdict: where nothing else applies, neither does this.
            punishment = soft_overlong(len(completion), self.max_tokens, self.soft_overlong)
            components[OVERLONG] = punishment if spoke else None
            weights[OVERLONG] = 1.0
        total = sum(weights[n] * value for n, value in components.items() if value is not None)
        steps: dict[int, float] = {}
        for function in self.functions:
            for step in said[function.name][at].steps:
                steps[step.end] = steps.get(step.end, 0.0) + function.weight * step.reward
        return Verdict(
            reward=float(total) if spoke else None,
            components=components,
            steps=tuple(Step(end, steps[end]) for end in sorted(steps)),
        )


def _columns(batch: Batch) -> dict[str, list[Any]]:
    """Every column that some prompt has, a value for each completion; None where there is none."""
    names = dict.fromkeys(name for prompt in batch.prompts for name in prompt.columns)
    return {
        name: [prompt.columns.get(name) for prompt in batch.prompts]
        for name in names
        if name not in RESERVED
    }


def _arguments(
    function: NamedReward, batch: Batch, columns: Mapping[str, list[Any]], log: Log
) -> dict[str, Any]:
    """The keyword arguments of a call: what is bound, and what the function wants."""
    there: dict[str, Any] = {
        **dict.fromkeys(function.required, [None] * len(batch)),
        **columns,
        "prompts": [p.content if isinstance(p.content, str) else _turns(p) for p in batch.prompts],
        "completions": [
            c.text if isinstance(p.content, str) else [{"role": "assistant", "content": c.text}]
            for p, c in zip(batch.prompts, batch.completions, strict=True)
        ],
        "completion_ids": [c.tokens.tolist() for c in batch.completions],
        "trainer_state": SimpleNamespace(global_step=batch.step),
        "log_extra": log.extra,
        "log_metric": log.metric,
    }
    # Copies of the lists: what one function does to its arguments, no other sees.
    wanted = {k: v for k, v in there.items() if function.wants(k)}
    copies = {k: list(v) if isinstance(v, list) else v for k, v in wanted.items()}
    return {**function.options, **copies}


def _turns(prompt: Prompt) -> list[dict[str, Any]]:
    return [dict(turn) for turn in prompt.content]  # type: ignore[arg-type]


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


def _checked_extras(name: str, log: Log, n: int) -> dict[str, list[Any]]:
    for extra, values in log.extras.items():
        if len(values) != n:
            raise KeelError(
                f"reward {name!r}: log_extra({extra!r}) got {len(values)} values for {n} "
                "completions: give one for each"
            )
    return log.extras


def _logged(logs: Mapping[str, Log]) -> dict[str, float]:
    means: dict[str, float] = {}
    for log in logs.values():
        means |= {name: float(np.mean(values)) for name, values in log.metrics.items()}
    return means


def _spread(verdicts: Sequence[Verdict], names: Sequence[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in names:
        values = [v.components[name] for v in verdicts if v.components[name] is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = float(np.mean(values))  # type: ignore[arg-type]
        if len(values) > 1:
            metrics[f"rewards/{name}/std"] = float(np.std(values, ddof=1))  # type: ignore[arg-type]
    return metrics


def _sample(batch: Batch, at: int) -> str:
    return f"sample {at} (prompt {batch.prompts[at].id!r})"


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
