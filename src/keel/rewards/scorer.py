"""The scorer: groups of completions in, results out.

R_i = gated_reward_g                            where a gate g is shut: x_g < gate_below_g
    = Σ_k weight_k · normalise(clip(x_k))_i     else, over the components with a value
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from keel.config.fields import unknown
from keel.rewards.batch import RewardBatch, column_names, join_logs, without_stop
from keel.rewards.calls import CallConfig, Overlap, RewardCall
from keel.rewards.registry import RESERVED, TASK, NamedReward
from keel.rewards.rules import overlong_penalty
from keel.rewards.validation import RewardOutput
from keel.runs.loop_thread import LoopThread
from keel.types import Completion, Group, KeelError, Prompt, RewardResult, Step, Task

EPSILON = 1e-4
"""Added to the standard deviation, as in group-relative advantages."""
OVERLONG = "overlong"
"""The component of the soft length penalty (DAPO)."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The scores of a step.

    `results` by group; `metrics` are each component's mean and std (`rewards/NAME/mean`, unbiased
    `rewards/NAME/std`; absent where too few have a value) and what functions logged; `extras` what
    they logged a completion, in order; `failures` how many completions each left out by `on_error`.
    """

    results: tuple[tuple[RewardResult, ...], ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, list[Any]] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)


class Scorer:
    """Calls reward functions on a step's groups, and weighs their outputs.

    With no functions, the task's own score is the reward. `timeout` is in seconds, for one call
    of one function (a score of a task is a call). With `on_error = "skip"` a completion that a
    function fails on goes without that component; with "stop" the failure is a KeelError that
    names the function, the step and, where it is known, the sample. Over the last
    `overlong_buffer` tokens of `max_tokens`, a length penalty applies. Unless they are `needed`,
    completions may go without a reward, and all weights may be 0. `loop` runs async functions;
    scorers of the same functions share it. Of a completion that one of the strings `stop` ended,
    functions get the text before it.
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
        needed: bool = True,
        loop: LoopThread | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self.tasks = dict(tasks or {})
        self.by_task_alone = not functions
        self.functions = tuple(functions) or (NamedReward(TASK, None),)
        self.timeout = timeout
        self.overlong_buffer = overlong_buffer
        self.max_tokens = max_tokens
        self.needed = needed
        self.loop = loop or LoopThread()
        self._config = CallConfig(
            self.functions, self.tasks, timeout, on_error, self.loop, tuple(stop)
        )
        names = [f.name for f in self.functions]
        for name in names:
            if names.count(name) > 1 or name == OVERLONG:
                raise KeelError(
                    f"two rewards are named {name!r}: set a different `name` on one of them"
                )
        if needed and not any(f.weight for f in self.functions):
            raise KeelError(
                f"every reward has weight 0 ({', '.join(names)}), so nothing is learned from: "
                "give one a weight"
            )

    def __call__(self, groups: Sequence[Group], step: int) -> Scored:
        """Score the groups of a step, without completions whose program failed."""
        if any(one.failed for group in groups for one in group.completions):
            return self._without_failed(groups, step)
        prompts = [group.prompt for group in groups if group.completions]
        self.check(prompts)
        ended = [without_stop(group, self._config.stop) for group in groups]
        call = RewardCall(self._config, RewardBatch.of(ended, step, column_names(prompts)))
        call.run()
        return self.conclude(groups, step, [call])

    def _without_failed(self, groups: Sequence[Group], step: int) -> Scored:
        """The scores of a step in which programs failed; their completions have none."""
        failed = [one.failed for group in groups for one in group.completions]
        kept = [tuple(one for one in group.completions if not one.failed) for group in groups]
        scored = self([replace(g, completions=k) for g, k in zip(groups, kept, strict=True)], step)
        names = [f.name for f in self.functions] + [OVERLONG] * bool(self.overlong_buffer)
        none = RewardResult(None, dict.fromkeys(names))
        left = iter([one for group in scored.results for one in group])
        results = iter([none if why else next(left) for why in failed])
        columns = {name: iter(values) for name, values in scored.extras.items()}
        extras = {n: [None if why else next(c) for why in failed] for n, c in columns.items()}
        return replace(
            scored,
            results=tuple(tuple(itertools.islice(results, len(g.completions))) for g in groups),
            extras={**extras, "program_error": [why or None for why in failed]},
            failures={**scored.failures, "program": sum(map(bool, failed))},
        )

    def overlapping(self, prompts: Sequence[Prompt], step: int) -> Overlap:
        """Scores the groups of a step, of these prompts, as they are added; then `conclude`."""
        self.check(prompts)
        return Overlap(self._config, prompts, step)

    def conclude(self, groups: Sequence[Group], step: int, calls: Sequence[RewardCall]) -> Scored:
        """The results of a step from the calls on its parts, in their order."""
        batch = RewardBatch.of(groups, step, ())
        outputs = {
            f.name: [output for call in calls for output in call.outputs[f.name]]
            for f in self.functions
        }
        if self.by_task_alone and self.needed:
            _check_results(batch, outputs[TASK])
        # In the order of the calls: gates first.
        called = sorted(self.functions, key=lambda f: f.gate_below is None)
        logs = {
            f.name: [call.logs[f.name] for call in calls if f.name in call.logs] for f in called
        }
        extras, metrics = join_logs(logs, len(batch))
        groups_S = [g for g, group in enumerate(groups) for _ in group.completions]
        results = compose(self.functions, outputs, groups_S)
        if self.overlong_buffer:
            results = [*map(self._punished, results, batch.completions)]
        ends = np.cumsum([0, *(len(group.completions) for group in groups)])
        shut = {
            f"rewards/{f.name}/shut": float(
                np.mean([f.shuts(one.value) for one in outputs[f.name]])
            )
            for f in called
            if f.gate_below is not None and batch.completions
        }
        return Scored(
            results=tuple(tuple(results[a:b]) for a, b in itertools.pairwise(ends)),
            metrics={**metrics, **_spread(results), **shut},
            extras=extras,
            failures={
                name: count
                for name, ones in outputs.items()
                if (count := sum(one.wrong is not None for one in ones))
            },
        )

    def judging(self, component: str | None = None) -> NamedReward | None:
        """The reward that says right or wrong: this component, or else the first declared as
        correctness; None where none is. A task's score is where its `correctness` is true."""
        tasks = all(getattr(task, "correctness", False) for task in self.tasks.values())
        for function in self.functions:
            declared = function.correctness
            if declared is None:
                declared = function.function is None and tasks
            if declared and component in (None, function.name):
                return function
        return None

    def close(self) -> None:
        """Close all rewards, even if some fail, and then the event loop that some use for it."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.loop.close)
            for function in reversed(self.functions):
                close = getattr(function.function, "close", None)
                if close is not None:
                    stack.callback(close)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Whether every column that a function requires is there. Raises KeelError, calls nothing.

        Worth calling before the first step, with the first prompts.
        """
        if not prompts or len({p.task for p in prompts}) < len(self.tasks):
            return  # a column may be that of a task that has no prompt here
        found = column_names(prompts)
        columns = {name for prompt in prompts for name in prompt.columns}
        for function in self.functions:
            if "turns" in columns and "turns" in (*function.required, *function.optional):
                raise KeelError(
                    f"reward {function.name!r} has an argument 'turns', which is the conversation, "
                    "and the data have a column of that name: rename the column"
                )
            for name in function.required:
                if name not in RESERVED and name not in found:
                    known = unknown("column", name, found) if found else "the prompts have none"
                    raise KeelError(
                        f"reward {function.name!r} needs the column {name!r}: {known} "
                        "(task.answer names the gold answer's column)"
                    )

    def _punished(self, result: RewardResult, completion: Completion) -> RewardResult:
        """A result with the length penalty, unless it has no reward otherwise."""
        if result.reward is None:
            return replace(result, components={**result.components, OVERLONG: None})
        written = int(completion.written.sum())
        punishment = overlong_penalty(written, self.max_tokens, self.overlong_buffer)
        return RewardResult(
            reward=result.reward + punishment,
            components={**result.components, OVERLONG: punishment},
            steps=result.steps,
            outcome=(result.outcome or 0.0) + punishment if punishment else result.outcome,
            unshaped=result.reward,
        )


def compose(
    functions: Sequence[NamedReward],
    outputs: Mapping[str, Sequence[RewardOutput]],
    groups: Sequence[int],
) -> list[RewardResult]:
    """The results of a step's completions; `groups` is the number of each one's prompt."""
    values = {f.name: _values(f, outputs[f.name], groups) for f in functions}
    return [
        _result(
            functions,
            {f.name: outputs[f.name][at] for f in functions},
            {f.name: values[f.name][at] for f in functions},
        )
        for at in range(len(groups))
    ]


def _result(
    functions: Sequence[NamedReward],
    outputs: Mapping[str, RewardOutput],
    values: Mapping[str, float | None],
) -> RewardResult:
    """The result of one completion; `values` are clipped and normalised."""
    components = {name: output.value for name, output in outputs.items()}
    for function in functions:
        if function.shuts(components[function.name]):
            gated = function.gated_reward
            return RewardResult(gated, components, outcome=gated)
    weighted: list[float] = []
    outcomes: list[float] = []
    steps: dict[int, float] = {}
    for function in functions:
        value, of_steps = values[function.name], outputs[function.name].steps
        if not function.weight or value is None:
            continue
        weighted.append(function.weight * value)
        if of_steps is None:
            outcomes.append(weighted[-1])
        for step in of_steps or ():
            share = function.weight * function.clipped(step.reward)
            steps[step.end] = steps.get(step.end, 0.0) + share
    return RewardResult(
        float(sum(weighted)) if weighted else None,
        components,
        tuple(Step(end, steps[end]) for end in sorted(steps)),
        float(sum(outcomes)) if outcomes else None,
    )


def _values(
    function: NamedReward, outputs: Sequence[RewardOutput], groups: Sequence[int]
) -> list[float | None]:
    """A component's values, clipped and normalised; of steps, the sum of the clipped ones."""
    if function.normalise != "none" and any(one.steps is not None for one in outputs):
        raise KeelError(
            f'reward {function.name!r} rewards steps, and normalise = "{function.normalise}" '
            "is of whole answers: drop it (process_group_relative normalises steps itself)"
        )
    found: list[float | None] = []
    for one in outputs:
        if one.steps is not None:
            found.append(sum(function.clipped(step.reward) for step in one.steps))
        else:
            found.append(None if one.value is None else function.clipped(one.value))
    if function.normalise == "none":
        return found
    keys = groups if function.normalise == "group" else [0] * len(found)
    for key in set(keys):
        places = [at for at, k in enumerate(keys) if k == key and found[at] is not None]
        normal = _standardised(np.array([found[at] for at in places], dtype=np.float64))
        for at, value in zip(places, normal, strict=True):
            found[at] = value
    return found


def _standardised(x: npt.NDArray[np.float64]) -> list[float]:
    """Less the mean, over the unbiased standard deviation; 0 where all are equal."""
    if len(x) < 2 or x.max() == x.min():
        return [0.0] * len(x)
    scaled: list[float] = ((x - x.mean()) / (x.std(ddof=1) + EPSILON)).tolist()
    return scaled


def _check_results(batch: RewardBatch, outputs: Sequence[RewardOutput]) -> None:
    """Raise KeelError for a task that is the only reward and scored no answer."""
    judged = {p.task: False for p in batch.prompts}
    for prompt, one in zip(batch.prompts, outputs, strict=True):
        judged[prompt.task] |= one.value is not None or one.wrong is not None
    for task, it_did in judged.items():
        if not it_did:
            raise KeelError(
                f"task {task!r} cannot tell what an answer is worth: set rewards.functions, or "
                "task.answer for exact match with a column"
            )


def _spread(results: Sequence[RewardResult]) -> dict[str, float]:
    """The mean and the standard deviation of each component."""
    metrics: dict[str, float] = {}
    for name in results[0].components if results else ():
        values = [x for v in results if (x := v.components[name]) is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = float(np.mean(values))
        if len(values) > 1:
            metrics[f"rewards/{name}/std"] = float(np.std(values, ddof=1))
    return metrics
