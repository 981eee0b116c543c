"""Losses and gradients that are not finite: no step is taken, and their cause is searched for."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from keel.learn.batch import TrainBatch
from keel.learn.optimizer import Named, bad_weight
from keel.models.sharded import whole
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

    def __reduce__(self) -> tuple[type[NotFinite], tuple[tuple[str, ...]]]:
        return NotFinite, (self.names,)


def stop_unless_finite(metrics: Mapping[str, float]) -> None:
    """Raises NotFinite if a metric that decides on a step is NaN or infinite."""
    bad = _bad(metrics)
    if bad:
        raise NotFinite(bad)


@dataclass(frozen=True, slots=True)
class Cause:
    """Where a value that is not finite comes from.

    `sequence` is that of the batch and `token` its action, both from 0; None where the value comes
    from all sequences together, or from the weights.
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
    """A value that is not finite among the loss's inputs."""
    for name, values in tensors_of(batch).items():
        if name.endswith("_N") and values.is_floating_point() and not _finite(values):
            at = int((~values.isfinite()).nonzero()[0])
            ends = list(accumulate(batch.lengths))
            sequence = bisect_right(ends, at)
            token = at - ends[sequence] + batch.lengths[sequence]
            return Cause(TERMS.get(name, name), sequence, token)
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


def _bad(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that forbid a step."""
    return [name for name in metrics if name in DECISIVE and not math.isfinite(metrics[name])]


def _finite(tensor: Tensor) -> bool:
    return bool(whole(torch.isfinite(tensor).all()))
