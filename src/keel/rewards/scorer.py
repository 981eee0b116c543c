"""The scorer: groups of completions in, results out. One reward from the values of functions:

R_i = gated_reward_g                            if a gate g rejects: x_g < gate_below_g
    = Σ_k weight_k · normalise(clip(x_k))_i     else, over the components with a value

and after it, times a factor if the completion was cut, the penalties of length.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from keel.config.fields import unknown
from keel.config.sources import RewardSource
from keel.platform.calls import LoopThread
from keel.rewards.calls import Overlap, RewardBatch, StepCalls, column_names, without_stop
from keel.rewards.outputs import RewardOutput, join_logs
from keel.rewards.registry import MADE, RESERVED, TASK, NamedReward, load_reward
from keel.rewards.rules import overlong_penalty, relative_length_penalties
from keel.types import Completion, Group, KeelError, Prompt, RewardResult, Step, Task


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The scores of a step.

    `results` by group; `metrics` are each component's mean and std (`rewards/NAME/mean`, unbiased
    `rewards/NAME/std`; absent if too few have a value) and what functions logged; `extras` what
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
    names the function, the step and, if it is known, the sample. Over the last
    `overlong_buffer` tokens of `max_tokens`, a length penalty applies; `length_penalty` weighs
    that of the group, and `truncated_factor` the reward of a completion that was cut. Unless they
    are `needed`, completions may go without a reward, and all weights may be 0. `loop` runs async
    functions; scorers of the same functions share it. Of a completion that one of the strings
    `stop` ended, functions get the text before it.
    """

    def __init__(
        self,
        functions: Sequence[NamedReward] = (),
        tasks: Mapping[str, Task] | None = None,
        *,
        timeout: float = 60.0,
        on_error: Literal["stop", "skip"] = "stop",
        overlong_buffer: int = 0,
        length_penalty: float = 0.0,
        truncated_factor: float = 1.0,
        max_tokens: int = 0,
        needed: bool = True,
        loop: LoopThread | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self.tasks = dict(tasks or {})
        self.given = tuple(functions)
        self.functions = self.given or (load_reward(RewardSource(function=TASK)),)
        self.overlong_buffer = overlong_buffer
        self.length_penalty = length_penalty
        self.truncated_factor = truncated_factor
        self.max_tokens = max_tokens
        self.needed = needed
        self.loop = loop or LoopThread()
        self.stop = stop
        limits: dict[str, Any] = {"timeout": timeout, "on_error": on_error, "loop": self.loop}
        self._calls = functools.partial(StepCalls, self.functions, self.tasks, **limits)
        names = [f.name for f in self.functions]
        for name in names:
            if names.count(name) > 1 or name in PENALTIES:
                raise KeelError(
                    f"two rewards are named {name!r}: set a different `name` on one of them"
                )
        if needed and not any(f.source.weight for f in self.functions):
            raise KeelError(
                f"every reward has weight 0 ({', '.join(names)}), so nothing is learned from: "
                "give one a weight"
            )

    def __call__(self, groups: Sequence[Group], step: int) -> Scored:
        """Score the groups of a step. Completions whose program failed have no reward."""
        prompts = [group.prompt for group in groups if group.completions]
        self.check(prompts)
        ended = [without_stop(group, self.stop) for group in groups]
        calls = self._calls()
        try:
            calls.add(RewardBatch.of(ended, step, column_names(prompts)))
            calls.finish()
        except BaseException:
            calls.cancel()
            raise
        return self.results(groups, calls)

    def overlapping(self, prompts: Sequence[Prompt], step: int) -> Overlap:
        """Scores the groups of a step, of these prompts, as they are added; then `results`."""
        self.check(prompts)
        return Overlap(self._calls(), prompts, step, self.stop)

    def results(self, groups: Sequence[Group], calls: StepCalls) -> Scored:
        """The results of a step from the calls on its completions."""
        completions = [one for group in groups for one in group.completions]
        nothing = RewardOutput()
        outputs = {
            name: [found.get(place, nothing) for place in range(len(completions))]
            for name, found in calls.outputs.items()
        }
        if not self.given and self.needed:
            _check_results(groups, outputs[TASK])
        # In the order of the calls: gates first.
        called = sorted(self.functions, key=lambda f: f.source.gate_below is None)
        extras, metrics = join_logs({f.name: calls.logs[f.name] for f in called}, len(completions))
        groups_S = [g for g, group in enumerate(groups) for _ in group.completions]
        results = compose(self.functions, outputs, groups_S)
        results = self._shaped(results, completions, groups_S)
        counts = {name: sum(o.wrong is not None for o in ones) for name, ones in outputs.items()}
        if any(one.failed for one in completions):
            extras["program_error"] = [one.failed or None for one in completions]
            counts["program"] = sum(bool(one.failed) for one in completions)
        ends = np.cumsum([0, *(len(group.completions) for group in groups)])
        return Scored(
            results=tuple(tuple(results[a:b]) for a, b in itertools.pairwise(ends)),
            metrics={**metrics, **_spread(results), **_gated(called, outputs, completions)},
            extras=extras,
            failures={name: count for name, count in counts.items() if count},
        )

    def _shaped(
        self,
        results: list[RewardResult],
        completions: Sequence[Completion],
        groups: Sequence[int],
    ) -> list[RewardResult]:
        """The results with the factor and the penalties of length."""
        lengths = [int(one.written.sum()) for one in completions]
        penalties: dict[str, list[float]] = {}
        if self.overlong_buffer:
            limits = self.max_tokens, self.overlong_buffer
            penalties[OVERLONG] = [overlong_penalty(length, *limits) for length in lengths]
        if self.length_penalty:
            rewards = [result.reward for result in results]
            penalties[RELATIVE] = relative_length_penalties(
                lengths, rewards, groups, self.length_penalty
            )
        if self.truncated_factor != 1:
            results = [
                scaled(result, self.truncated_factor) if one.finish == "length" else result
                for result, one in zip(results, completions, strict=True)
            ]
        for name, values in penalties.items():
            results = [with_penalty(one, name, x) for one, x in zip(results, values, strict=True)]
        return results

    def judging(self, component: str | None = None) -> NamedReward | None:
        """The reward that says right or wrong: this component, or else the first declared as
        correctness; None if none is. A task's score is if its `correctness` is true."""
        tasks = all(getattr(task, "correctness", False) for task in self.tasks.values())
        for function in self.functions:
            declared = function.correctness
            if declared is None:
                declared = function.function is None and tasks
            if declared and component in (None, function.name):
                return function
        return None

    @property
    def weights(self) -> dict[str, float]:
        """What each reward is weighed with, by its name."""
        weights = {function.name: function.source.weight for function in self.functions}
        there = (self.overlong_buffer, self.length_penalty)
        return weights | {name: 1.0 for name, on in zip(PENALTIES, there, strict=True) if on}

    @property
    def spending(self) -> list[str]:
        """The names of metrics that add up over calls, of rewards that cost money."""
        return [name for reward in self._paying() for name in reward.spending]

    def paid(self) -> list[str]:
        """A line for each reward that costs money, with what was spent."""
        return [reward.paid() for reward in self._paying()]

    def _paying(self) -> list[Any]:
        """The built-in rewards that cost money."""
        made = [f.function for f in self.functions if f.source.function in MADE]
        return [reward for reward in made if hasattr(reward, "paid")]

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
                    hint = "" if name != "answer" else " (task.answer names its column)"
                    raise KeelError(
                        f"reward {function.name!r} needs the column {name!r}: {known}{hint}"
                    )


def _check_results(groups: Sequence[Group], outputs: Sequence[RewardOutput]) -> None:
    """Raise KeelError for a task that is the only reward and scored no answer."""
    scored: dict[str, bool] = {}
    asked = [(group.prompt.task, one) for group in groups for one in group.completions]
    for (task, completion), one in zip(asked, outputs, strict=True):
        if not completion.failed:
            known = one.value is not None or one.wrong is not None
            scored[task] = scored.get(task, False) or known
    for task, it_did in scored.items():
        if not it_did:
            raise KeelError(
                f"task {task!r} cannot tell what an answer is worth: set rewards.functions, or "
                "task.answer for exact match with a column"
            )


def _gated(
    functions: Sequence[NamedReward],
    outputs: Mapping[str, Sequence[RewardOutput]],
    completions: Sequence[Completion],
) -> dict[str, float]:
    """The share of the completions that each gate rejects."""
    called = [at for at, one in enumerate(completions) if not one.failed]
    return {
        f"rewards/{f.name}/gated": float(
            np.mean([f.gates(outputs[f.name][at].value) for at in called])
        )
        for f in functions
        if f.source.gate_below is not None and called
    }


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


EPSILON = 1e-4
"""Added to the standard deviation, as in group-relative advantages."""
PENALTIES = OVERLONG, RELATIVE = "overlong", "relative_length"
"""The components of the soft length penalty (DAPO), and of that of the group."""


def compose(
    functions: Sequence[NamedReward],
    outputs: Mapping[str, Sequence[RewardOutput]],
    groups: Sequence[int],
) -> list[RewardResult]:
    """The results of a step's completions; `groups` is the number of each one's prompt."""
    values = [_values(f, outputs[f.name], groups) for f in functions]
    found = [outputs[f.name] for f in functions]
    return [
        _result(functions, [one[at] for one in found], [one[at] for one in values])
        for at in range(len(groups))
    ]


def scaled(result: RewardResult, factor: float) -> RewardResult:
    """A result with its reward, and the parts of it, times a factor."""
    if result.reward is None:
        return result
    return replace(
        result,
        reward=factor * result.reward,
        steps=tuple(replace(step, reward=factor * step.reward) for step in result.steps),
        outcome=None if result.outcome is None else factor * result.outcome,
    )


def with_penalty(result: RewardResult, name: str, penalty: float) -> RewardResult:
    """A result with a penalty of length, unless it has no reward otherwise."""
    if result.reward is None:
        return replace(result, components={**result.components, name: None})
    return replace(
        result,
        reward=result.reward + penalty,
        components={**result.components, name: penalty},
        outcome=(result.outcome or 0.0) + penalty if penalty else result.outcome,
    )


def _result(
    functions: Sequence[NamedReward],
    outputs: Sequence[RewardOutput],
    values: Sequence[float | None],
) -> RewardResult:
    """The result of one completion; `values` are clipped and normalised."""
    components = {f.name: one.value for f, one in zip(functions, outputs, strict=True)}
    for function in functions:
        if function.gates(components[function.name]):
            gated = function.source.gated_reward
            return RewardResult(gated, components, outcome=gated, unshaped=gated)
    weighted: list[float] = []
    outcomes: list[float] = []
    steps: dict[int, float] = {}
    for function, output, value in zip(functions, outputs, values, strict=True):
        weight = function.source.weight
        if not weight or value is None:
            continue
        weighted.append(weight * value)
        if output.steps is None:
            outcomes.append(weighted[-1])
        for step in output.steps or ():
            share = weight * function.clipped(step.reward)
            steps[step.end] = steps.get(step.end, 0.0) + share
    reward = float(sum(weighted)) if weighted else None
    return RewardResult(
        reward,
        components,
        tuple(Step(end, steps[end]) for end in sorted(steps)),
        float(sum(outcomes)) if outcomes else None,
        unshaped=reward,
    )


def _values(
    function: NamedReward, outputs: Sequence[RewardOutput], groups: Sequence[int]
) -> list[float | None]:
    """A component's values, clipped and normalised; of steps, the sum of the clipped ones."""
    normalise = function.source.normalise
    if normalise != "none" and any(one.steps is not None for one in outputs):
        raise KeelError(
            f'reward {function.name!r} rewards steps, and normalise = "{normalise}" '
            "is of whole answers: drop it (process_group_relative normalises steps itself)"
        )
    found: list[float | None] = []
    for one in outputs:
        if one.steps is not None:
            found.append(sum(function.clipped(step.reward) for step in one.steps))
        else:
            found.append(None if one.value is None else function.clipped(one.value))
    if normalise == "none":
        return found
    keys = groups if normalise == "group" else [0] * len(found)
    for key in set(keys):
        places = [at for at, k in enumerate(keys) if k == key and found[at] is not None]
        normal = _standardised(np.array([found[at] for at in places], dtype=np.float64))
        for at, value in zip(places, normal, strict=True):
            found[at] = value
    return found


def _standardised(x: npt.NDArray[np.float64]) -> list[float]:
    """Less the mean, over the unbiased standard deviation; 0 if all are equal."""
    if len(x) < 2 or x.max() == x.min():
        return [0.0] * len(x)
    scaled: list[float] = ((x - x.mean()) / (x.std(ddof=1) + EPSILON)).tolist()
    return scaled
