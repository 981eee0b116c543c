"""Writes a run: records, rollouts, checkpoints, run.json; and calls trackers."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from keel.config.secrets import without_secrets
from keel.config.stage import Checkpoints
from keel.platform import files
from keel.platform.signals import Interrupt, Interrupted
from keel.runs import checkpoint
from keel.runs.callbacks import Callbacks
from keel.runs.checkpoint import MANIFEST, Recorded
from keel.runs.layout import Place, RunFolder
from keel.runs.reader import read_run_json
from keel.runs.rows import RolloutRow, encode
from keel.runs.values import plain, record_line
from keel.types import KeelError, one_line

Rows = Sequence[RolloutRow]


# ---------------------------------------------------------------- trackers


class Tracker(Protocol):
    """Shows metrics somewhere else while a run goes on."""

    def log(self, stage: str, step: int, metrics: Mapping[str, Any], rollouts: Rows = ()) -> None:
        """Log the finite metrics of a step, counted within its stage, and its rollouts."""

    def close(self, failed: bool = False) -> None:
        """Send what is buffered, and whether what was logged failed."""


# ---------------------------------------------------------------- records


class JsonlWriter:
    """Appends records to a file, a line each, handed to the kernel as it is written.

    An incomplete last line, left by a process that ended, is removed on opening.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.os_errors(path):
            content = path.read_bytes() if path.is_file() else b""
            if content and not content.endswith(b"\n"):
                os.truncate(path, content.rfind(b"\n") + 1)
            self._file = io.FileIO(path, "ab")

    def write(self, first: Mapping[str, Any], rest: Mapping[str, Any]) -> bytes:
        """One record (see `record_line`); returns its line."""
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


class Recorder(ExitStack):
    """Writes the records of a run folder; use as a context manager, under the folder's lock.

    Numbers that are not finite become null. Order of a step: records and rollouts, `sync`, then the
    checkpoint, so that a checkpoint never holds more than the records do.
    """

    def __init__(
        self,
        folder: RunFolder,
        clock: Callable[[], float] = time.time,
        *,
        inputs: Mapping[str, str] | None = None,
        known: Mapping[str, str] | None = None,
    ) -> None:
        """`inputs` are the run's (`lifecycle.fingerprints`), `known` the files that are checked."""
        super().__init__()
        self.folder = folder
        self._inputs, self._known = dict(inputs or {}), dict(known or {})
        self._clock = clock
        paths = (folder.metrics, folder.timings, folder.events)
        self._writers = [JsonlWriter(path) for path in paths]
        self._metrics, self._timings, self._events = self._writers
        for writer in self._writers:
            self.callback(writer.close)
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
        self._table(self.folder.rollouts(stage, step), stage, step, rows)

    def evaluation(self, stage: int, step: int, rows: Sequence[RolloutRow]) -> None:
        """Write the completions of an evaluation after a step, as `rollouts` does."""
        if rows:
            files.make_folder(self.folder.evaluations_folder)
        self._table(self.folder.evaluation(stage, step), stage, step, rows)

    def _table(self, path: Path, stage: int, step: int, rows: Sequence[RolloutRow]) -> None:
        if not rows:
            return
        content = encode(self.folder.stages[stage], step, rows)
        files.write_bytes(path, content, sync=False)
        self._known[self._name(path)] = hashlib.sha256(content).hexdigest()
        self._not_synced.append(path)

    def sync(self) -> None:
        """Blocks until all that was recorded is on the disk. Call before a checkpoint."""
        for writer in self._writers:
            writer.sync()
        with files.os_errors(self.folder.path):
            for path in self._not_synced:
                files.sync_path(path)
            for inside in {path.parent for path in self._not_synced}:
                files.sync_path(inside)
            files.sync_path(self.folder.path)
        self._not_synced.clear()

    def describe(self, checkpoint: Path, stage: int) -> None:
        """Put hashes of what was recorded so far into a checkpoint of a stage, being written.

        The manifest of a reward model has the hashes of its files. That of this stage is not one
        yet, or is written again.
        """
        made, stages = [], self.folder.stages
        for name in stages[: stage + 1]:
            rows = (self.folder.rows(name, "train"), self.folder.rows(name, "validation"))
            made += [*rows, self.folder.labels(name)]
        made += [self.folder.model(name) / MANIFEST for name in stages[:stage]]
        for path in made:
            if path.is_file() and self._name(path) not in self._known:
                self._known[self._name(path)] = files.sha256(path)
        digest = self._digest.hexdigest()
        with files.os_errors(checkpoint):
            Recorded(self._recipe, self._inputs, digest, self._known).write(checkpoint)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder.path).as_posix()

    def _place(self, stage: int, step: int) -> dict[str, Any]:
        return {"stage": self.folder.stages[stage], "step": step}


def truncate_after(folder: RunFolder, stage: int, step: int) -> None:
    """Deletes what a run wrote after a checkpoint, before it continues from there.

    Records of metrics.jsonl, rollouts, evaluations, checkpoints (those past the newest whole one
    are damaged) and unfinished files. timings.jsonl and events.jsonl log what happened and stay.
    The records that stay keep their bytes. `truncate_after(folder, 0, -1)` empties a run.
    """
    keep_to = Place(stage, step)
    kept = b"".join(line for _, line in checkpoint.records_until(folder, keep_to))
    if folder.metrics.exists() and len(kept) < folder.metrics.stat().st_size:
        files.write_bytes(folder.metrics, kept)
    listed = (folder.list_rollouts(), folder.list_evaluations(), folder.list_checkpoints())
    for entry in chain(*listed):
        if entry.place > keep_to:
            files.remove(entry.path)
    for inside in (folder.path, *folder.path.iterdir()):
        files.remove_leftovers(inside)


def update_run_json(folder: RunFolder, values: Mapping[str, Any]) -> dict[str, Any]:
    """Sets top-level keys of run.json, atomically; returns its content. New keys come last."""
    content = read_run_json(folder)
    content.update({key: plain(value) for key, value in values.items()})
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=2)
    files.write_text(folder.run_json, text + "\n")
    return content


class RunProgress(Protocol):
    """How far a stage (by number, from 0) has come, and at which step it was best so far."""

    @property
    def stage(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def best_step(self) -> int | None: ...


def due(every: int, step: int) -> bool:
    """Whether something done every `every` steps (0: never) is due after this one."""
    return every > 0 and step % every == 0


def _scheduled(progress: RunProgress, steps: int, choice: Checkpoints) -> bool:
    """Whether a run that is not stopped writes a checkpoint here."""
    step = progress.step
    return step > 0 and (due(choice.every, step) or step in (steps, progress.best_step))


class MemoryMeter(Protocol):
    """Measures the most memory since it was reset, in bytes."""

    def reset(self) -> None: ...
    def peak(self) -> int: ...


class Clock:
    """Seconds spent in each phase of a step, and the peak memory of each if there is a meter."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self.memory: MemoryMeter | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        if self.memory is not None:
            self.memory.reset()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent
            if self.memory is not None:
                name = f"memory/{phase}"
                self._peaks[name] = max(self._peaks.get(name, 0.0), self.memory.peak() / 2**30)

    def spent(self, phase: str) -> float:
        """Seconds of a phase since the last `take`."""
        return self._seconds.get(phase, 0.0)

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by phase, and the peaks in GiB as `memory/PHASE`."""
        taken = {**self._seconds, **self._peaks}
        self._seconds, self._peaks = {}, {}
        return taken


@dataclass(eq=False)
class Reached:
    """How far a run is recorded on disk."""

    step: Place | None = None
    """The last recorded step."""
    checkpoint: Place | None = None
    """The newest checkpoint."""

    def describe(self, stages: Sequence[str]) -> str:
        """The text for the error of a run that stops."""
        if self.step is None or self.step == Place(0, 0):
            return "before the first step"
        if self.checkpoint is None:
            newest = "no checkpoint yet"
        else:
            same = self.checkpoint.stage == self.step.stage
            stage = "" if same else f"{stages[self.checkpoint.stage]} "
            newest = f"newest checkpoint: {stage}step {self.checkpoint.step}"
        return f"after {stages[self.step.stage]} step {self.step.step} ({newest})"


@dataclass(frozen=True, eq=False)
class RunWriter:
    """Writes a run folder, for one stage."""

    folder: RunFolder
    recorder: Recorder
    callbacks: Callbacks
    interrupt: Interrupt
    trackers: list[Tracker] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    reached: Reached = field(default_factory=Reached)

    @property
    def interrupted(self) -> bool:
        return bool(self.interrupt)

    def stopped(self) -> bool:
        """Whether a callback has ended the run. Raises Interrupted if a signal has."""
        if self.interrupt.signum is not None:
            self.recorder.event("interrupted", signal=self.interrupt.signum)
            raise Interrupted(self.interrupt.signum, self.folder.path)
        if self.interrupt.reason is not None:
            self.recorder.event("stopped_by_callback", text=self.interrupt.reason)
        return self.interrupted

    def note(self, text: str) -> None:
        """Show a line of information and record it as an event."""
        text = without_secrets(text)
        self.callbacks.note(text)
        self.recorder.event("note", text=text)

    def warn(self, text: str, kind: str, **values: Any) -> None:
        """Show a warning on one line and record it as an event of a kind."""
        text = without_secrets(text)
        self.callbacks.note(f"WARNING: {text}")
        self.recorder.event(kind, text=text, **values)

    def evaluated(
        self,
        progress: RunProgress,
        result: Mapping[str, Any],
        when: Literal["before", "during", "after"],
        key: Literal["evaluation", "measured"] = "evaluation",
        rows: Sequence[RolloutRow] = (),
        scored: str | None = None,
    ) -> None:
        """Report an evaluation; the first and the last of each stage go into run.json as `key`.

        `rows` are the completions that were evaluated, `scored` the metric that selects the best
        checkpoint.
        """
        self.recorder.evaluation(progress.stage, progress.step, rows)
        name = self.folder.stages[progress.stage]
        summary = {part: result[part] for part in ("mean", "n") if part in result}
        self.callbacks.evaluation(progress.step, result)
        self.recorder.event("evaluation", stage=name, step=progress.step, **summary)
        if when == "during":
            return
        content = read_run_json(self.folder)
        parts: dict[str, Any] = {
            key: {part: value for part, value in result.items() if part != "examples"}
        }
        parts |= {"examples": result["examples"]} if "examples" in result else {}
        for part, value in parts.items():
            content.setdefault(part, {}).setdefault(name, {})[when] = value
        if scored is not None:
            content.setdefault("best_metric", {})[name] = scored
        update_run_json(self.folder, content)

    def recorded(
        self,
        progress: RunProgress,
        metrics: Mapping[str, float],
        rows: Sequence[RolloutRow],
        seconds: float,
        speeds: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Record a step that took `seconds`; its timings last, including the time of recording.

        `speeds` depend on the machine, so they are with the timings.
        """
        stage, step = progress.stage, progress.step
        name = self.folder.stages[stage]
        with self.clock("record"):
            self.recorder.metrics(stage, step, metrics)
            self.recorder.rollouts(stage, step, rows)
            logged = {**metrics, **speeds}
            self._track(lambda tracker: tracker.log(name, step, logged, rows))
        self.reached.step = Place(stage, step)
        self.recorder.timings(stage, step, {"total": seconds, **self.clock.take(), **speeds})
        if (factor := self.callbacks.requests.rate_scale) != 1:
            text = f"{name}: learning rates times {factor:g} after step {step}"
            self.callbacks.note(text)
            self.recorder.event("learning_rate", stage=name, step=step, factor=factor, text=text)
        self.callbacks.record(step, metrics, seconds, speeds)

    def close_trackers(self, failed: bool) -> None:
        """Let the trackers of the stage send what they hold, and whether the stage failed."""
        self._track(lambda tracker: tracker.close(failed))

    def _track(self, call: Callable[[Tracker], None]) -> None:
        """Call each tracker; one that fails, such as one whose server is gone, gets no more."""
        for tracker in tuple(self.trackers):
            try:
                call(tracker)
            except KeelError:  # of this disk
                raise
            except Exception as error:
                self.trackers.remove(tracker)
                what = f"{type(tracker).__name__} gets no more metrics"
                self.warn(f"{what}: {one_line(error, named=True)}", "tracker_lost")

    def checkpoint_due(self, progress: RunProgress, steps: int, choice: Checkpoints) -> bool:
        """Every N steps, at the end, at the best, when a callback asks, and before a stop."""
        return self._planned(progress, steps, choice) or self.interrupted

    def _planned(self, progress: RunProgress, steps: int, choice: Checkpoints) -> bool:
        return _scheduled(progress, steps, choice) or self.callbacks.requests.checkpoint

    def checkpoint(
        self,
        progress: RunProgress,
        fill: Callable[[Path], None],
        choice: Checkpoints,
        steps: int | None = None,
    ) -> None:
        """Write a checkpoint by `fill`, completely or not at all, and delete old ones.

        The newest `choice.keep` of the run stay, and the best of each stage. One that is written
        only because of a stop, by the stage's number of `steps`, is deleted with the next. One that
        exists stays as it is.
        """
        start = time.perf_counter()
        stage, step = progress.stage, progress.step
        if self.reached.checkpoint == Place(stage, step):
            return
        self.recorder.sync()
        best = self._best(progress)
        target = self.folder.checkpoint(stage, step)
        stop = steps is not None and not self._planned(progress, steps, choice)
        with checkpoint.writing(target, stop) as aside:
            fill(aside)
            self.recorder.describe(aside, stage)
        self.reached.checkpoint = Place(stage, step)
        checkpoint.prune(self.folder, choice.keep, best)
        self.recorder.event(
            "checkpoint",
            stage=self.folder.stages[stage],
            step=step,
            bytes=sum(path.stat().st_size for path in target.rglob("*") if path.is_file()),
            seconds=round(time.perf_counter() - start, 6),
        )
        self.callbacks.checkpoint(step, target)

    def _best(self, progress: RunProgress) -> list[Path]:
        """The best checkpoint of each stage; run.json has those of earlier stages."""
        stages = self.folder.stages
        known = read_run_json(self.folder).get("best", {})
        best = {name: step for name, step in known.items() if name in stages[: progress.stage]}
        if progress.best_step is not None:
            best[stages[progress.stage]] = progress.best_step
        if best != known:
            # Before the checkpoint: a stage that ends with it must not lose its best.
            update_run_json(self.folder, {"best": best})
        return [self.folder.checkpoint(stages.index(name), step) for name, step in best.items()]
