"""What a diagnosis consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.rollout_summary import StepRollouts

Severity = Literal["warning", "error"]
"""An error: the run learns nothing more, or what it learns is wrong. A warning: it may waste time
or mislead."""


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """A completion that shows a condition: its step, and its row in that step's rollouts."""

    step: int
    row: int


def newest(
    history: StageHistory, rows: Callable[[StepRollouts], Iterable[Any]]
) -> tuple[RolloutSample, ...]:
    """The first three of the newest rollouts that `rows` chooses."""
    return tuple(
        RolloutSample(r.step, int(row)) for r in history.rollouts[-1:] for row in [*rows(r)][:3]
    )


@dataclass(frozen=True, slots=True)
class RecipeChange:
    """A key of the recipe, its present value, what to set it to and why.

    `to` is a value, or "higher", "lower" or "other" where none can be computed. `now` is None
    where the key is absent or a table.
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


@dataclass(frozen=True, slots=True)
class Symptom:
    """What the check of a condition found: since and until when, and by which figures."""

    first_step: int
    last_step: int
    evidence: tuple[str, ...]
    figures: Mapping[str, float]
    samples: tuple[RolloutSample, ...] = ()
    severe: bool = False
    """The condition is an error here, even where it is a warning in general."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A key to change: by a factor of its value, to another value, or else in a direction.

    It is left out where the key has that value already, or its table is not in the recipe. With
    `where`, a key and a value, only where that key has that value.
    """

    key: str
    why: str
    value: Any = None
    factor: float | None = None
    direction: Literal["higher", "lower", "other"] = "other"
    where: tuple[str, Any] | None = None

    def apply(self, history: StageHistory) -> RecipeChange | None:
        """The change to the stage's recipe; None where there is nothing to change."""
        if self.where is not None and history.setting(self.where[0]) != self.where[1]:
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

    The docstring of `check` states the rule and its thresholds.
    """

    id: str
    title: str
    check: Callable[[StageHistory], Symptom | None]
    causes: tuple[str, ...]
    advice: tuple[Advice, ...]
    severity: Severity = "warning"

    def diagnose(self, history: StageHistory) -> Diagnosis | None:
        """The diagnosis of a stage, if it is in this condition."""
        found = self.check(history)
        if found is None:
            return None
        changes = (advice.apply(history) for advice in self.advice)
        return Diagnosis(
            condition=self.id,
            title=self.title,
            stage=history.stage,
            first_step=found.first_step,
            last_step=found.last_step,
            severity="error" if found.severe else self.severity,
            evidence=found.evidence,
            figures=found.figures,
            samples=found.samples,
            causes=self.causes,
            changes=tuple(change for change in changes if change is not None),
        )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
