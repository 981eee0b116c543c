"""Diagnoses a run while it goes on, as a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from keel.analysis.diagnosis.history import StageHistory, histories, number
from keel.analysis.diagnosis.rollout_summary import MOST_STEPS, StepRollouts, read_step
from keel.analysis.diagnosis.table import conditions_of
from keel.analysis.diagnosis.values import Diagnosis
from keel.runs.callbacks import Callback, RunState
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.types import one_line

EVERY = 5
"""Fewest steps between two checks, and between two steps whose rollouts are read."""
SHARE = 50
"""A check takes time in proportion to the steps so far; one at every fiftieth part bounds the sum.
"""
CONFIRMED = 2
"""Checks in a row that must find a condition, since a run is checked many times."""


@dataclass(eq=False)
class StageCourse:
    """What is known of a stage so far; `found` counts for each condition how many checks in a row
    have found it."""

    history: StageHistory
    folder: RunFolder
    place: int
    steps: list[int]
    columns: dict[str, list[float]]
    rollouts: list[StepRollouts]
    found: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, history: StageHistory, folder: RunFolder, place: int) -> StageCourse:
        """The course of a stage that has this history."""
        columns = {name: values.tolist() for name, values in history.columns.items()}
        steps = history.steps.tolist()
        return cls(history, folder, place, steps, columns, list(history.rollouts))

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a step's metrics."""
        for name in metrics:
            self.columns.setdefault(name, [np.nan] * len(self.steps))
        self.steps.append(step)
        for name, column in self.columns.items():
            column.append(number(metrics.get(name)))

    def check(self) -> list[Diagnosis]:
        """The conditions that this check and enough before it have found."""
        history = replace(
            self.history,
            steps=np.array(self.steps, dtype=np.int64),
            columns={name: np.array(column) for name, column in self.columns.items()},
            rollouts=tuple(self.rollouts),
        )
        found = {one.condition: one for one in conditions_of(history)}
        self.found = {name: self.found.get(name, 0) + 1 for name in found}
        return [one for name, one in found.items() if self.found[name] >= CONFIRMED]


class DiagnosisMonitor(Callback):
    """Reports each condition of a run once, when two checks in a row have found it.

    `warn` gets a line, the kind of event ("diagnosis") and the diagnosis as keyword arguments.
    Metrics are kept in memory; the rollouts of some steps are read from the run folder after they
    were written. What fails in here is reported once by `warn` (as "diagnosis_failed") and ends
    the diagnosis, not the run. Nothing here changes what the run computes or records.
    """

    def __init__(self, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._course: StageCourse | None = None
        self._known: set[tuple[str, str]] = set()

    def on_stage(self, state: RunState) -> None:
        self._course = None
        self._guarded(self._begin, state)

    def on_evaluation(self, state: RunState, result: Mapping[str, Any]) -> None:
        if self._course is not None and state.step == 0:
            self._course.history = replace(self._course.history, before=result)

    def on_step(self, state: RunState) -> None:
        self._guarded(self._step, state)

    def _begin(self, state: RunState) -> None:
        """Start a stage; of one that is resumed, with what its folder holds of it."""
        run = load(state.folder)
        history = next((one for one in histories(run) if one.stage == state.stage), None)
        if history is None:
            return  # it is of another kind
        events = [event for event in run.events() if event.get("event") == "diagnosis"]
        self._known = {(str(e.get("stage")), str(e.get("condition"))) for e in events}
        self._course = StageCourse.of(history, run.folder, run.stages.index(state.stage))

    def _step(self, state: RunState) -> None:
        """Add a step, and report what its check confirms, if one is due."""
        course = self._course
        if course is None:
            return
        course.append(state.step, state.metrics)
        last = course.rollouts[-1].step if course.rollouts else -state.steps
        if state.step >= last + max(EVERY, state.steps // MOST_STEPS):
            read = read_step(course.folder, course.place, state.step)
            course.rollouts += [read] if read is not None and len(read) else []
        if state.step % max(EVERY, state.step // SHARE):
            return
        for one in course.check():
            if (one.stage, one.condition) not in self._known:
                self._known.add((one.stage, one.condition))
                self._warn(warning(one), "diagnosis", **one.as_dict())

    def _guarded(self, function: Callable[[RunState], None], state: RunState) -> None:
        try:
            function(state)
        except Exception as error:
            self._course = None
            what = one_line(error, named=True)
            self._warn(f"the stage is not diagnosed any further: {what}", "diagnosis_failed")


def warning(found: Diagnosis) -> str:
    """A diagnosis as one line: when, what, the first figures, the first key to change."""
    change = f"; change {found.changes[0]}" if found.changes else ""
    return f"{found.stage} step {found.last_step}: {found.title}: {found.evidence[0]}{change}"
