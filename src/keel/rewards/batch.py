"""The completions of a step, as the arguments of a reward function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from keel.rewards.loading import RESERVED, NamedReward
from keel.types import Completion, Prompt


@dataclass(frozen=True, slots=True)
class Batch:
    """The completions of a step one after the other, with the prompt of each."""

    prompts: tuple[Prompt, ...]
    completions: tuple[Completion, ...]
    step: int

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, places: Sequence[int]) -> Batch:
        """Some of them, in this order."""
        return Batch(
            tuple(self.prompts[at] for at in places),
            tuple(self.completions[at] for at in places),
            self.step,
        )


class Log:
    """What one call logs; kept apart, so that what a call left behind goes on to log is lost."""

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def extra(self, name: str, values: Sequence[Any]) -> None:
        """A value for each completion."""
        self.extras[name] = list(values)

    def metric(self, name: str, value: float) -> None:
        """A number for the step; the mean where it comes several times."""
        self.metrics.setdefault(name, []).append(float(value))

    def wrong(self, size: int) -> str | None:
        """What is wrong with it, as the log of a call with `size` completions."""
        for extra, values in dict(self.extras).items():
            if len(values) != size:
                return (
                    f"log_extra({extra!r}) got {len(values)} values for {size} completions: give "
                    "one for each"
                )
        return None


class Logged:
    """What the functions of a step logged, all of them together."""

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, float] = {}

    def take(self, name: str, log: Log, places: Sequence[int], size: int) -> None:
        """Put down what function `name` logged of the completions at these places, of `size`.

        What a function before it logged under the same name stays, and its own goes by
        `NAME/…`. Nothing must be `wrong` with the log.
        """
        for extra, values in dict(log.extras).items():
            row = [None] * size
            for at, value in zip(places, values, strict=True):
                row[at] = value
            self.extras[_free(extra, name, self.extras)] = row
        for metric, numbers in dict(log.metrics).items():
            self.metrics[_free(metric, name, self.metrics)] = float(np.mean(numbers))


def _free(logged: str, function: str, taken: Collection[str]) -> str:
    return f"{function}/{logged}" if logged in taken else logged


def columns(batch: Batch) -> dict[str, list[Any]]:
    """Every column that some prompt has, a value for each completion; None where there is none."""
    names = dict.fromkeys(name for prompt in batch.prompts for name in prompt.columns)
    return {
        name: [prompt.columns.get(name) for prompt in batch.prompts]
        for name in names
        if name not in RESERVED
    }


def arguments(
    function: NamedReward, batch: Batch, found: Mapping[str, list[Any]], log: Log
) -> dict[str, Any]:
    """The keyword arguments of a call: what is bound, and what the function wants."""
    there: dict[str, Any] = {
        **dict.fromkeys(function.required, [None] * len(batch)),
        **found,
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


def _turns(prompt: Prompt) -> list[dict[str, Any]]:
    return [dict(turn) for turn in prompt.content]  # type: ignore[arg-type]
