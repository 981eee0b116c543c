"""What a check holds of a stage while it looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keel.preflight.finding import Finding
from keel.preflight.finding_kinds import found
from keel.preflight.judge_cost import Forecast
from keel.preflight.key_names import named
from keel.preflight.prompt_stats import PromptStats
from keel.types import KeelError

Figure = str | int | float


@dataclass(frozen=True, slots=True)
class LongestExample:
    """The longest example of a stage, as a trial run reads it.

    `tokens` are those of the prompt alone where a completion is sampled after it, else of all;
    `raw` says that a plain prompt goes without the chat template.
    """

    tokens: int
    data: Mapping[str, Any]
    raw: bool = False


@dataclass(eq=False)
class StageWork:
    """What a step of the stage works on, and what was timed of a part of it.

    `tokens` are those of a step's `sequences`, `decoded` those of the longest completion, `scoring`
    the seconds of its rewards; `evaluated` counts the prompts of an evaluation, `forecasts` are
    what judges elsewhere will be paid.
    """

    longest: LongestExample | None = None
    tokens: int = 0
    sequences: int = 0
    decoded: int = 0
    scoring: float = 0.0
    evaluated: int = 0
    forecasts: list[Forecast] = field(default_factory=list)


@dataclass(eq=False)
class StageContext:
    """What was seen of a stage: figures in order, findings, and what could not be looked at.

    `learned` are the places of the prompts of judged rows (`tasks.base.position`), `unread` the
    keywords that the chat template does not read.
    """

    name: str
    kind: str
    figures: dict[str, Figure] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    source: PromptStats | None = None
    work: StageWork = field(default_factory=StageWork)
    learned: frozenset[float] = frozenset()
    unread: frozenset[str] = frozenset()

    def add(self, *findings: Finding | None) -> None:
        """Take up those that there are."""
        self.findings += [one for one in findings if one is not None]

    def stops(self, where: str, error: KeelError, key: str) -> None:
        """The stage would stop: `where` says at what, `key` where the line names none."""
        line = " ".join(str(error).split())
        key = named(line, key)
        self.add(
            found("would-stop", f"the stage stops {where}", line, key, "as the line says", "error")
        )


@dataclass(frozen=True, eq=False)
class PolicyOrigin:
    """How a stage's policy will differ from the one that is looked at.

    `by`: the name of a stage before that trains it; `random`: its weights are still random.
    """

    by: str | None
    random: bool
