"""A step that could not be taken: what it was learned from is kept, and the cause named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config.optimisation import OnNonfinite
from keel.learn.batch import Batch, TrainBatch
from keel.learn.finite import Cause, NotFinite, tensors_of
from keel.learn.optimizer import Named, bad_weight
from keel.learn.token_budget import LESS, oom_context
from keel.runs import checkpoint
from keel.runs.files import make_folder, write_text
from keel.runs.watchdog import Hung
from keel.runs.writer import RunWriter
from keel.types import KeelError

MAX_DIAGNOSED = 8
"""Faults of a stage whose cause is searched for and whose batch is kept; more say no more."""
MAX_CONSECUTIVE_SKIPS = 20
"""Optimizer steps not taken, with none ever taken, after which a stage is not worth going on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Metrics of a step that are not finite, and where they come from.

    `sequence` says which, in words that the user can look up.
    """

    stage: str
    step: int
    number: int
    """Optimizer steps of the step that were asked for before, from 0."""
    names: tuple[str, ...]
    cause: Cause
    sequence: str

    @property
    def line(self) -> str:
        """What came of it, in one line."""
        token = "" if self.cause.token is None else f", token {self.cause.token}"
        where = f" of {self.sequence}{token}" if self.sequence else ""
        return (
            f"{self.stage} step {self.step}: {', '.join(self.names)} came out non-finite, from "
            f"{self.cause.term}{where}; the optimizer step was not taken"
        )


@dataclass(frozen=True, slots=True)
class NonFiniteStep:
    """Where a step could not be taken, and what was before.

    `skipped` counts the steps of the stage that were not taken before; `began` says whether one
    ever was.
    """

    stage: str
    step: int
    number: int
    names: tuple[str, ...]
    skipped: int
    began: bool

    def fault(self, cause: Cause, sequence: str) -> Fault:
        return Fault(self.stage, self.step, self.number, self.names, cause, sequence)


def searched(writer: RunWriter, met: NonFiniteStep, choice: OnNonfinite, parameters: Named) -> bool:
    """Whether the cause is to be searched for; where not, the fault is noted here.

    The first of a stage are, and whatever ends the run.

    Raises:
        KeelError: no step of the stage was ever taken, and enough were tried.
    """
    line = f"{met.stage} step {met.step}: {', '.join(met.names)} came out non-finite"
    if choice == "skip" and not met.began and met.skipped + 1 >= MAX_CONSECUTIVE_SKIPS:
        raise KeelError(
            f"{line}, as in all {met.skipped + 1} optimizer steps of {met.stage}, so that nothing "
            f"was learned: see the causes in {writer.folder.faults}, and lower "
            "optimizer.learning_rate or fix what they name"
        )
    if choice == "stop" or met.skipped < MAX_DIAGNOSED or bad_weight(parameters) is not None:
        return True
    writer.note(f"{line}; the optimizer step was not taken (the first {MAX_DIAGNOSED} say more)")
    return False


def kept(
    writer: RunWriter,
    fault: Fault,
    choice: OnNonfinite,
    fill: Callable[[Path], None],
    error: NotFinite,
) -> None:
    """Keep what was learned from in the run folder; then stop, or note it and go on.

    Raises:
        KeelError: the recipe does not say to go on, or the weights themselves are not finite.
    """
    name = f"{fault.stage}-step-{fault.step:06d}-{fault.number}"
    target = writer.folder.faults / name
    with checkpoint.writing(target) as aside:
        fill(aside)
        checkpoint.save_json(aside / "cause.json", dataclasses.asdict(fault))
    writer.recorder.event("not_finite", **dataclasses.asdict(fault))
    if fault.cause.weights:
        raise KeelError(
            f"{fault.line}; its batch is in {target}: no step can be taken from such weights: "
            "lower optimizer.learning_rate and go on from a checkpoint before, or fix the model"
        ) from error
    if choice == "stop":
        raise KeelError(
            f"{fault.line}; its batch is in {target}: lower optimizer.learning_rate, or set "
            'on_nonfinite = "skip" to go on without such steps'
        ) from error
    writer.note(f"{fault.line}; its batch is in {target}")


@contextmanager
def keeping_stacks(writer: RunWriter) -> Iterator[None]:
    """A call that gave no answer leaves its stack in the run folder.

    Memory that runs out where nothing nearer says what for is a KeelError too.
    """
    try:
        with oom_context("a model or batch was made ready", LESS):
            yield
    except Hung as error:
        if not error.stack:
            raise
        count = len(list(writer.folder.faults.glob("hang-*.txt")))
        target = writer.folder.faults / f"hang-{count + 1}.txt"
        make_folder(target.parent)
        write_text(target, f"{error}\n\n{error.stack}")
        writer.recorder.event("hung", text=str(error), stack=target.name)
        raise KeelError(f"{error}; its stack is in {target}") from error


def write_batch(folder: Path, batch: TrainBatch[Batch]) -> None:
    """The batch's tensors, and its lengths."""
    checkpoint.save_tensors(folder / "batch.safetensors", tensors_of(batch))
    lengths = {"lengths": batch.lengths, "input_lengths": batch.actions.input_lengths}
    checkpoint.save_json(folder / "batch.json", lengths)


def write_rows(folder: Path, rows: Sequence[Any]) -> None:
    """Rows as plain values."""
    plain: list[Mapping[str, Any]] = [dataclasses.asdict(row) for row in rows]
    checkpoint.save_json(folder / "rows.json", {"rows": plain})
