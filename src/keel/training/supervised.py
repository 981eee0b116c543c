"""The loop of every stage that learns from stored examples: SFT, DPO and reward models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from keel.config.optimisation import Checkpoints, OnNonfinite, Optimizer
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
from keel.runs.writer import RunWriter, due
from keel.training import non_finite
from keel.training.judged_data import E, of_step, sizes_of
from keel.training.reward_metrics import Measured
from keel.training.state import Progress, State

B = TypeVar("B")


@dataclass(frozen=True, eq=False)
class GradientStep:
    """The metrics of the backward passes of a step, and the number of its tokens."""

    metrics: dict[str, float]
    tokens: int


@dataclass(frozen=True, eq=False)
class Examples(Generic[B]):
    """How the loop reads the batches of its steps.

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
class SupervisedLoop(Generic[B]):
    """The parts of a stage that learns from examples.

    `modules` are trained with the policy, or instead of it. `evaluate` runs on the validation
    split before and after, and every `evaluate_every` steps; `plot` gets the last result.
    """

    steps: int
    examples: Examples[B]
    policy: Policy
    optimizer: AdamW
    schedule: Optimizer
    budget: TokenBudget
    on_nonfinite: OnNonfinite
    checkpoints: Checkpoints
    writer: RunWriter
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    reference: Reference | None = None
    evaluate: Callable[[], Measured] | None = None
    evaluate_every: int = 0
    plot: Callable[[Measured], None] | None = None


def run(loop: SupervisedLoop[Any], progress: Progress) -> Progress:
    """Train from `progress` to the last step of the stage, or until the run is to stop."""
    writer = loop.writer
    if progress.before is None and loop.evaluate is not None and not writer.interrupted:
        before = evaluated(loop.evaluate)
        writer.evaluated(progress, before.as_dict(), "before", "measured")
        progress = replace(progress, before=before.headline())
    while progress.step < loop.steps and not writer.interrupted:
        start = time.perf_counter()
        number = progress.step + 1
        step = take_step(loop, progress, number)
        progress = replace(
            progress,
            step=number,
            stream=loop.examples.state(),
            tokens=progress.tokens + step.tokens,
            token_budget=loop.budget.found,
            skipped=progress.skipped + ("grad_norm" not in step.metrics),
        )
        metrics = {**step.metrics, "num_tokens": float(progress.tokens)}
        if loop.on_nonfinite == "skip":
            metrics["steps_skipped"] = float(progress.skipped)
        last = number == loop.steps
        result: Measured | None = None
        if loop.evaluate is not None and (last or due(loop.evaluate_every, number)):
            with writer.clock("evaluate"):
                result = evaluated(loop.evaluate)
            metrics |= {f"eval/{name}": value for name, value in result.headline().items()}
            writer.evaluated(progress, result.as_dict(), "after" if last else "during", "measured")
        writer.recorded(progress, metrics, [], time.perf_counter() - start)
        if last and result is not None and loop.plot is not None:
            # Before the checkpoint: a run that is killed after it does not come here again.
            loop.plot(result)
        if writer.checkpoint_due(progress, loop.steps, loop.checkpoints):
            save(loop, progress)
    if writer.interrupted and progress.step == 0:
        save(loop, progress)
    return progress


@oom_context("the validation rows were measured", f"lower token_budget, {LESS}")
def evaluated(evaluate: Callable[[], Measured]) -> Measured:
    """The result of an evaluation."""
    return evaluate()


def take_step(loop: SupervisedLoop[Any], progress: Progress, number: int) -> GradientStep:
    """One optimizer step on the batch of a step, or none where it would not be finite."""
    with loop.writer.clock("data"):
        batch = loop.examples.batch(number)
    rate = learning_rate(loop.schedule, number - 1, loop.steps)
    with loop.writer.clock("update"):
        try:
            step = update(loop, batch, rate)
        except NotFinite as error:
            loop.optimizer.clear()
            stage = loop.writer.folder.stages[progress.stage]
            non_finite.report(
                loop.writer,
                non_finite.NonFiniteStep(stage, number, 0, error.names),
                error,
                action=loop.on_nonfinite,
                skipped=progress.skipped,
                began=loop.optimizer.began,
                weight=lambda: bad_weight(loop.optimizer.parameters),
                diagnose=lambda: _diagnose(loop, batch),
                keep=lambda folder: loop.examples.write(folder, batch),
            )
            step = GradientStep({}, sum(loop.examples.sizes(batch).lengths))
    return replace(step, metrics={**step.metrics, "learning_rate": rate})


def update(loop: SupervisedLoop[Any], batch: Any, rate: float) -> GradientStep:
    """One optimizer step. Raises NotFinite where none was taken."""
    step = loop.budget.fitting(
        lambda tokens: loop.examples.backward(batch, tokens),
        loop.examples.sizes(batch),
        loop.optimizer.clear,
    )
    stop_unless_finite(step.metrics)
    norm = {"grad_norm": loop.optimizer.step(rate)}
    stop_unless_finite(norm)
    return replace(step, metrics={**step.metrics, **norm})


@oom_context("a checkpoint was written", LESS)
def save(loop: SupervisedLoop[Any], progress: Progress) -> None:
    """Write a checkpoint."""
    state = state_of(loop, progress)
    loop.writer.checkpoint(progress, state.save, loop.checkpoints, loop.steps)


def state_of(loop: SupervisedLoop[Any], progress: Progress) -> State:
    """All that changes from step to step."""
    learned = ({"optimizer": loop.optimizer}, loop.modules, loop.reference)
    return State(progress, loop.policy, lambda folder: save_learned(folder, *learned))


def _diagnose(loop: SupervisedLoop[Any], batch: Any) -> tuple[Cause, str]:
    """The cause of a loss or gradient that is not finite, and the example that it comes from."""
    parameters = loop.optimizer.parameters
    ones = loop.examples.split(batch)
    cause = in_weights(parameters) or find_offending_sequence(
        lambda i: loop.examples.backward(ones[i], loop.budget.tokens).metrics,
        range(len(ones)),
        parameters,
        loop.optimizer.clear,
    )
    return cause, "" if cause.sequence is None else f"row {cause.sequence} of the step"
