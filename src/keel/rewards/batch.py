"""The completions of a step, as the arguments of a reward function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from keel.rewards.registry import RESERVED, NamedReward
from keel.runs.encoding import plain
from keel.types import Completion, Prompt


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """The completions of a step one after the other, with the prompt of each."""

    prompts: tuple[Prompt, ...]
    completions: tuple[Completion, ...]
    step: int

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, places: Sequence[int]) -> RewardBatch:
        """Some of them, in this order."""
        return RewardBatch(
            tuple(self.prompts[at] for at in places),
            tuple(self.completions[at] for at in places),
            self.step,
        )


Summary = Callable[[list[Any]], Mapping[str, float]]
"""Numbers for a step, by name, from what its calls found."""


class Metrics:
    """What a function is handed as `log_metric`."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[float]] = {}
        self.found: list[Any] = []
        self.summary: Summary | None = None

    def __call__(self, name: str, value: float) -> None:
        """A number for the step; the mean where it comes several times."""
        self.numbers.setdefault(name, []).append(float(value))


class Log:
    """What one call logs; kept apart, so that what a call left behind goes on to log is lost."""

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = {}
        self.metric = Metrics()

    def extra(self, name: str, values: Sequence[Any]) -> None:
        """A value for each completion."""
        self.extras[name] = list(values)

    def wrong(self, size: int) -> str | None:
        """What is wrong with it, as the log of a call with `size` completions."""
        for extra, values in dict(self.extras).items():
            if len(values) != size:
                return (
                    f"log_extra({extra!r}) got {len(values)} values for {size} completions: give "
                    "one for each"
                )
            try:
                plain(values)
            except TypeError as error:
                return f"log_extra({extra!r}): {error}"
        return None


class Logged:
    """What the functions of a step logged, all of them together."""

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, float] = {}

    def take(self, name: str, calls: Sequence[tuple[Log, Sequence[int]]], size: int) -> None:
        """Put down what function `name` logged in each call, of the completions at its places.

        There are `size` in the step. What a function before it logged under the same name stays,
        and its own goes by `NAME/…`. Nothing must be `wrong` with the logs.
        """
        rows: dict[str, list[Any]] = {}
        for log, places in calls:
            for extra, values in dict(log.extras).items():
                row = rows.setdefault(extra, [None] * size)
                for at, value in zip(places, values, strict=True):
                    row[at] = value
        for extra, row in rows.items():
            self.extras[_free(extra, name, self.extras)] = row
        for metric, number in _numbers(calls).items():
            self.metrics[_free(metric, name, self.metrics)] = number


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


def _numbers(calls: Sequence[tuple[Log, Sequence[int]]]) -> dict[str, float]:
    """The step's number under each name; several calls weigh by their completions."""
    out: dict[str, float] = {}
    several: dict[str, list[tuple[list[float], int]]] = {}
    for log, places in calls:
        for name, numbers in dict(log.metric.numbers).items():
            several.setdefault(name, []).append((numbers, len(places)))
    for name, parts in several.items():
        if len(parts) == 1:
            out[name] = float(np.mean(parts[0][0]))
        else:
            means, weights = [np.mean(numbers) for numbers, _ in parts], [n for _, n in parts]
            out[name] = float(np.average(means, weights=weights))
    summary = next((log.metric.summary for log, _ in calls if log.metric.summary), None)
    if summary is not None:
        found = [one for log, _ in calls for one in log.metric.found]
        out |= {name: float(value) for name, value in summary(found).items()}
    return out


def _free(logged: str, function: str, taken: Collection[str]) -> str:
    return f"{function}/{logged}" if logged in taken else logged


def columns(batch: RewardBatch, names: Iterable[str] | None = None) -> dict[str, list[Any]]:
    """Every column that some prompt has, a value for each completion; None where there is none.

    `names` are those of the step, where the batch is a part of it.
    """
    if names is None:
        names = column_names(batch.prompts)
    return {name: [prompt.columns.get(name) for prompt in batch.prompts] for name in names}


def column_names(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Every column that some prompt has."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return tuple(name for name in names if name not in RESERVED)


def arguments(
    function: NamedReward, batch: RewardBatch, found: Mapping[str, list[Any]], log: Log
) -> dict[str, Any]:
    """The keyword arguments of a call: what is bound, and what the function wants."""
    there: dict[str, Any] = {
        **dict.fromkeys(function.required, [None] * len(batch)),
        **found,
        "prompts": [p.content if isinstance(p.content, str) else _turns(p) for p in batch.prompts],
        # What the policy wrote: a reply of the environment may spell the answer.
        "completions": [
            c.text if isinstance(p.content, str) else _own(c)
            for p, c in zip(batch.prompts, batch.completions, strict=True)
        ],
        "completion_ids": [c.tokens[c.written].tolist() for c in batch.completions],
        "turns": [[dict(turn) for turn in c.conversation] for c in batch.completions],
        "trainer_state": SimpleNamespace(global_step=batch.step),
        "log_extra": log.extra,
        "log_metric": log.metric,
    }
    # Copies: what one function does to its arguments, no other sees, and no later step.
    return {
        **function.options,
        **{name: _copy(value) for name, value in there.items() if function.wants(name)},
    }


def _copy(value: Any) -> Any:
    """Lists and dicts copied all the way down; what else there is stays the same object."""
    if isinstance(value, list):
        return [_copy(one) for one in value]
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return value


def _own(completion: Completion) -> list[dict[str, Any]]:
    """The policy's turns."""
    return [dict(turn) for turn in completion.conversation if turn["role"] == "assistant"]


def _turns(prompt: Prompt) -> list[dict[str, Any]]:
    return [dict(turn) for turn in prompt.content]  # type: ignore[arg-type]
