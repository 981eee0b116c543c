"""What a check holds of a stage while it looks at it."""

from __future__ import annotations

from dataclasses import dataclass, field

from keel.models.reward import RewardModel
from keel.preflight.finding import Finding
from keel.preflight.finding_kinds import found
from keel.preflight.judge_cost import Forecast
from keel.preflight.key_names import named
from keel.preflight.memory.passes import Row
from keel.preflight.prompt_stats import PromptStats
from keel.types import KeelError

Figure = str | int | float


@dataclass(eq=False)
class StageWork:
    """What a step of the stage works on: its rows, and what was timed of a part of them.

    `heldout` are the tokens of the prompts that it evaluates on, `judges` the learned rewards that
    live in this process, `forecasts` what judges elsewhere will be paid.
    """

    rows: list[Row] = field(default_factory=list)
    heldout: tuple[int, ...] = ()
    sequences: int = 0
    sampling: float = 0.0
    scoring: float = 0.0
    judges: list[tuple[str, RewardModel]] = field(default_factory=list)
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
