"""A step of a stage that learns from stored examples: SFT, DPO and reward models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from keel.config.optimisation import OnNonfinite, Optimizer
from keel.learn.finite import (
    Cause,
    NotFinite,
    find_offending_sequence,
    in_weights,
    stop_unless_finite,
)
from keel.learn.optimizer import AdamW, bad_weight, learning_rate
from keel.learn.shards import save_learned
from keel.learn.token_budget import LESS, TokenBudget, oom_context
from keel.models.packed import PackedSizes
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.runs.writer import RunWriter
from keel.training import non_finite
from keel.training.judging.data import E, of_step, sizes_of
from keel.training.judging.metrics import Measured
from keel.training.loop import EvaluationResult, StepResult
from keel.training.state import Progress, State

B = TypeVar("B")


@dataclass(frozen=True, eq=False)
class GradientStep:
    """The metrics of the backward passes of a step, and the number of its tokens."""

    metrics: dict[str, float]
    tokens: int


@dataclass(frozen=True, eq=False)
class Examples(Generic[B]):
    """How a step reads its batch.

    `batch` gives that of a step (counted from 1); `backward` adds the gradient of a batch to the
    parameters', so many tokens at a time; `sizes` are the batch's tokens, `split` its examples as
    batches of one, `write` stores it in a folder; `state` is saved to resume the stream.
    """

    batch: Callable[[int], B]
    backward: Callable[[B, int], GradientStep]
    sizes: Callable[[B], PackedSizes]
    split: Callable[[B], Sequence[B]]
    write: Callable[[Path, B], None]
    state: Callable[[], Mapping[str, Any]] = dict


def judged_examples(
    train: Sequence[E],
    batch_size: int,
    seed: int,
    device: torch.device,
    backward: Callable[[Sequence[E], int], GradientStep],
) -> Examples[Any]:
    """`batch_size` examples a step, in epochs."""
    return Examples(
        batch=lambda number: of_step(train, batch_size, number, seed),
        backward=backward,
        sizes=lambda rows: sizes_of(rows, device),
        split=lambda rows: [[row] for row in rows],
        write=non_finite.write_rows,
    )


@dataclass(frozen=True, eq=False)
class ExampleParts(Generic[B]):
    """The parts of a stage that learns from examples; `modules` are trained with the policy, or
    instead of it."""

    steps: int
    examples: Examples[B]
    policy: Policy
    optimizer: AdamW
    schedule: Optimizer
    budget: TokenBudget
    on_nonfinite: OnNonfinite
    writer: RunWriter
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    reference: Reference | None = None


def take_step(parts: ExampleParts[Any], progress: Progress, number: int) -> StepResult:
    """One optimizer step on the batch of a step, or none if it would not be finite."""
    with parts.writer.clock("data"):
        batch = parts.examples.batch(number)
    rate = learning_rate(parts.schedule, number - 1, parts.steps)
    with parts.writer.clock("update"):
        try:
            step = update(parts, batch, rate)
        except NotFinite as error:
            parts.optimizer.clear()
            stage = parts.writer.folder.stages[progress.stage]
            non_finite.report(
                parts.writer,
                non_finite.NonFiniteStep(stage, number, 0, error.names),
                error,
                action=parts.on_nonfinite,
                skipped=progress.skipped,
                began=parts.optimizer.began,
                weight=lambda: bad_weight(parts.optimizer.parameters),
                diagnose=lambda: _diagnose(parts, batch),
                keep=lambda folder: parts.examples.write(folder, batch),
            )
            step = GradientStep({}, sum(parts.examples.sizes(batch).lengths))
    metrics = {**step.metrics, "learning_rate": rate}
    skipped = int("grad_norm" not in step.metrics)
    return StepResult(metrics, step.tokens, skipped, stream=parts.examples.state())


@oom_context("the validation rows were measured", f"lower token_budget, {LESS}")
def evaluate(
    measure: Callable[[], Measured], plot: Callable[[Measured], None], step: int
) -> EvaluationResult:
    """The evaluation of a model on the validation rows."""
    found = measure()
    headline = found.headline()
    return EvaluationResult(
        found.as_dict(),
        {f"eval/{name}": value for name, value in headline.items()},
        kind="measured",
        before=headline,
        plot=partial(plot, found),
    )


def update(parts: ExampleParts[Any], batch: Any, rate: float) -> GradientStep:
    """One optimizer step. Raises NotFinite if none was taken."""
    step = parts.budget.fitting(
        lambda tokens: parts.examples.backward(batch, tokens),
        parts.examples.sizes(batch),
        parts.optimizer.clear,
    )
    stop_unless_finite(step.metrics)
    norm = {"grad_norm": parts.optimizer.step(rate)}
    stop_unless_finite(norm)
    return replace(step, metrics={**step.metrics, **norm})


def state_of(parts: ExampleParts[Any], progress: Progress) -> State:
    """All that changes from step to step."""
    learned = ({"optimizer": parts.optimizer}, parts.modules, parts.reference)
    return State(progress, parts.policy, lambda folder: save_learned(folder, *learned))


def _diagnose(parts: ExampleParts[Any], batch: Any) -> tuple[Cause, str]:
    """The cause of a loss or gradient that is not finite, and the example that it comes from."""
    parameters = parts.optimizer.parameters
    ones = parts.examples.split(batch)
    cause = in_weights(parameters) or find_offending_sequence(
        lambda i: parts.examples.backward(ones[i], parts.budget.tokens).metrics,
        range(len(ones)),
        parameters,
        parts.optimizer.clear,
    )
    return cause, "" if cause.sequence is None else f"row {cause.sequence} of the step"
