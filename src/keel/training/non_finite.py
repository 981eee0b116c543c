"""Optimizer steps that are not finite, and calls that hang: the cause is recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config.stage import OnNonfinite
from keel.learn.batch import Batch, TrainBatch
from keel.learn.finite import Cause, NotFinite, tensors_of
from keel.learn.token_budget import LESS, oom_context
from keel.platform.files import make_folder, write_text
from keel.platform.time_limit import Hung
from keel.runs import checkpoint
from keel.runs.writer import RunWriter
from keel.types import KeelError

MAX_DIAGNOSED = 8
"""Skipped optimizer steps of a stage whose cause is searched for and whose batch is kept."""
MAX_CONSECUTIVE_SKIPS = 20
"""Optimizer steps skipped before any was taken, after which the stage stops."""


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


def report(
    writer: RunWriter,
    found: NonFiniteStep,
    error: NotFinite,
    *,
    action: OnNonfinite,
    skipped: int,
    began: bool,
    weight: Callable[[], str | None],
    diagnose: Callable[[], tuple[Cause, str]],
    keep: Callable[[Path], None],
) -> None:
    """Record a step that was not taken, `skipped` ones before it: its cause and its batch.

    `began` says whether the first optimizer has ever stepped, `weight` names a weight that is not
    finite. `diagnose` gives the cause and the sequence at fault, `keep` writes the batch into a
    folder; both run for the first steps of a stage and for the one that ends the run.

    Raises:
        KeelError: the recipe stops here (`action`), the weights themselves are not finite, or
            none of the stage's first steps was taken.
    """
    if action == "skip" and not began and skipped + 1 >= MAX_CONSECUTIVE_SKIPS:
        raise KeelError(
            f"{found.line}, as in all {skipped + 1} optimizer steps of {found.stage}, so that "
            f"nothing was learned: see the causes in {writer.folder.faults}, and lower "
            "optimizer.learning_rate or fix what they name"
        )
    if action == "skip" and skipped >= MAX_DIAGNOSED and weight() is None:
        limit = f"the first {MAX_DIAGNOSED} are diagnosed"
        writer.note(f"{found.line}; the optimizer step was not taken ({limit})")
        return
    cause, sequence = diagnose()
    found = dataclasses.replace(found, cause=cause, sequence=sequence)
    target = writer.folder.faults / f"{found.stage}-step-{found.step:06d}-{found.number}"
    with checkpoint.writing(target) as aside:
        keep(aside)
        checkpoint.save_json(aside / "cause.json", dataclasses.asdict(found))
    writer.recorder.event("not_finite", **dataclasses.asdict(found))
    line = f"{found.line}; its batch is in {target}"
    if cause.weights:
        raise KeelError(
            f"{line}: no step can be taken from such weights: lower optimizer.learning_rate and "
            "resume from an earlier checkpoint, or fix the model"
        ) from error
    if action == "stop":
        raise KeelError(
            f"{line}: lower optimizer.learning_rate, or set "
            'on_nonfinite = "skip" to continue without such steps'
        ) from error
    writer.note(line)


@contextmanager
def keeping_stacks(writer: RunWriter) -> Iterator[None]:
    """Write the stack of a call that hangs into the run folder; running out of memory is a
    KeelError."""
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
