"""What is known of a stage while it is inspected."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from keel.config.schema import Recipe, Stage
from keel.data.tasks.base import BaseTask
from keel.data.tasks.user import UserTask
from keel.models.chat import Encoder
from keel.models.policy import Policy
from keel.preflight.finding import Finding, key_in
from keel.preflight.trial import LongestExample
from keel.types import KeelError, Prompt, Task, one_line

if TYPE_CHECKING:
    from keel.preflight.judge_cost import Forecast

Figure = str | int | float


class StageStops(Exception):
    """The stage would stop here, which is a finding already; the rest of it is not inspected."""


@dataclass(frozen=True, eq=False)
class PromptStats:
    """A stage's tasks and prompts.

    `first` are the first step's prompts, `validation` those of an evaluation, and `longest` is the
    longest that fits. `rows` counts the train rows, None if a task has no end. `raw` are the
    tasks whose plain prompts are not put through the chat template.
    """

    tasks: Mapping[str, Task]
    encoder: Encoder
    first: Sequence[Prompt]
    validation: Sequence[Prompt]
    longest: Prompt | None
    rows: int | None
    raw: Collection[str]

    @property
    def conversations(self) -> bool:
        return any(not isinstance(prompt.content, str) for prompt in self.first)

    @property
    def replies(self) -> bool:
        """Whether any task can answer the policy."""
        return any(_replies(task) for task in self.tasks.values())


@dataclass(eq=False)
class StageWork:
    """What a trial of the stage runs on: its longest example, and how many prompts a step takes at
    most. `scoring` are the seconds that a step's rewards take, `forecasts` the costs of judges."""

    longest: LongestExample | None = None
    prompts: int | None = None
    scoring: float = 0.0
    forecasts: list[Forecast] = field(default_factory=list)


@dataclass(eq=False)
class StageContext:
    """A stage and what its inspection found: figures in order, findings, and what it left out.

    `unread` are the keywords that the chat template does not read.
    """

    recipe: Recipe
    stage: Stage
    policy: Policy
    figures: dict[str, Figure] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    skipped_checks: list[str] = field(default_factory=list)
    prompts: PromptStats | None = None
    work: StageWork = field(default_factory=StageWork)
    unread: frozenset[str] = frozenset()

    @property
    def prefix(self) -> str:
        """The prefix of the stage's keys: its name, in a recipe of several stages."""
        return f"{self.stage.name}." if len(self.recipe.stages) > 1 else ""

    @property
    def trained_by(self) -> str | None:
        """The last earlier stage that trains the policy, which is then another one by now."""
        earlier = takewhile(lambda stage: stage is not self.stage, self.recipe.stages)
        return next((s.name for s in reversed(list(earlier)) if s.trains_policy), None)

    def add(self, *findings: Finding | None) -> None:
        """Keep those that are not None."""
        self.findings += [one for one in findings if one is not None]

    def add_stop(self, where: str, error: KeelError, key: str) -> None:
        """The stage would stop; `key` is used if the error names none."""
        line = one_line(error)
        what = f"the stage stops {where}"
        self.add(Finding("would-stop", what, line, key_in(line, key), "as the line says", "error"))

    @contextmanager
    def stops(self, where: str, key: str) -> Iterator[None]:
        """Turns a KeelError into a finding, and raises StageStops."""
        try:
            yield
        except KeelError as error:
            self.add_stop(where, error, key)
            raise StageStops from error


def _replies(task: Task) -> bool:
    inner = task.inner if isinstance(task, UserTask) else task
    reply: Any = getattr(type(inner), "reply", None)
    return reply is not None and reply is not BaseTask.reply
