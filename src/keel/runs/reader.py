"""Reads a run folder, also one that is being written. Torch-free.

`load("runs/quickstart-1").column("reward", stage="rl")` gives the steps and the rewards.
"""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from keel.platform import files
from keel.runs.layout import FolderEntry, Place, RunFolder
from keel.runs.rows import read_table
from keel.types import KeelError

if TYPE_CHECKING:
    import pyarrow as pa

HINT = "fix it, or delete it: --resume writes a new one"
Record = dict[str, Any]


def read_run_json(folder: RunFolder) -> dict[str, Any]:
    """The content of run.json; empty if it is not written yet.

    Raises:
        KeelError: the file cannot be read.
    """
    path = folder.run_json
    try:
        content: Record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise KeelError(f"cannot read {path}: {error}: {HINT}") from error
    return content


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder, opened for reading. Every method reads the file as it is now."""

    folder: RunFolder

    def __fspath__(self) -> str:
        """The path of the run folder, so that a run is taken wherever a path is."""
        return str(self.folder.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder.path)!r}, stages={', '.join(self.stages)})"

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the recipe's stages, in order."""
        return self.folder.stages

    def recipe(self) -> Record:
        """The resolved recipe."""
        return tomllib.loads(self.folder.recipe.read_text(encoding="utf-8"))

    def info(self) -> Record:
        """run.json; empty if it is not written yet."""
        return read_run_json(self.folder)

    def state(self) -> Literal["running", "finished", "interrupted", "failed"]:
        """The state of the run; of one without a process by what its last event says.

        A run that was killed is interrupted, one that an error stopped has failed.
        """
        if self.info().get("finished"):
            return "finished"
        if files.is_taken(self.folder.path):
            return "running"
        last = self.events()[-1:]
        return "failed" if last and last[0].get("event") == "stopped" else "interrupted"

    def tags(self) -> list[str]:
        """What `keel runs tag` has marked the run with."""
        try:
            found = json.loads(self.folder.tags.read_bytes())
        except (OSError, ValueError):
            return []
        return [str(tag) for tag in found] if isinstance(found, list) else []

    def disk_use(self) -> int:
        """The bytes of all files in the run folder."""
        return files.size_of(self.folder.path)

    def metrics(self, stage: str | None = None) -> list[Record]:
        """The records of metrics.jsonl, of one stage or of all, in the order written."""
        return self._records(self.folder.metrics, stage)

    def timings(self, stage: str | None = None) -> list[Record]:
        """The records of timings.jsonl; a step that was repeated after a kill has two."""
        return self._records(self.folder.timings, stage)

    def seconds(self, stage: str | None = None) -> float:
        """What the steps took, repeated ones counted twice."""
        return float(sum(record["total"] for record in self.timings(stage)))

    def events(self) -> list[Record]:
        """The records of events.jsonl."""
        return self._records(self.folder.events, None)

    def names(self, stage: str | None = None) -> list[str]:
        """The names of all metrics, sorted."""
        found = {name for record in self.metrics(stage) for name in record}
        return sorted(found - {"stage", "step"})

    def columns(self, stage: str) -> Mapping[str, Column]:
        """The metrics of a stage by name."""
        metrics = FollowedFile(self.folder.metrics)
        metrics.update()
        return metrics.columns(stage)

    def column(
        self, name: str, stage: str | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Steps and values of a metric, in records that have it; null (not finite) reads as NaN.

        Steps count within a stage: name the stage if the recipe has several.
        """
        found = [record for record in self.metrics(stage) if name in record]
        steps = np.array([record["step"] for record in found], dtype=np.int64)
        values = [np.nan if record[name] is None else record[name] for record in found]
        return steps, np.array(values, dtype=np.float64)

    def rollout_places(self) -> list[Place]:
        """The stages and steps whose rollouts were written, in the order of the run."""
        return [entry.place for entry in self.folder.list_rollouts()]

    def rollouts(self, step: int, stage: str | None = None) -> list[Record]:
        """The rollouts of a step, a dict per completion with messages and arrays as lists.

        Raises KeelError if the step has none, or the file is damaged.
        """
        return rows_of(self.rollout_table(step, stage))

    def rollout_table(self, step: int, stage: str | None = None) -> pa.Table:
        """The rollouts of a step as an Arrow table: a tenth of the memory of `rollouts`.

        Raises KeelError as `rollouts` does.
        """
        path = self.folder.rollouts(self._stage_of_rollouts(stage), step)
        if not path.is_file():
            steps = [place.step for place in self.rollout_places()]
            there = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
            raise KeelError(
                f"no rollouts of step {step} in {self.folder.path}: {path} is not there (it has "
                f"those of {there})"
            )
        return read_table(path)

    def evaluation(self, step: int, stage: str | None = None) -> list[Record]:
        """The completions of the evaluation after a step (0: before the first), as `rollouts`.

        `mode` is "greedy" or "sampled", `passed` whether the completion is correct (None if no
        reward is declared as correctness). Empty if the stage was not evaluated there.
        """
        name = self.stages[-1] if stage is None else stage
        path = self.folder.evaluation(self._stage_of_rollouts(name), step)
        return rows_of(read_table(path)) if path.is_file() else []

    def evaluation_places(self) -> list[Place]:
        """The stages and steps whose evaluations were written, in the order of the run."""
        return [entry.place for entry in self.folder.list_evaluations()]

    def checkpoints(self) -> list[FolderEntry]:
        """The checkpoints, in the order of the run, unverified."""
        return self.folder.list_checkpoints()

    def _stage_of_rollouts(self, stage: str | None) -> int:
        if stage is not None:
            if stage not in self.stages:
                raise KeelError(f'no stage "{stage}" in {self.folder.path}: one of {self.stages}')
            return self.stages.index(stage)
        having = {place.stage for place in self.rollout_places()}
        if len(having) > 1:
            raise KeelError(f"several stages of {self.folder.path} have rollouts: name the stage")
        return having.pop() if having else len(self.stages) - 1

    def _records(self, path: Path, stage: str | None) -> list[Record]:
        records = (record for _, _, record in files.read_jsonl(path))
        return [record for record in records if stage is None or record.get("stage") == stage]


def rows_of(table: pa.Table) -> list[Record]:
    """The rows of a table of rollouts, or of a slice of it, as `Run.rollouts` gives them."""
    rows: list[Record] = table.to_pylist()
    for row in rows:
        if row.pop("prompt_format") == "messages":
            row["prompt"] = json.loads(row["prompt"])
    return rows


def load(path: Path | str) -> Run:
    """The run in a folder. Raises KeelError if there is none."""
    return Run(RunFolder.open(path))


Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """The values of one metric and the steps that have it; null reads as NaN."""

    steps: Array
    values: Array


@dataclass(eq=False)
class FollowedFile:
    """A file of records, of which each `update` reads what was added since.

    A file that was cut, as a resumed run does with the records after its checkpoint, is read again
    from its start. Several readers may share one: each compares `version`, which grows whenever the
    columns change, with that of the columns it last used.
    """

    path: Path
    version: int = 0
    _offset: int = 0
    _lines: int = 0
    _tail: bytes = b""
    _columns: dict[str, dict[str, tuple[list[float], list[float]]]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def update(self) -> int:
        """Read what is new; the version after it.

        May be called from any thread, as the other methods.

        Raises:
            KeelError: a line is damaged, or the file cannot be read.
        """
        with self._lock:
            self._update()
            return self.version

    def _update(self) -> None:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset or not self._ends_as_before(file):
                    self._offset, self._lines, self._tail, self._columns = 0, 0, b"", {}
                    self.version += 1
                file.seek(self._offset)
                content = file.read(size - self._offset)
        except FileNotFoundError:
            return
        except OSError as error:
            raise KeelError(f"cannot read {self.path}: {error.strerror}: fix it") from error
        end = content.rfind(b"\n") + 1  # the last line may be half written
        # All before any is kept: after a damaged line the same are read again.
        lines = enumerate(content[:end].splitlines(), self._lines + 1)
        parsed = [self._parsed(number, line) for number, line in lines]
        for stage, step, record in parsed:
            columns = self._columns.setdefault(stage, {})
            for name, value in record.items():
                if value is not None and not isinstance(value, int | float):
                    continue
                steps, values = columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(np.nan if value is None else float(value))
        self._offset += end
        self._lines += len(parsed)
        self._tail = (self._tail + content[:end])[-64:]
        self.version += end > 0

    def stages(self) -> list[str]:
        """The stages that have records, in the order of the run."""
        with self._lock:
            return list(self._columns)

    def columns(self, stage: str) -> Mapping[str, Column]:
        """The metrics of a stage by name; without records none."""
        with self._lock:
            found = self._columns.get(stage, {})
            return {name: Column(np.array(s), np.array(v)) for name, (s, v) in found.items()}

    def _ends_as_before(self, file: BinaryIO) -> bool:
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _parsed(self, number: int, line: bytes) -> tuple[str, float, dict[str, Any]]:
        try:
            record = json.loads(line)
            return str(record.pop("stage")), float(record.pop("step")), record
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise files.damaged_line(self.path, number, error) from error
