"""A step that could not be taken: what it was learned from is kept, and the cause named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from keel.learn.batch import Batch
from keel.learn.finite import Cause, NotFinite
from keel.runs import checkpoint
from keel.runs.files import make_folder, write_text
from keel.runs.session import Session
from keel.runs.watchdog import Hung
from keel.types import KeelError

Choice = Literal["stop", "skip"]


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


def met(
    session: Session, fault: Fault, choice: Choice, fill: Callable[[Path], None], error: NotFinite
) -> None:
    """Keep what was learned from in the run folder; then stop, or note it and go on.

    Raises:
        KeelError: the recipe does not say to go on.
    """
    name = f"{fault.stage}-step-{fault.step:06d}-{fault.number}"
    target = session.folder.faults / name

    def whole(folder: Path) -> None:
        fill(folder)
        checkpoint.save_json(folder / "cause.json", dataclasses.asdict(fault))

    with checkpoint.writing(target) as aside:
        whole(aside)
    session.recorder.event("not_finite", **dataclasses.asdict(fault))
    if choice == "stop":
        raise KeelError(
            f"{fault.line}; its batch is in {target}: lower optimizer.learning_rate, or set "
            'on_nonfinite = "skip" to go on without such steps'
        ) from error
    session.note(f"{fault.line}; its batch is in {target}")


@contextmanager
def keeping_stacks(session: Session) -> Iterator[None]:
    """A call that gave no answer leaves its stack in the run folder."""
    try:
        yield
    except Hung as error:
        if not error.stack:
            raise
        count = len(list(session.folder.faults.glob("hang-*.txt")))
        target = session.folder.faults / f"hang-{count + 1}.txt"
        make_folder(target.parent)
        write_text(target, f"{error}\n\n{error.stack}")
        session.recorder.event("hung", text=str(error), stack=target.name)
        raise KeelError(f"{error}; its stack is in {target}") from error


def write_batch(folder: Path, batch: Batch) -> None:
    """The batch's tensors, and its lengths."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    kept = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    checkpoint.save_tensors(folder / "batch.safetensors", kept)
    lengths = {"lengths": batch.lengths, "input_lengths": batch.input_lengths}
    checkpoint.save_json(folder / "batch.json", lengths)


def write_rows(folder: Path, rows: Sequence[Any]) -> None:
    """Rows as plain values."""
    plain: list[Mapping[str, Any]] = [dataclasses.asdict(row) for row in rows]
    checkpoint.save_json(folder / "rows.json", {"rows": plain})
