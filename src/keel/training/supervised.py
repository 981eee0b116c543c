"""A step of a stage that learns from stored examples: SFT, DPO and reward models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from keel.config.optimisation import OnNonfinite, Optimizer
from keel.config.stage import StageConfig
from keel.learn.finite import (
    Cause,
    NotFinite,
    find_offending_sequence,
    in_weights,
    stop_unless_finite,
)
from keel.learn.optimizer import AdamW, bad_weight, learning_rate
from keel.learn.shards import save_learned
from keel.learn.token_budget import TokenBudget
from keel.models.packed import PackedSizes
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.runs.writer import RunWriter
from keel.training import loop, non_finite
from keel.training.loop import EvaluationResult, StepResult
from keel.training.setup import RunContext, token_budget
from keel.training.state import Progress, State, restore_modules, restore_optimizers

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
    parameters', that many tokens at a time; `sizes` are the batch's tokens, `split` its examples as
    batches of one, `write` stores it in a folder; `state` is saved to resume the stream.
    """

    batch: Callable[[int], B]
    backward: Callable[[B, int], GradientStep]
    sizes: Callable[[B], PackedSizes]
    split: Callable[[B], Sequence[B]]
    write: Callable[[Path, B], None]
    state: Callable[[], Mapping[str, Any]] = dict


@dataclass(frozen=True, eq=False)
class ExampleParts(Generic[B]):
    """The parts of a stage that learns from examples."""

    steps: int
    examples: Examples[B]
    policy: Policy
    optimizer: AdamW
    schedule: Optimizer
    budget: TokenBudget
    on_nonfinite: OnNonfinite
    writer: RunWriter
    modules: Mapping[str, nn.Module]
    reference: Reference | None


def train_on_examples(
    run: RunContext,
    stage: StageConfig,
    progress: Progress,
    examples: Examples[Any],
    optimizer: AdamW,
    *,
    budget: TokenBudget | None = None,
    modules: Mapping[str, nn.Module] | None = None,
    reference: Reference | None = None,
    evaluate: Callable[[int], EvaluationResult] | None = None,
) -> Progress:
    """A stage that learns from examples: restored, if the run resumes it, and run.

    `modules` are trained with the policy, or instead of it.
    """
    modules = modules or {}
    if run.resume_from is not None:
        restore_modules(run.resume_from, modules)
        restore_optimizers(run.resume_from, {"optimizer": optimizer})
    parts = ExampleParts(
        steps=stage.steps,
        examples=examples,
        policy=run.policy,
        optimizer=optimizer,
        schedule=stage.optimizer,
        budget=budget or token_budget(stage, progress, run.writer),
        on_nonfinite=stage.on_nonfinite,
        writer=run.writer,
        modules=modules,
        reference=reference,
    )
    made = loop.Loop(
        steps=stage.steps,
        checkpoints=stage.checkpoints,
        on_nonfinite=stage.on_nonfinite,
        budget=parts.budget,
        writer=run.writer,
        take_step=partial(take_step, parts),
        state=partial(state_of, parts),
        evaluate=evaluate,
        evaluate_every=stage.evaluation_interval or 0,
    )
    return loop.run(made, progress)


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
