"""A run while it is written: rows, rollouts, checkpoints, trackers, and the one who watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from keel.config.optimisation import Checkpoints
from keel.runs import checkpoint
from keel.runs.interrupt import Interrupt
from keel.runs.layout import RunFolder
from keel.runs.record import Recorder, update_run_json
from keel.runs.rollouts import RolloutRow
from keel.runs.trackers import Tracker
from keel.runs.watch import Watcher


class Progress(Protocol):
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
        """What was measured since the last time this was asked."""
        seconds, self._seconds = self._seconds, {}
        return seconds


@dataclass(frozen=True, eq=False)
class Session:
    """The one hand that writes a run folder, for one stage."""

    folder: RunFolder
    recorder: Recorder
    watcher: Watcher
    interrupt: Interrupt
    trackers: Sequence[Tracker] = ()
    clock: Clock = field(default_factory=Clock)

    @property
    def interrupted(self) -> bool:
        return bool(self.interrupt)

    def note(self, text: str) -> None:
        """Something worth knowing, for whoever watches now or reads later."""
        self.watcher.note(text)
        self.recorder.event("note", text=text)

    def evaluated(
        self,
        progress: Progress,
        result: Mapping[str, Any],
        when: Literal["before", "during", "after"],
    ) -> None:
        """Tell of an evaluation; the first and the last go into run.json."""
        name = self.folder.stages[progress.stage]
        self.watcher.evaluation(name, progress.step, result)
        self.recorder.event(
            "evaluation", stage=name, step=progress.step, mean=result["mean"], n=result["n"]
        )
        if when == "during":
            return
        known = update_run_json(self.folder, {})
        if when == "before" and when in known.get("evaluation", {}):
            return  # the first stage that was evaluated says where the run began
        numbers = {k: v for k, v in result.items() if k != "examples"}
        news = {"evaluation": {**known.get("evaluation", {}), when: numbers}}
        if "examples" in result:
            news["examples"] = {**known.get("examples", {}), when: result["examples"]}
        update_run_json(self.folder, news)

    def measured(
        self,
        progress: Progress,
        result: Mapping[str, Any],
        when: Literal["before", "during", "after"],
    ) -> None:
        """Tell of what held-out rows say of a model; the first and the last go into run.json."""
        name = self.folder.stages[progress.stage]
        self.watcher.evaluation(name, progress.step, result)
        self.recorder.event("evaluation", stage=name, step=progress.step, n=result["n"])
        if when == "during":
            return
        known = update_run_json(self.folder, {}).get("measured", {})
        own = {**known.get(name, {}), when: dict(result)}
        update_run_json(self.folder, {"measured": {**known, name: own}})

    def recorded(
        self,
        progress: Progress,
        metrics: Mapping[str, float],
        rows: Sequence[RolloutRow],
        seconds: float,
    ) -> None:
        """Put a step on record."""
        stage, step = progress.stage, progress.step
        name = self.folder.stages[stage]
        self.recorder.metrics(stage, step, metrics)
        self.recorder.timings(stage, step, {"total": seconds, **self.clock.take()})
        self.recorder.rollouts(stage, step, rows)
        for tracker in self.trackers:
            tracker.log(name, step, metrics)
        self.watcher.step(name, step, metrics, seconds)

    def checkpoint_due(self, progress: Progress, steps: int, choice: Checkpoints) -> bool:
        """Every so many steps, at the end, at the best, and when asked to stop."""
        step = progress.step
        return due(choice.every, step) or step in (steps, progress.best_step) or self.interrupted

    def checkpoint(
        self, progress: Progress, fill: Callable[[Path], None], choice: Checkpoints
    ) -> None:
        """Leave a checkpoint that `fill` writes, whole or not at all, and let old ones go."""
        self.recorder.sync()
        target = self.folder.checkpoint(progress.stage, progress.step)
        with checkpoint.writing(target) as aside:
            fill(aside)
        best = progress.best_step
        protected = [] if best is None else [self.folder.checkpoint(progress.stage, best)]
        checkpoint.prune(self.folder, choice.keep, protected)
