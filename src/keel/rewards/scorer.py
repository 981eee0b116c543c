"""The scorer: groups of completions in, verdicts out."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from keel.config.suggest import unknown
from keel.rewards.batch import Logged, RewardBatch, column_names, columns
from keel.rewards.calls import BatchSlice, CallConfig, RewardCall
from keel.rewards.compose import Composed, compose, shut
from keel.rewards.executor import LoopThread
from keel.rewards.overlap import Overlap
from keel.rewards.registry import RESERVED, TASK, NamedReward
from keel.rewards.rules import overlong_penalty
from keel.rewards.validation import RewardOutput
from keel.types import Completion, Group, KeelError, Prompt, Task, Verdict

OVERLONG = "overlong"
"""The component of soft overlong punishment."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The scores of a step.

    `verdicts` by group; `metrics` are each component's mean and std (`rewards/NAME/mean`, unbiased
    `rewards/NAME/std`; absent where too few have a value) and what functions logged; `extras` what
    they logged a completion, in order; `failures` how many completions each left out by `on_error`.
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
    names the function, the step and, where it is known, the sample. `overlong` is the number of
    tokens at the end of the budget `max_tokens` over which length is punished.
    """

    def __init__(
        self,
        functions: Sequence[NamedReward] = (),
        tasks: Mapping[str, Task] | None = None,
        *,
        timeout: float = 60.0,
        on_error: Literal["stop", "skip"] = "stop",
        overlong_buffer: int = 0,
        max_tokens: int = 0,
    ) -> None:
        self.tasks = dict(tasks or {})
        self.by_task_alone = not functions
        self.functions = tuple(functions) or (NamedReward(TASK, None),)
        self.timeout = timeout
        self.overlong_buffer = overlong_buffer
        self.max_tokens = max_tokens
        self._loop = LoopThread()
        self._manner = CallConfig(self.functions, self.tasks, timeout, on_error, self._loop)
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
        batch = _flat(groups, step)
        self._check(batch)
        asking = RewardCall(self._manner, BatchSlice(batch, 0, column_names(batch.prompts)))
        try:
            asking.begin()
            asking.end()
        except BaseException:
            asking.cancel()
            raise
        return self.concluded(groups, step, [asking])

    def overlapping(self, prompts: Sequence[Prompt], step: int) -> Overlap:
        """The groups of a step, of these prompts, scored as they come; `concluded` has the rest."""
        self._check(RewardBatch(tuple(prompts), (), step))
        return Overlap(functools.partial(RewardCall, self._manner), prompts, step)

    def concluded(self, groups: Sequence[Group], step: int, asked: Sequence[RewardCall]) -> Scored:
        """The verdicts of a step from the outputs of its parts, in their order."""
        batch = _flat(groups, step)
        names = [f.name for f in self.functions]
        outputs = {name: [one for part in asked for one in part.outputs[name]] for name in names}
        logged = Logged()
        for function in (*self._manner.gates, *self._manner.others):
            name = function.name
            calls = [part.logs[name] for part in asked if name in part.logs]
            logged.take(name, calls, len(batch))
        if self.by_task_alone:
            _check_verdicts(batch, outputs[TASK])
        groups_S = [g for g, group in enumerate(groups) for _ in group.completions]
        flat = [
            self._verdict(outputs, composed, at, completion)
            for at, (completion, composed) in enumerate(
                zip(batch.completions, compose(self.functions, outputs, groups_S), strict=True)
            )
        ]
        ends = np.cumsum([0, *(len(group.completions) for group in groups)])
        names += [OVERLONG] * bool(self.overlong_buffer)
        shares = {
            f"rewards/{f.name}/shut": float(np.mean([shut(f, one) for one in outputs[f.name]]))
            for f in self._manner.gates
            if len(batch)
        }
        return Scored(
            verdicts=tuple(tuple(flat[a:b]) for a, b in itertools.pairwise(ends)),
            metrics={**logged.metrics, **_spread(flat, names), **shares},
            extras=logged.extras,
            failures={
                name: count
                for name, ones in outputs.items()
                if (count := sum(one.wrong is not None for one in ones))
            },
        )

    def judging(self, component: str | None = None) -> NamedReward | None:
        """The reward that says right or wrong: this component, or else the first declared as
        correctness; None where none is. A task's verdict is where its `correctness` is true."""
        tasks = all(getattr(task, "correctness", False) for task in self.tasks.values())
        for function in self.functions:
            declared = function.correctness
            if declared is None:
                declared = function.function is None and tasks
            if declared and component in (None, function.name):
                return function
        return None

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
        self._check(RewardBatch(tuple(prompts), (), 0))

    def _check(self, batch: RewardBatch) -> None:
        found = columns(batch)
        for function in self.functions:
            self._check_columns(function, found, batch)

    def _check_columns(
        self, function: NamedReward, found: Mapping[str, list[Any]], batch: RewardBatch
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

    def _verdict(
        self,
        outputs: Mapping[str, list[RewardOutput]],
        composed: Composed,
        at: int,
        completion: Completion,
    ) -> Verdict:
        """What is kept of one completion: its reward, and each component."""
        components = {f.name: outputs[f.name][at].value for f in self.functions}
        verdict = Verdict(composed.reward, components, composed.steps, composed.outcome)
        if not self.overlong_buffer:
            return verdict
        # Length alone is no verdict: where nothing else applies, neither does this.
        if verdict.reward is None:
            components[OVERLONG] = None
            return verdict
        written = int(completion.written.sum())
        punishment = overlong_penalty(written, self.max_tokens, self.overlong_buffer)
        components[OVERLONG] = punishment
        return replace(
            verdict,
            reward=verdict.reward + punishment,
            outcome=(verdict.outcome or 0.0) + punishment if punishment else verdict.outcome,
            unshaped=verdict.reward,
        )


def _flat(groups: Sequence[Group], step: int) -> RewardBatch:
    return RewardBatch(
        tuple(group.prompt for group in groups for _ in group.completions),
        tuple(completion for group in groups for completion in group.completions),
        step,
    )


def _check_verdicts(batch: RewardBatch, outputs: Sequence[RewardOutput]) -> None:
    """Raise KeelError where a task is asked for the reward and gave no verdict on any answer."""
    judged = {p.task: False for p in batch.prompts}
    for prompt, one in zip(batch.prompts, outputs, strict=True):
        judged[prompt.task] |= one.value is not None or one.wrong is not None
    for task, it_did in judged.items():
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
