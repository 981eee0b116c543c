"""Writes the files of a run: metrics, timings, events, rollouts, run.json. Torch-free."""

from __future__ import annotations

import hashlib
import io
import os
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from keel.config.secrets import without_secrets
from keel.runs import checkpoint as recorded
from keel.runs import files
from keel.runs import rollouts as rollout_table
from keel.runs.checkpoint import Recorded
from keel.runs.layout import Place, RunFolder
from keel.runs.rollouts import RolloutRow
from keel.runs.run_json import read_run_json
from keel.runs.values import document, plain, record_line
from keel.types import Side

_BLOCK = 1 << 16


class JsonlWriter:
    """Appends records to a file, a line each, handed to the kernel as it is written.

    An incomplete last line, left by a process that ended, is removed on opening.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.os_errors(path):
            _cut_torn_line(path)
            self._file = io.FileIO(path, "ab")

    def write(self, first: Mapping[str, Any], rest: Mapping[str, Any]) -> bytes:
        """One record: the keys of `first` in their order, then those of `rest`, sorted.

        Returns the line.
        """
        line = record_line(first, rest)
        left = memoryview(line)
        with files.os_errors(self.path):
            while left:
                left = left[self._file.write(left) or 0 :]
        return line

    def sync(self) -> None:
        """Blocks until all that was written is on the disk."""
        with files.os_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Recorder:
    """The one writer of a run folder's rows; use as a context manager, under the folder's lock.

    Numbers that are not finite become null. Order of a step: rows and rollouts, `sync`, then the
    checkpoint, so that a checkpoint never knows more than the rows do.
    """

    def __init__(
        self,
        folder: RunFolder,
        clock: Callable[[], float] = time.time,
        *,
        inputs: Mapping[str, str] | None = None,
        known: Mapping[str, str] | None = None,
    ) -> None:
        """`inputs` are the run's (`runs.fingerprints`), `known` the files that are checked."""
        self.folder = folder
        self._inputs, self._known = dict(inputs or {}), dict(known or {})
        self._clock = clock
        self._metrics = JsonlWriter(folder.metrics)
        self._timings = JsonlWriter(folder.timings)
        self._events = JsonlWriter(folder.events)
        with files.os_errors(folder.path, "read"):
            self._recipe = tomllib.loads(folder.recipe.read_text("utf-8"))
            self._digest = hashlib.sha256(folder.metrics.read_bytes())
        self._not_synced: list[Path] = []

    def metrics(self, stage: int, step: int, values: Mapping[str, Any]) -> None:
        """Append to metrics.jsonl: values are a function of recipe and seed, and hold no times."""
        self._digest.update(self._metrics.write(self._place(stage, step), values))

    def timings(self, stage: int, step: int, values: Mapping[str, Any]) -> None:
        """Append to timings.jsonl: seconds, and whatever else depends on the machine."""
        self._timings.write(self._place(stage, step), values)

    def event(self, kind: str, **values: Any) -> None:
        """Append to events.jsonl, with the time (seconds since 1970, UTC)."""
        first = {"time": round(self._clock(), 3), "event": kind}
        self._events.write(first, without_secrets(values))

    def rollouts(self, stage: int, step: int, rows: Sequence[RolloutRow]) -> None:
        """Write the rollouts of a step, replacing earlier ones. Without rows there is no file."""
        if not rows:
            return
        path = self.folder.rollouts(stage, step)
        content = rollout_table.encode(self.folder.stages[stage], step, rows)
        files.write_bytes(path, content, sync=False)
        self._known[self._name(path)] = hashlib.sha256(content).hexdigest()
        self._not_synced.append(path)

    def sync(self) -> None:
        """Blocks until all that was recorded is on the disk. Call before a checkpoint."""
        for writer in (self._metrics, self._timings, self._events):
            writer.sync()
        with files.os_errors(self.folder.rollouts_folder):
            for path in self._not_synced:
                files.sync_file(path)
            if self._not_synced:
                files.sync_folder(self.folder.rollouts_folder)
            files.sync_folder(self.folder.path)
        self._not_synced.clear()

    def describe(self, checkpoint: Path, stage: int) -> None:
        """Put hashes of what was recorded so far into a checkpoint of a stage, being written."""
        sides: tuple[Side, ...] = ("train", "heldout")
        for name in self.folder.stages[: stage + 1]:
            for path in (self.folder.rows(name, side) for side in sides):
                if path.is_file() and self._name(path) not in self._known:
                    self._known[self._name(path)] = files.sha256(path)
        digest = self._digest.hexdigest()
        with files.os_errors(checkpoint):
            Recorded(self._recipe, self._inputs, digest, self._known).write(checkpoint)

    def close(self) -> None:
        for writer in (self._metrics, self._timings, self._events):
            writer.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder.path).as_posix()

    def _place(self, stage: int, step: int) -> dict[str, Any]:
        return {"stage": self.folder.stages[stage], "step": step}


def truncate_after(folder: RunFolder, stage: int, step: int) -> None:
    """Deletes what a run wrote after a checkpoint, before it continues from there.

    Rows of metrics.jsonl, rollouts, checkpoints (those past the newest whole one are damaged) and
    unfinished files go; timings.jsonl and events.jsonl stay, for they tell what happened. The rows
    that stay keep their bytes. `truncate_after(folder, 0, -1)` empties a run.
    """
    keep_to = Place(stage, step)
    _truncate_rows(folder, keep_to)
    for entry in (*folder.list_rollouts(), *folder.list_checkpoints()):
        if entry.place > keep_to:
            files.remove(entry.path)
    for inside in (folder.path, *folder.folders):
        files.remove_leftovers(inside)


def _truncate_rows(folder: RunFolder, keep_to: Place) -> None:
    kept = b"".join(row for _, row in recorded.records_until(folder, keep_to))
    if folder.metrics.exists() and len(kept) < folder.metrics.stat().st_size:
        files.write_bytes(folder.metrics, kept)


def update_run_json(folder: RunFolder, values: Mapping[str, Any]) -> dict[str, Any]:
    """Sets top-level keys of run.json, in one instant; returns the whole. New keys come last.

    Without values nothing is written.

    Raises:
        KeelError: the file there is cannot be read, has another shape, or cannot be replaced.
    """
    whole = read_run_json(folder)
    if values:
        whole.update({key: plain(value) for key, value in values.items()})
        files.write_text(folder.run_json, document(whole))
    return whole


def _cut_torn_line(path: Path) -> None:
    """Shortens the file to the end of its last whole line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
