"""The conditions that a run can be in, and its diagnosis by them, also while it goes on.

A further condition is a function of a `StageHistory` in `RULES`, whose docstring states the rule
and its thresholds, and an entry of its name in conditions.toml. The page docs/howto/diagnosis.md is
made from both, by `python -m keel.analysis.diagnosis.table > docs/howto/diagnosis.md`.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from string import Formatter
from typing import Any, Literal

import numpy as np

from keel.analysis.diagnosis import completions, policy, rewards
from keel.analysis.diagnosis.history import (
    MOST_STEPS,
    RolloutSample,
    StageHistory,
    StepRollouts,
    Symptom,
    histories,
    read_step,
)
from keel.runs.callbacks import Callback, RunState
from keel.runs.reader import FollowedFile, Run, load
from keel.types import one_line

Severity = Literal["warning", "error"]
"""An error: the run learns nothing more, or what it learns is wrong. A warning: it may waste time
or mislead."""

RULES = (
    *(rewards.no_reward, rewards.no_signal, rewards.saturated_reward),
    *(policy.entropy_collapse, policy.learning_rate_high, policy.learning_rate_low),
    *(policy.kl_runaway, policy.clip_idle, policy.clip_saturated),
    *(completions.length_explosion, completions.length_bias),
    *(rewards.length_reward, completions.truncation),
    *(rewards.gold_falls, rewards.gold_still, rewards.format_hacking),
    *(completions.empty_answers, completions.repetition, completions.environment_words),
    *(policy.value_model, policy.engine_mismatch),
)
"""In the order of the page; the id of a condition is the name of its rule, with hyphens."""


@dataclass(frozen=True, slots=True)
class RecipeChange:
    """A key of the recipe, its present value, what to set it to and why.

    `to` is a value, or "higher", "lower" or "other" where none can be computed. `now` is None
    if the key is absent or a table.
    """

    key: str
    now: Any
    to: Any
    why: str

    def __str__(self) -> str:
        now = "" if self.now is None else f" (now {_shown(self.now)})"
        to = {"higher": " higher", "lower": " lower", "other": ""}.get(str(self.to))
        return f"{self.key}{f' = {_shown(self.to)}' if to is None else to}{now}: {self.why}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A condition that a stage is in, or was in from `first_step` to `last_step`.

    `condition` is a short name that stays the same from version to version; docs/howto/diagnosis.md
    lists all. `evidence` holds statements of one line, `figures` the numbers in them by name.
    """

    condition: str
    title: str
    stage: str
    first_step: int
    last_step: int
    severity: Severity
    evidence: tuple[str, ...]
    figures: Mapping[str, float]
    samples: tuple[RolloutSample, ...]
    causes: tuple[str, ...]
    changes: tuple[RecipeChange, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Advice:
    """A key to change: by a factor of its value, to another value, or else in a direction.

    It is left out if the key has that value already, or its table is not in the recipe. With
    `where`, a key and a value, only if that key has that value ("none": it is absent).
    """

    key: str
    why: str
    value: Any = None
    factor: float | None = None
    direction: Literal["higher", "lower", "other"] = "other"
    where: Sequence[Any] | None = None

    def apply(self, history: StageHistory) -> RecipeChange | None:
        """The change to the stage's recipe; None if there is nothing to change."""
        if self.where is not None and history.setting(self.where[0], "none") != self.where[1]:
            return None
        now = history.setting(self.key)
        key = f"{history.stage}.{self.key}"
        if self.factor is None and self.value is None:
            now = None if isinstance(now, Mapping | list) else now
            return RecipeChange(key, now, self.direction, self.why)
        if self.factor is None:
            return None if now == self.value else RecipeChange(key, now, self.value, self.why)
        if not isinstance(now, int | float) or isinstance(now, bool) or now == 0:
            return None
        scaled = now * self.factor
        to = max(1, round(scaled)) if isinstance(now, int) else float(f"{scaled:.2g}")
        return None if to == now else RecipeChange(key, now, to, self.why)


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that can be wrong: how it is found, what may cause it, what to change.

    The docstring of `rule` states its thresholds. `evidence` are lines with the names of figures in
    braces; a line is shown if the rule found all of its figures.
    """

    rule: Callable[[StageHistory], Symptom | None]
    id: str
    title: str
    evidence: tuple[str, ...]
    causes: tuple[str, ...]
    advice: tuple[Advice, ...]
    severity: Severity = "warning"

    def diagnose(self, history: StageHistory) -> Diagnosis | None:
        """The diagnosis of a stage, if it is in this condition."""
        found = self.rule(history)
        if found is None:
            return None
        first, last = int(found.steps[0]), int(found.steps[-1])
        figures = {name: np.asarray(value).item() for name, value in found.figures.items()}
        known = {**figures, **found.words, "first_step": first, "last_step": last}
        changes = (advice.apply(history) for advice in self.advice)
        return Diagnosis(
            condition=self.id,
            title=self.title,
            stage=history.stage,
            first_step=first,
            last_step=last,
            severity="error" if found.severe else self.severity,
            evidence=tuple(
                line.format_map(known) for line in self.evidence if _fields(line) <= known.keys()
            ),
            figures=figures,
            samples=found.samples,
            causes=self.causes,
            changes=tuple(change for change in changes if change is not None),
        )


def _fields(line: str) -> set[str]:
    """The names in the braces of a line."""
    return {name for _, name, *_ in Formatter().parse(line) if name}


@cache
def conditions() -> tuple[Condition, ...]:
    """All conditions, in the order of their rules."""
    source = files("keel.analysis.diagnosis").joinpath("conditions.toml")
    entries = tomllib.loads(source.read_text(encoding="utf-8"))["condition"]
    by_id = {entry["id"]: entry for entry in entries}
    return tuple(_condition(rule, by_id[rule.__name__.replace("_", "-")]) for rule in RULES)


def _condition(
    rule: Callable[[StageHistory], Symptom | None], entry: Mapping[str, Any]
) -> Condition:
    lines = {name: tuple(entry[name]) for name in ("evidence", "causes")}
    advice = tuple(Advice(**one) for one in entry["advice"])
    return Condition(**{**entry, **lines, "rule": rule, "advice": advice})


def diagnose(run: Run, damaged: list[str] | None = None) -> tuple[Diagnosis, ...]:
    """What is wrong with the stages of reinforcement learning of a run: errors, then warnings, each
    by their first step. Empty if nothing is found, or the run is too short to tell.

    With the list `damaged`, rollout files that cannot be read are left out and named in it.

    Raises:
        KeelError: the folder's recipe or metrics, or without the list rollouts, cannot be read.
    """
    found = [one for history in histories(run, damaged) for one in conditions_of(history)]
    return tuple(sorted(found, key=lambda d: (d.severity != "error", d.first_step)))


def conditions_of(history: StageHistory) -> list[Diagnosis]:
    """The diagnoses of one stage, in the order of the rules."""
    found = (condition.diagnose(history) for condition in conditions())
    return [one for one in found if one is not None]


# ---------------------------------------------------------------- while the run goes on

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

    def on_record(self, state: RunState) -> None:
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


# ---------------------------------------------------------------- the page

INTRO = """# What is wrong with a run?

    keel diagnose RUN [--json]

reports each problem of the `rl` stages of a run, also of one that goes on: the evidence,
completions that show it, likely causes, and the recipe keys to change, with the reason and, if it
follows from the present value, the new one. An *error*: the run learns nothing more, or the wrong
thing. A *warning*: it wastes time or may mislead. The exit code is 0 either way.

`keel train` and `keel.train` look for the same during the run. What two checks in a row find (five
steps apart, or a fiftieth of the steps so far) is printed once, in a line that begins with
`WARNING`, and recorded as an event `diagnosis` in `events.jsonl`; the run goes on.
`keel train --json` returns the problems of the whole run as `diagnoses`.

Rules use medians of five steps or more and rank tests; those on single completions read the first
256 of up to 24 steps with rollouts. A diagnosis is a sign, not a proof: read the completions that
it names ([`keel rollouts`](rollouts.md)). From Python:

    from keel.analysis.diagnosis.table import diagnose
    for one in diagnose(keel.load("runs/quickstart-1")):
        print(one.condition, one.evidence, one.changes)

Below: when each condition is found, and the keys to change.
"""


def markdown() -> str:
    """The page."""
    lines = [INTRO]
    for condition in conditions():
        rule = " ".join((inspect.getdoc(condition.rule) or "").split())
        changes = dict.fromkeys(_change(one) for one in condition.advice)
        lines += [f"## {condition.id}", "", f"**{condition.severity.capitalize()}.** {rule}", ""]
        lines += [f"Change {', '.join(changes)}.", ""]
    return "\n".join(lines[:-1]) + "\n"


def _change(advice: Advice) -> str:
    """A key, and what to do with it."""
    if advice.factor is not None:
        return f"`{advice.key}` × {advice.factor:g}"
    if advice.value is not None:
        value = str(advice.value).lower() if isinstance(advice.value, bool) else advice.value
        return f"`{advice.key}` = {value}"
    return f"`{advice.key}`" + ("" if advice.direction == "other" else f" {advice.direction}")


if __name__ == "__main__":
    print(markdown(), end="")
