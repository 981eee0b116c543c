"""The loop of every stage: take a step, evaluate, record, write a checkpoint.

Of an optimizer step that is not taken, since it is not finite, the cause and the batch are kept.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from keel.config.stage import Checkpoints, OnNonfinite, StopRule
from keel.learn.batch import Batch, TrainBatch
from keel.learn.memory import LESS, TokenBudget, oom_context
from keel.learn.optimizer import Cause, NotFinite, tensors_of
from keel.runs import checkpoint
from keel.runs.reader import Run
from keel.runs.rows import RolloutRow
from keel.runs.writer import RunWriter, due
from keel.training.speed import StepWork, speeds_of
from keel.training.state import Progress, State
from keel.training.stopping import StopRules, record_stop
from keel.types import KeelError

MAX_DIAGNOSED = 8
"""Skipped optimizer steps of a stage whose cause is searched for and whose batch is kept."""
MAX_CONSECUTIVE_SKIPS = 20
"""Optimizer steps skipped before any was taken, after which the stage stops."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """A step that was taken: its metrics, and what of the progress it changes.

    `records` makes the rollouts that the step's file shows.
    """

    metrics: dict[str, float]
    tokens: int
    """Tokens that the step trained on."""
    skipped: int = 0
    """Optimizer steps that were not taken because they were not finite."""
    beta: float = 0.0
    advantage: Mapping[str, float] = field(default_factory=dict)
    """The state of the advantage after the step."""
    bonus: Sequence[float] = ()
    stream: Mapping[str, Any] = field(default_factory=dict)
    records: Callable[[], Sequence[RolloutRow]] = tuple
    work: StepWork | None = None


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """An evaluation on the validation split, as it is kept, and `metrics` for its step's record.

    `score` selects the best step, None if it cannot be compared, and is of the metric `scored`;
    `rows` are the completions.
    """

    report: Mapping[str, Any]
    metrics: Mapping[str, float]
    kind: Literal["evaluation", "measured"] = "evaluation"
    score: float | None = None
    scored: str | None = None
    rows: Sequence[RolloutRow] = ()
    before: Mapping[str, Any] = field(default_factory=dict)
    """The figures of it that checkpoints keep if it is the one before the first step."""
    plot: Callable[[], object] | None = None
    """Plots it, if it is the one after the last step."""
    whole: bool = True
    """Whether all that the stage evaluates is in it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Loop(ABC):
    """A stage as the loop runs it; nothing of it is replaced while it runs.

    `evaluate` gets the number of steps taken; a loop that evaluates several things has methods of
    its own in its place. A step is taken within `dropout` of its number.
    """

    steps: int
    checkpoints: Checkpoints
    on_nonfinite: OnNonfinite
    budget: TokenBudget
    writer: RunWriter
    evaluate: Callable[[int], EvaluationResult] | None = None
    evaluate_every: int = 0
    rollouts_every: int = 0
    stop_when: Sequence[StopRule] = ()
    dropout: Callable[[int], AbstractContextManager[object]] = nullcontext

    @property
    def evaluates(self) -> bool:
        """Whether the stage is evaluated at all."""
        return self.evaluate is not None

    def evaluation_due(self, step: int) -> bool:
        """Whether an evaluation is due after a step in the middle of the stage."""
        return due(self.evaluate_every, step)

    def evaluated(self, step: int, whole: bool) -> EvaluationResult:
        """The evaluation after a step: what is due, or the `whole`."""
        assert self.evaluate is not None
        return self.evaluate(step)

    @abstractmethod
    def take_step(self, progress: Progress, number: int) -> StepResult:
        """Step `number`, counted from 1."""

    @abstractmethod
    def state(self, progress: Progress) -> State:
        """Everything that later steps depend on."""

    def skip(
        self,
        progress: Progress,
        error: NotFinite,
        *,
        number: int = 0,
        skipped: int = 0,
        began: bool,
        weight: Callable[[], str | None],
        diagnose: Callable[[], tuple[Cause, str]],
        keep: Callable[[Path], None],
    ) -> None:
        """Record optimizer step `number` (from 0) of the step after `progress`, which was not
        taken, as `skipped` ones before it in that step: its cause and its batch.

        `began` says whether the first optimizer has ever stepped, `weight` names a weight that is
        not finite. `diagnose` gives the cause and the sequence at fault, `keep` writes the batch
        into a folder; both run for the first steps of a stage and for the one that ends the run.

        Raises:
            KeelError: the recipe stops here (`on_nonfinite`), the weights themselves are not
                finite, or none of the stage's first steps was taken.
        """
        writer, skipped = self.writer, progress.skipped + skipped
        stage, step = writer.folder.stages[progress.stage], progress.step + 1
        found = NonFiniteStep(stage, step, number, error.names)
        skips = self.on_nonfinite == "skip"
        if skips and not began and skipped + 1 >= MAX_CONSECUTIVE_SKIPS:
            raise KeelError(
                f"{found.line}, as in all {skipped + 1} optimizer steps of {stage}, so that "
                f"nothing was learned: see the causes in {writer.folder.faults}, and lower "
                "optimizer.learning_rate or fix what they name"
            )
        if skips and skipped >= MAX_DIAGNOSED and weight() is None:
            limit = f"the first {MAX_DIAGNOSED} are diagnosed"
            writer.note(f"{found.line}; the optimizer step was not taken ({limit})")
            return
        cause, sequence = diagnose()
        found = replace(found, cause=cause, sequence=sequence)
        target = writer.folder.faults / f"{stage}-step-{step:06d}-{number}"
        with checkpoint.writing(target) as aside:
            keep(aside)
            checkpoint.save_json(aside / "cause.json", asdict(found))
        writer.recorder.event("not_finite", **asdict(found))
        line = f"{found.line}; its batch is in {target}"
        if cause.weights:
            raise KeelError(
                f"{line}: no step can be taken from such weights: lower optimizer.learning_rate "
                "and resume from an earlier checkpoint, or fix the model"
            ) from error
        if not skips:
            raise KeelError(
                f"{line}: lower optimizer.learning_rate, or set "
                'on_nonfinite = "skip" to continue without such steps'
            ) from error
        writer.note(line)


@dataclass(frozen=True, slots=True)
class NonFiniteStep:
    """An optimizer step that was not taken, since some of its metrics were not finite."""

    stage: str
    step: int
    number: int
    """Optimizer steps of the step before this one."""
    names: tuple[str, ...]
    cause: Cause | None = None
    sequence: str = ""
    """The sequence at fault, in words that the user can look up."""

    @property
    def line(self) -> str:
        """What happened, in one line."""
        where = f"{self.stage} step {self.step}: {', '.join(self.names)} came out non-finite"
        if self.cause is None:
            return where
        token = "" if self.cause.token is None else f", token {self.cause.token}"
        place = f" of {self.sequence}{token}" if self.sequence else ""
        return f"{where}, from {self.cause.term}{place}; the optimizer step was not taken"


def write_batch(folder: Path, batch: TrainBatch[Batch]) -> None:
    """The tensors of a batch whose step was not taken, and its lengths."""
    checkpoint.save_tensors(folder / "batch.safetensors", tensors_of(batch))
    actions = batch.actions
    names = ("lengths", "input_lengths", "lags")
    lengths = {name: getattr(actions, name) for name in names}
    checkpoint.save_json(folder / "batch.json", lengths)


def run(loop: Loop, progress: Progress) -> Progress:
    """Train from `progress` to the last step of the stage, or until a rule ends it or the run is to
    stop."""
    steps, writer = loop.steps, loop.writer
    name = writer.folder.stages[progress.stage]
    if progress.before is None and loop.evaluates and not writer.interrupted:
        found = loop.evaluated(progress.step, whole=True)
        _report(loop, progress, found, "before")
        progress = replace(progress, before=found.before)
    rules = StopRules(loop.stop_when, Run(writer.folder).metrics(name) if loop.stop_when else ())
    while not progress.is_over(steps) and not writer.interrupted:
        start = time.perf_counter()
        number = progress.step + 1
        with loop.dropout(number):
            step = loop.take_step(progress, number)
        progress = replace(
            progress,
            step=number,
            beta=step.beta,
            advantage=step.advantage,
            bonus=step.bonus,
            stream=step.stream,
            tokens=progress.tokens + step.tokens,
            token_budget=loop.budget.found,
            skipped=progress.skipped + step.skipped,
        )
        metrics = {**step.metrics, "num_tokens": float(progress.tokens)}
        if loop.on_nonfinite == "skip":
            metrics["steps_skipped"] = float(progress.skipped)
        seconds = time.perf_counter() - start
        work = step.work or StepWork(step.tokens)
        speeds = speeds_of(work, seconds, writer.clock.spent("update"))
        requests = writer.callbacks.step(number, metrics, seconds, speeds, evaluates=loop.evaluates)
        start = time.perf_counter()
        evaluation: EvaluationResult | None = None
        whole = number == steps or requests.evaluate
        if loop.evaluates and (whole or loop.evaluation_due(number)):
            evaluation = _evaluate(loop, number, metrics, whole)
        rule = None if number == steps else rules(metrics)
        if rule is not None:
            progress = replace(progress, stopped=True)
            if loop.evaluates and (evaluation is None or not evaluation.whole):
                evaluation = _evaluate(loop, number, metrics, True)
        over = progress.is_over(steps)
        if evaluation is not None:
            _report(loop, progress, evaluation, "after" if over else "during")
            progress = _with_best(progress, evaluation.score)
        progress = replace(progress, rate_scale=progress.rate_scale * requests.rate_scale)
        seconds += time.perf_counter() - start
        with writer.clock("record"):
            records = step.records() if due(loop.rollouts_every, number) else ()
        writer.recorded(progress, metrics, records, seconds, speeds)
        # What follows is before the checkpoint: a run that is killed after it does not come here
        # again.
        if over and evaluation is not None and evaluation.plot is not None:
            evaluation.plot()
        if rule is not None:
            record_stop(writer, name, number, rule)
        if writer.checkpoint_due(progress, _last(loop, progress), loop.checkpoints):
            save(loop, progress)
    if writer.interrupted and progress.step == 0:
        save(loop, progress)
    return progress


def _evaluate(loop: Loop, number: int, metrics: dict[str, float], whole: bool) -> EvaluationResult:
    """The evaluation after a step; its metrics go into the step's."""
    with loop.writer.clock("evaluate"):
        found = loop.evaluated(number, whole)
    metrics |= found.metrics
    return found


def _last(loop: Loop, progress: Progress) -> int:
    """The stage's last step, as far as it is known."""
    return progress.step if progress.stopped else loop.steps


@oom_context("a checkpoint was written", LESS)
def save(loop: Loop, progress: Progress) -> None:
    """Write a checkpoint."""
    loop.writer.checkpoint(
        progress, loop.state(progress).save, loop.checkpoints, _last(loop, progress)
    )


def _report(
    loop: Loop,
    progress: Progress,
    found: EvaluationResult,
    when: Literal["before", "during", "after"],
) -> None:
    rows = found.rows if loop.rollouts_every else ()
    loop.writer.evaluated(progress, found.report, when, found.kind, rows, scored=found.scored)


def _with_best(progress: Progress, score: float | None) -> Progress:
    """The progress with this step as the best, unless an earlier one was better."""
    if score is None or (progress.best is not None and score < progress.best):
        return progress
    return replace(progress, best=score, best_step=progress.step)
