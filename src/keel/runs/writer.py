"""Writes a run: records, rollouts and checkpoints; calls trackers and callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from keel.config.optimisation import Checkpoints
from keel.config.secrets import without_secrets
from keel.runs import checkpoint
from keel.runs.callbacks import Callbacks
from keel.runs.layout import Place, RunFolder
from keel.runs.records import Recorder, update_run_json
from keel.runs.rollouts import RolloutRow
from keel.runs.signals import Interrupt, Interrupted
from keel.runs.trackers import Tracker


class RunProgress(Protocol):
    """How far a stage (by number, from 0) has come, and at which step it was best so far."""

    @property
    def stage(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def best_step(self) -> int | None: ...


def due(every: int, step: int) -> bool:
    """Whether something done every so many steps (0: never) is done after this one."""
    return every > 0 and step % every == 0


def _scheduled(progress: RunProgress, steps: int, choice: Checkpoints) -> bool:
    """Whether a run that is not stopped writes a checkpoint here."""
    step = progress.step
    return step > 0 and (due(choice.every, step) or step in (steps, progress.best_step))


class Clock:
    """Seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


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
    trackers: Sequence[Tracker] = ()
    clock: Clock = field(default_factory=Clock)
    reached: Reached = field(default_factory=Reached)

    @property
    def interrupted(self) -> bool:
        return bool(self.interrupt)

    def stopped(self) -> bool:
        """Whether a callback has ended the run. Raises Interrupted where a signal has."""
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

    def evaluated(
        self,
        progress: RunProgress,
        result: Mapping[str, Any],
        when: Literal["before", "during", "after"],
    ) -> None:
        """Report an evaluation; the first and the last of each stage go into run.json."""
        name = self.folder.stages[progress.stage]
        self.callbacks.evaluation(progress.step, result)
        self.recorder.event(
            "evaluation", stage=name, step=progress.step, mean=result["mean"], n=result["n"]
        )
        if when == "during":
            return
        known = update_run_json(self.folder, {})
        news = {"evaluation": {k: v for k, v in result.items() if k != "examples"}}
        if "examples" in result:
            news["examples"] = result["examples"]
        for key, value in news.items():
            every = known.get(key, {})
            news[key] = {**every, name: {**every.get(name, {}), when: value}}
        update_run_json(self.folder, news)

    def measured(
        self,
        progress: RunProgress,
        result: Mapping[str, Any],
        when: Literal["before", "during", "after"],
    ) -> None:
        """Report an evaluation of a reward model; the first and the last go into run.json."""
        name = self.folder.stages[progress.stage]
        self.callbacks.evaluation(progress.step, result)
        self.recorder.event("evaluation", stage=name, step=progress.step, n=result["n"])
        if when == "during":
            return
        known = update_run_json(self.folder, {}).get("measured", {})
        own = {**known.get(name, {}), when: dict(result)}
        update_run_json(self.folder, {"measured": {**known, name: own}})

    def recorded(
        self,
        progress: RunProgress,
        metrics: Mapping[str, float],
        rows: Sequence[RolloutRow],
        seconds: float,
    ) -> None:
        """Record a step that took `seconds`; its timings last, including the time of recording."""
        stage, step = progress.stage, progress.step
        name = self.folder.stages[stage]
        with self.clock("record"):
            self.recorder.metrics(stage, step, metrics)
            self.recorder.rollouts(stage, step, rows)
            for tracker in self.trackers:
                tracker.log(name, step, metrics, rows)
        self.reached.step = Place(stage, step)
        self.recorder.timings(stage, step, {"total": seconds, **self.clock.take()})
        self.callbacks.step(step, metrics, seconds)

    def checkpoint_due(self, progress: RunProgress, steps: int, choice: Checkpoints) -> bool:
        """Every so many steps, at the end, at the best, and when asked to stop."""
        return _scheduled(progress, steps, choice) or self.interrupted

    def checkpoint(
        self,
        progress: RunProgress,
        fill: Callable[[Path], None],
        choice: Checkpoints,
        steps: int | None = None,
    ) -> None:
        """Write a checkpoint by `fill`, completely or not at all, and delete old ones.

        The newest `choice.keep` of the run stay, and of each stage the one that did best. Where
        `steps`, those of the stage, say that only a stop asked for it, it goes with the next. One
        that is there already stays as it is.
        """
        start = time.perf_counter()
        stage, step = progress.stage, progress.step
        if self.reached.checkpoint == Place(stage, step):
            return
        self.recorder.sync()
        best = self._best(progress)
        target = self.folder.checkpoint(stage, step)
        stop = steps is not None and not _scheduled(progress, steps, choice)
        with checkpoint.writing(target, stop) as aside:
            fill(aside)
            self.recorder.describe(aside, stage)
        self.reached.checkpoint = Place(stage, step)
        checkpoint.prune(self.folder, choice.keep, best)
        self.recorder.event(
            "checkpoint",
            stage=self.folder.stages[stage],
            step=step,
            bytes=checkpoint.size(target),
            seconds=round(time.perf_counter() - start, 6),
        )
        self.callbacks.checkpoint(step, target)

    def _best(self, progress: RunProgress) -> list[Path]:
        """The checkpoint of each stage that did best; run.json knows those of earlier stages."""
        stages = self.folder.stages
        known = update_run_json(self.folder, {}).get("best", {})
        best = {name: step for name, step in known.items() if name in stages[: progress.stage]}
        if progress.best_step is not None:
            best[stages[progress.stage]] = progress.best_step
        if best != known:
            # Before the checkpoint: a stage that ends with it must not lose its best.
            update_run_json(self.folder, {"best": best, "best_selected_on": "validation split"})
        return [self.folder.checkpoint(stages.index(name), step) for name, step in best.items()]
