"""The completions of a step, as the arguments of a reward function, and what functions log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from keel.graders.stated import before_stop
from keel.rewards.registry import RESERVED, NamedReward
from keel.runs.values import plain
from keel.types import Completion, Group, KeelError, Message, Prompt, text_of


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


Summary = Callable[[list[Any]], Mapping[str, float]]
"""Numbers for a step, by name, from the findings of all its calls."""


class Metrics:
    """The `log_metric` of a call."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[float]] = {}
        self.found: list[Any] = []
        self.summary: Summary | None = None

    def __call__(self, name: str, value: float) -> None:
        """A number for the step; the mean if it comes several times."""
        self.numbers.setdefault(name, []).append(float(value))


class Log:
    """What one call on `size` completions logs (None: of any number); each has its own, so that an
    abandoned call logs into no other."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.extras: dict[str, list[Any]] = {}
        self.metric = Metrics()

    def extra(self, name: str, values: Sequence[Any]) -> None:
        """A value for each completion. Raises KeelError for others."""
        if self.size not in (None, len(values)):
            raise KeelError(
                f"log_extra({name!r}) got {len(values)} values for {self.size} completions: give "
                "one for each"
            )
        try:
            plain(list(values))
        except TypeError as error:
            raise KeelError(f"log_extra({name!r}): {error}") from None
        self.extras[name] = list(values)


Logs = Sequence[tuple[Log, Sequence[int]]]
"""The log of each call of a function, and the places of its completions in the step."""


def join_logs(logs: Mapping[str, Logs], size: int) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """The extras and metrics of a step of `size` completions, from the logs of its functions.

    A name that an earlier function logged becomes `FUNCTION/name`.
    """
    extras: dict[str, list[Any]] = {}
    metrics: dict[str, float] = {}
    for function, calls in logs.items():
        own: dict[str, list[Any]] = {}
        for log, places in calls:
            for name, values in dict(log.extras).items():
                column = own.setdefault(name, [None] * size)
                for place, value in zip(places, values, strict=True):
                    column[place] = value
        for name, column in own.items():
            extras[f"{function}/{name}" if name in extras else name] = column
        for name, number in _numbers(calls).items():
            metrics[f"{function}/{name}" if name in metrics else name] = number
    return extras, metrics


def log_summary(
    log_metric: Callable[[str, float], None], found: Sequence[Any], summary: Summary
) -> None:
    """Log `summary(found)`; of a step whose completions come in several calls, of all together."""
    if isinstance(log_metric, Metrics):
        log_metric.found += found
        log_metric.summary = summary
        return
    for name, value in summary(list(found)).items():
        log_metric(name, value)


def _numbers(calls: Logs) -> dict[str, float]:
    """The step's number under each name; several calls are weighted by their completions."""
    parts: dict[str, list[tuple[Any, int]]] = {}
    for log, places in calls:
        for name, numbers in dict(log.metric.numbers).items():
            parts.setdefault(name, []).append((np.mean(numbers), len(places)))
    out: dict[str, float] = {}
    for name, several in parts.items():
        means, weights = zip(*several, strict=True)
        out[name] = float(np.average(means, weights=weights) if len(means) > 1 else means[0])
    summary = next((log.metric.summary for log, _ in calls if log.metric.summary), None)
    if summary is not None:
        found = [one for log, _ in calls for one in log.metric.found]
        out |= {name: float(value) for name, value in summary(found).items()}
    return out


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
