"""What a diagnosis consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from keel.analysis.diagnosis.history import Array, StageHistory, Steps
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
class Symptom:
    """What the rule of a condition found: the steps that it is of, figures, and completions.

    `words` are names, such as of a metric, that the evidence needs with the figures.
    """

    steps: Sequence[float] | Steps | Array
    figures: Mapping[str, float]
    samples: tuple[RolloutSample, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    severe: bool = False
    """The condition is an error here, even if it is a warning in general."""


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
