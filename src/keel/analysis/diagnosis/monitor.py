"""Diagnoses a run while it goes on, as a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from keel.analysis.diagnosis.history import (
    MOST_STEPS,
    StageHistory,
    StepRollouts,
    histories,
    read_step,
)
from keel.analysis.diagnosis.table import Diagnosis, conditions_of
from keel.runs.callbacks import Callback, RunState
from keel.runs.reader import FollowedFile, load
from keel.types import one_line

EVERY = 5
"""Fewest steps between two checks, and between two steps whose rollouts are read."""
SHARE = 50
"""A check takes time in proportion to the steps so far; one at every fiftieth part bounds the sum.
"""
CONFIRMED = 2
"""Checks in a row that must find a condition, since a run is checked many times."""


class DiagnosisMonitor(Callback):
    """Reports each condition of a run once, when two checks in a row have found it.

    `warn` gets a line, the kind of event ("diagnosis") and the diagnosis as keyword arguments.
    Metrics, and the rollouts of some steps, are read from the run folder after they were written.
    What fails in here is reported once by `warn` (as "diagnosis_failed") and ends the diagnosis,
    not the run. Nothing here changes what the run computes or records.
    """

    def __init__(self, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._history: StageHistory | None = None
        self._rollouts: list[StepRollouts] = []
        self._known: set[tuple[str, str]] = set()
        self._found: dict[str, int] = {}
        """Of each condition how many checks in a row have found it."""

    def on_stage(self, state: RunState) -> None:
        self._history = None
        self._guarded(self._begin, state)

    def on_evaluation(self, state: RunState, result: Mapping[str, Any]) -> None:
        if self._history is not None and state.step == 0:
            self._history = replace(self._history, before=result)

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
        self._history, self._found = history, {}
        self._metrics, self._rollouts = FollowedFile(run.folder.metrics), [*history.rollouts]
        self._folder, self._place = run.folder, run.stages.index(state.stage)

    def _step(self, state: RunState) -> None:
        """Add a step, and report what its check confirms, if one is due."""
        if self._history is None:
            return
        last = self._rollouts[-1].step if self._rollouts else -state.steps
        if state.step >= last + max(EVERY, state.steps // MOST_STEPS):
            read = read_step(self._folder, self._place, state.step)
            self._rollouts += [] if read is None else [read]
        if state.step % max(EVERY, state.step // SHARE):
            return
        self._metrics.update()
        columns = self._metrics.columns(state.stage)
        found = conditions_of(replace(self._history, columns=columns, rollouts=self._rollouts))
        self._found = {one.condition: self._found.get(one.condition, 0) + 1 for one in found}
        for one in found:
            key = (one.stage, one.condition)
            if self._found[one.condition] >= CONFIRMED and key not in self._known:
                self._known.add(key)
                self._warn(warning(one), "diagnosis", **one.as_dict())

    def _guarded(self, function: Callable[[RunState], None], state: RunState) -> None:
        try:
            function(state)
        except Exception as error:
            self._history = None
            what = one_line(error, named=True)
            self._warn(f"the stage is not diagnosed any further: {what}", "diagnosis_failed")


def warning(found: Diagnosis) -> str:
    """A diagnosis as one line: when, what, the first figures, the first key to change."""
    change = f"; change {found.changes[0]}" if found.changes else ""
    return f"{found.stage} step {found.last_step}: {found.title}: {found.evidence[0]}{change}"
