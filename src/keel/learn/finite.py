"""Losses and gradients that are not finite: that no step is taken on them, and where they are from.

The search runs once a fault is there, one sequence at a time; it costs nothing before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from keel.learn.actions import Actions
from keel.learn.optimizer import Named, bad_weight
from keel.types import KeelError

DECISIVE = frozenset({"loss", "loss/policy", "value/loss", "grad_norm", "value/grad_norm"})
"""The metrics that say whether a step may be taken; others are only looked at."""


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

    `sequence` counts those of the batch, `token` its actions, both from 0; None where all
    together make it, or the weights themselves.
    """

    term: str
    sequence: int | None = None
    token: int | None = None

    @property
    def weights(self) -> bool:
        """Whether it is the weights, with which no step can be taken any more."""
        return self.term.startswith(_WEIGHTS)


def in_weights(parameters: Named) -> Cause | None:
    """A weight that is not finite."""
    name = bad_weight(parameters)
    return None if name is None else Cause(f"{_WEIGHTS}{name}")


def in_tensors(batch: Actions) -> Cause | None:
    """What was known of the actions before the loss: log-probabilities, values, advantages."""
    for field in fields(batch):
        values = getattr(batch, field.name)
        if not field.name.endswith("_N") or values is None or not values.is_floating_point():
            continue
        at = first_bad(values)
        if at is not None:
            return Cause(SAID.get(field.name, field.name), *place_of(at, batch.lengths))
    return None


SAID = {
    "engine_log_prob_N": "the engine's log-probability",
    "old_log_prob_N": "the old log-probability",
    "reference_log_prob_N": "the reference's log-probability",
    "value_N": "the value",
    "return_N": "the return",
    "advantage_N": "the advantage",
    "weight_N": "the weight",
}


def alone(
    learn: Callable[[int], Mapping[str, float]],
    sequences: Iterable[int],
    parameters: Named,
    clear: Callable[[], None],
) -> Cause:
    """The first sequence that makes the loss or a gradient non-finite when it is learned alone.

    `learn(i)` leaves the gradient of sequence i in the parameters and tells its metrics, of which
    only those that decide on a step count.
    """
    for i in sequences:
        clear()
        metrics = learn(i)
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
