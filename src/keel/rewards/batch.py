"""The completions of a step, as the arguments of a reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from keel.rewards.loading import RESERVED, NamedReward
from keel.types import Completion, KeelError, Prompt


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


class Logged:
    """What the functions of a step logged, all of them together."""

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, float] = {}

    def take(self, name: str, log: Log, places: Sequence[int], size: int) -> None:
        """Put down what function `name` logged of the completions at these places, of `size`."""
        for extra, values in log.extras.items():
            if len(values) != len(places):
                raise KeelError(
                    f"reward {name!r}: log_extra({extra!r}) got {len(values)} values for "
                    f"{len(places)} completions: give one for each"
                )
            row = [None] * size
            for at, value in zip(places, values, strict=True):
                row[at] = value
            self.extras[extra] = row
        self.metrics |= {name: float(np.mean(values)) for name, values in log.metrics.items()}


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
    # Copies of the lists: what one function does to its arguments, no other sees.
    wanted = {k: v for k, v in there.items() if function.wants(k)}
    copies = {k: list(v) if isinstance(v, list) else v for k, v in wanted.items()}
    return {**function.options, **copies}


def _turns(prompt: Prompt) -> list[dict[str, Any]]:
    return [dict(turn) for turn in prompt.content]  # type: ignore[arg-type]
