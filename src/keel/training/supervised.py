"""A step of a stage that learns from stored examples: SFT, DPO and reward models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from keel.config.stage import Optimizer, StageConfig
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


@dataclass(frozen=True, eq=False, kw_only=True)
class ExampleLoop(loop.Loop, Generic[B]):
    """The loop of a stage that learns from examples, with its made."""

    examples: Examples[B]
    policy: Policy
    optimizer: AdamW
    schedule: Optimizer
    modules: Mapping[str, nn.Module]
    reference: Reference | None

    def take_step(self, progress: Progress, number: int) -> StepResult:
        """One optimizer step on the batch of a step, or none if it would not be finite."""
        with self.writer.clock("data"):
            batch = self.examples.batch(number)
        rate = learning_rate(self.schedule, number - 1, self.steps)
        with self.writer.clock("update"):
            try:
                step = update(self, batch, rate)
            except NotFinite as error:
                self.optimizer.clear()
                stage = self.writer.folder.stages[progress.stage]
                non_finite.report(
                    self.writer,
                    non_finite.NonFiniteStep(stage, number, 0, error.names),
                    error,
                    action=self.on_nonfinite,
                    skipped=progress.skipped,
                    began=self.optimizer.began,
                    weight=lambda: bad_weight(self.optimizer.parameters),
                    diagnose=lambda: _diagnose(self, batch),
                    keep=lambda folder: self.examples.write(folder, batch),
                )
                step = GradientStep({}, sum(self.examples.sizes(batch).lengths))
        metrics = {**step.metrics, "learning_rate": rate}
        skipped = int("grad_norm" not in step.metrics)
        return StepResult(metrics, step.tokens, skipped, stream=self.examples.state())

    def state(self, progress: Progress) -> State:
        learned = ({"optimizer": self.optimizer}, self.modules, self.reference)
        return State(progress, self.policy, lambda folder: save_learned(folder, *learned))


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
    made = ExampleLoop(
        steps=stage.steps,
        checkpoints=stage.checkpoints,
        on_nonfinite=stage.on_nonfinite,
        budget=budget or token_budget(stage, progress, run.writer),
        writer=run.writer,
        evaluate=evaluate,
        evaluate_every=stage.evaluation_interval or 0,
        examples=examples,
        policy=run.policy,
        optimizer=optimizer,
        schedule=stage.optimizer,
        modules=modules,
        reference=reference,
    )
    return loop.run(made, progress)


def update(made: ExampleLoop[Any], batch: Any, rate: float) -> GradientStep:
    """One optimizer step. Raises NotFinite if none was taken."""
    step = made.budget.fitting(
        lambda tokens: made.examples.backward(batch, tokens),
        made.examples.sizes(batch),
        made.optimizer.clear,
    )
    stop_unless_finite(step.metrics)
    norm = {"grad_norm": made.optimizer.step(rate)}
    stop_unless_finite(norm)
    return replace(step, metrics={**step.metrics, **norm})


def _diagnose(made: ExampleLoop[Any], batch: Any) -> tuple[Cause, str]:
    """The cause of a loss or gradient that is not finite, and the example that it comes from."""
    parameters = made.optimizer.parameters
    ones = made.examples.split(batch)
    cause = in_weights(parameters) or find_offending_sequence(
        lambda i: made.examples.backward(ones[i], made.budget.tokens).metrics,
        range(len(ones)),
        parameters,
        made.optimizer.clear,
    )
    return cause, "" if cause.sequence is None else f"row {cause.sequence} of the step"
