"""The loop of every stage that learns from rows: draw, learn, record, evaluate, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from keel.config.optimisation import Checkpoints, OnNonfinite, Optimizer
from keel.learn.finite import NotFinite, find_offending_sequence, in_weights, stop_unless_finite
from keel.learn.optimizer import AdamW, learning_rate
from keel.learn.token_budget import LESS, TokenBudget, oom_context
from keel.models.packed import PackedSizes
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.runs.writer import RunWriter, due
from keel.training import non_finite as faults
from keel.training.reward_metrics import Measured
from keel.training.state import Progress, State

B = TypeVar("B")


@dataclass(frozen=True, eq=False)
class Learned:
    """The sums of a step's backward passes; `tokens` are those of its rows."""

    metrics: dict[str, float]
    tokens: int


@dataclass(frozen=True, eq=False)
class Rows(Generic[B]):
    """What a step's rows are to the loop.

    `draw` gives those of a step (counted from 1); `learn` leaves their gradient in the parameters,
    so many tokens at a time; `sizes` are their tokens, `alone` is each by itself, `keep`
    writes them into a folder; `stream` is what decides which come next, in addition to the step.
    """

    draw: Callable[[int], B]
    learn: Callable[[B, int], Learned]
    sizes: Callable[[B], PackedSizes]
    alone: Callable[[B], Sequence[B]]
    keep: Callable[[Path, B], None]
    stream: Callable[[], Mapping[str, Any]] = dict


@dataclass(frozen=True, eq=False)
class Fit(Generic[B]):
    """A stage that learns from rows.

    `modules` are trained with the policy, or instead of it. `evaluate` measures the
    held-out rows every so many steps, and before and after; `show` makes pictures of the last.
    """

    steps: int
    rows: Rows[B]
    policy: Policy
    optimizer: AdamW
    choice: Optimizer
    budget: TokenBudget
    on_nonfinite: OnNonfinite
    checkpoints: Checkpoints
    writer: RunWriter
    modules: Mapping[str, nn.Module]
    reference: Reference | None = None
    evaluate: Callable[[], Measured] | None = None
    evaluate_every: int = 0
    show: Callable[[Measured], None] | None = None

    def state(self, progress: Progress) -> State:
        """All that decides what comes next."""
        optimizers = {"optimizer": self.optimizer}
        return State(progress, self.policy, optimizers, self.modules, self.reference)


def run(fit: Fit[Any], progress: Progress) -> Progress:
    """From `progress` to the last step of the stage, or until the run is asked to stop."""
    writer = fit.writer
    if progress.before is None and fit.evaluate is not None and not writer.interrupted:
        before = measured(fit.evaluate)
        writer.measured(progress, before.as_dict(), "before")
        progress = replace(progress, before=before.headline())
    while progress.step < fit.steps and not writer.interrupted:
        start = time.perf_counter()
        number = progress.step + 1
        learned = take_step(fit, progress, number)
        progress = _after(fit, progress, learned)
        metrics = {**learned.metrics, "num_tokens": float(progress.tokens)}
        if fit.on_nonfinite == "skip":
            metrics["steps_skipped"] = float(progress.skipped)
        last = number == fit.steps
        result: Measured | None = None
        if fit.evaluate is not None and (last or due(fit.evaluate_every, number)):
            with writer.clock("evaluate"):
                result = measured(fit.evaluate)
            metrics |= {f"eval/{name}": value for name, value in result.headline().items()}
            writer.measured(progress, result.as_dict(), "after" if last else "during")
        writer.recorded(progress, metrics, [], time.perf_counter() - start)
        if last and result is not None and fit.show is not None:
            # Before the checkpoint: a run that dies after it does not come here again.
            fit.show(result)
        if writer.checkpoint_due(progress, fit.steps, fit.checkpoints):
            save(fit, progress)
    if writer.interrupted and progress.step == 0:
        save(fit, progress)
    return progress


@oom_context("the held-out rows were measured", f"lower token_budget, {LESS}")
def measured(evaluate: Callable[[], Measured]) -> Measured:
    """What the held-out rows say."""
    return evaluate()


def take_step(fit: Fit[Any], progress: Progress, number: int) -> Learned:
    """One optimizer step on the rows of a step, or none where it would not be finite."""
    with fit.writer.clock("data"):
        rows = fit.rows.draw(number)
    rate = learning_rate(fit.choice, number - 1, fit.steps)
    with fit.writer.clock("update"):
        try:
            learned = update(fit, rows, rate)
        except NotFinite as error:
            fit.optimizer.clear()
            _tell(fit, rows, progress, number, error)
            learned = Learned({}, sum(fit.rows.sizes(rows).lengths))  # they were read
    return replace(learned, metrics={**learned.metrics, "learning_rate": rate})


def update(fit: Fit[Any], rows: Any, rate: float) -> Learned:
    """One optimizer step. Raises NotFinite where none was taken."""
    learned = fit.budget.fitting(
        lambda tokens: fit.rows.learn(rows, tokens), fit.rows.sizes(rows), fit.optimizer.clear
    )
    stop_unless_finite(learned.metrics)
    norm = {"grad_norm": fit.optimizer.step(rate)}
    stop_unless_finite(norm)
    return replace(learned, metrics={**learned.metrics, **norm})


@oom_context("a checkpoint was written", LESS)
def save(fit: Fit[Any], progress: Progress) -> None:
    """Leave a checkpoint."""
    fit.writer.checkpoint(progress, fit.state(progress).save, fit.checkpoints, fit.steps)


def _after(fit: Fit[Any], progress: Progress, learned: Learned) -> Progress:
    taken = "grad_norm" in learned.metrics
    return replace(
        progress,
        step=progress.step + 1,
        stream=fit.rows.stream(),
        tokens=progress.tokens + learned.tokens,
        token_budget=fit.budget.found,
        skipped=progress.skipped + (not taken),
    )


def _tell(fit: Fit[Any], rows: Any, progress: Progress, number: int, error: NotFinite) -> None:
    """Name the cause, keep the rows; stop, where the recipe does not say to go on."""
    parameters = fit.optimizer.parameters
    stage = fit.writer.folder.stages[progress.stage]
    met = faults.NonFiniteStep(stage, number, 0, error.names, progress.skipped, fit.optimizer.began)
    if not faults.searched(fit.writer, met, fit.on_nonfinite, parameters):
        return
    ones = fit.rows.alone(rows)
    cause = in_weights(parameters) or find_offending_sequence(
        lambda i: fit.rows.learn(ones[i], fit.budget.tokens).metrics,
        range(len(ones)),
        parameters,
        fit.optimizer.clear,
    )
    where = "" if cause.sequence is None else f"row {cause.sequence} of the step"
    faults.kept(
        fit.writer,
        met.fault(cause, where),
        fit.on_nonfinite,
        lambda folder: fit.rows.keep(folder, rows),
        error,
    )
