"""Losses and gradients that are not finite: no step is taken on them, and their cause is found.

The search runs only then, one sequence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from keel.learn.batch import TrainBatch
from keel.learn.optimizer import Named, bad_weight
from keel.types import KeelError

DECISIVE = frozenset({"loss", "loss/policy", "value/loss", "grad_norm", "value/grad_norm"})
"""The metrics that decide whether a step is taken."""


_WEIGHTS = "the weights "


class NotFinite(KeelError):
    """A loss or gradient is NaN or infinite, and no step was taken; `names` are the metrics."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{', '.join(names)} came out non-finite: its step was not taken; lower "
            "optimizer.learning_rate or see the step's rollouts"
        )
        self.names = tuple(names)


def stop_unless_finite(metrics: Mapping[str, float]) -> None:
    """Raises NotFinite where a metric that decides on a step is NaN or infinite."""
    bad = _bad(metrics)
    if bad:
        raise NotFinite(bad)


@dataclass(frozen=True, slots=True)
class Cause:
    """Where a value that is not finite comes from.

    `sequence` counts those of the batch, `token` its actions, both from 0; None where only all
    together make it, or the weights themselves are not finite.
    """

    term: str
    sequence: int | None = None
    token: int | None = None

    @property
    def weights(self) -> bool:
        """Whether the weights themselves are not finite, so that no step can be taken."""
        return self.term.startswith(_WEIGHTS)


def in_weights(parameters: Named) -> Cause | None:
    """A weight that is not finite."""
    name = bad_weight(parameters)
    return None if name is None else Cause(f"{_WEIGHTS}{name}")


def in_tensors(batch: TrainBatch[Any]) -> Cause | None:
    """A value that is not finite among what the loss is computed from."""
    for name, values in tensors_of(batch).items():
        if not name.endswith("_N") or not values.is_floating_point():
            continue
        at = first_bad(values)
        if at is not None:
            return Cause(TERMS.get(name, name), *place_of(at, batch.lengths))
    return None


def tensors_of(batch: TrainBatch[Any]) -> dict[str, Tensor]:
    """Every tensor of a batch by its name."""
    every = [
        (f.name, getattr(part, f.name)) for part in (batch.actions, batch) for f in fields(part)
    ]
    return {name: value for name, value in every if isinstance(value, Tensor)}


TERMS = {
    "engine_log_prob_N": "the engine's log-probability",
    "old_log_prob_N": "the old log-probability",
    "reference_log_prob_N": "the reference's log-probability",
    "value_N": "the value",
    "return_N": "the return",
    "advantage_N": "the advantage",
    "weight_N": "the weight",
}


def find_offending_sequence(
    backward: Callable[[int], Mapping[str, float]],
    sequences: Iterable[int],
    parameters: Named,
    clear: Callable[[], None],
) -> Cause:
    """The first sequence whose own loss or gradient is not finite.

    `backward(i)` adds the gradient of sequence i to the parameters' and returns its metrics, of
    which only those count that decide on a step.
    """
    for i in sequences:
        clear()
        metrics = backward(i)
        bad = _bad(metrics)
        grown = [name for name, p in parameters if p.grad is not None and not _finite(p.grad)]
        clear()
        if bad:
            return Cause(", ".join(bad), i)
        if grown:
            return Cause(f"the gradient of {grown[0]}", i)
    return Cause("the sum over all sequences, each of which is finite alone")


def first_bad(values: Tensor) -> int | None:
    """The first place of a vector whose value is not finite."""
    bad = (~values.detach().isfinite()).nonzero()
    return int(bad[0]) if len(bad) else None


def place_of(at: int, lengths: Sequence[int]) -> tuple[int, int]:
    """The sequence that an action lies in, and its place there."""
    for i, length in enumerate(lengths):
        if at < length:
            return i, at
        at -= length
    raise IndexError(at)


def _bad(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that forbid a step."""
    return [name for name in metrics if name in DECISIVE and not math.isfinite(metrics[name])]


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
