"""What is known of a stage while it is inspected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from keel.config.fields import derive
from keel.config.sampling import SamplingSource
from keel.config.schema import Recipe, Stage
from keel.data.mixture import UserTask
from keel.data.tasks import BaseTask
from keel.models.policy import Policy
from keel.preflight.finding import Finding, found, quantile
from keel.preflight.trial import LongestExample
from keel.training.setup import PromptSource
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
    longest that fits. `rows` counts the train rows, None if a task has no end.
    """

    source: PromptSource
    first: Sequence[Prompt]
    validation: Sequence[Prompt]
    longest: Prompt | None
    rows: int | None

    @property
    def conversations(self) -> bool:
        return any(not isinstance(prompt.content, str) for prompt in self.first)

    @property
    def replies(self) -> bool:
        """Whether any task can answer the policy."""
        return any(_replies(task) for task in self.source.tasks.values())

    def task_key(self, prompt: Prompt) -> str:
        """The table of a prompt's task."""
        return f"tasks.{list(self.source.tasks).index(prompt.task)}"


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What a stage samples, with its seeds.

    `key` is the prefix of its keys in the recipe, `seed` that of the stage's prompts, `first_seed`
    that of the first step's rollouts.
    """

    key: str
    sampling: SamplingSource
    seed: int
    first_seed: int

    def setting(self, name: str) -> str:
        """The key of a setting of the rollouts."""
        return f"{self.key.removesuffix(self.sampling.key)}{self.sampling.setting(name)}"


@dataclass(eq=False)
class StageContext:
    """A stage and what its inspection found: figures in order, findings, and what it left out.

    `unread` are the keywords that the chat template does not read. A trial of the stage runs on
    `longest`, its longest example, with at most `step_prompts` prompts a step. `scoring` are the
    seconds that a step's rewards take, `forecasts` the costs of judges.
    """

    recipe: Recipe
    stage: Stage
    policy: Policy
    figures: dict[str, Figure] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    skipped_checks: list[str] = field(default_factory=list)
    prompts: PromptStats | None = None
    unread: frozenset[str] = frozenset()
    longest: LongestExample | None = None
    step_prompts: int | None = None
    scoring: float = 0.0
    forecasts: list[Forecast] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        """The prefix of the stage's keys: its name, in a recipe of several stages."""
        return f"{self.stage.name}." if len(self.recipe.stages) > 1 else ""

    @property
    def plan(self) -> SamplingPlan | None:
        """What the stage samples; None if it samples nothing."""
        sampling = self.stage.sampling
        if sampling is None:
            return None
        seed = derive(self.recipe.seed, self.stage.name, *sampling.seed_name)
        first_seed = derive(seed, *sampling.first_draw)
        return SamplingPlan(f"{self.prefix}{sampling.key}", sampling, seed, first_seed)

    @property
    def trained_by(self) -> str | None:
        """The last earlier stage that trains the policy, which is then another one by now."""
        earlier = takewhile(lambda stage: stage is not self.stage, self.recipe.stages)
        return next((s.name for s in reversed(list(earlier)) if s.trains_policy), None)

    def add(self, *findings: Finding | None) -> None:
        """Keep those that are not None."""
        self.findings += [one for one in findings if one is not None]

    def add_lengths(self, what: str, lengths: Sequence[int]) -> None:
        """The figures of some examples' lengths."""
        if lengths:
            self.figures |= {
                f"{what} (median)": quantile(lengths, 0.5),
                f"{what} (95 %)": quantile(lengths, 0.95),
                f"{what} (longest)": max(lengths),
            }

    def add_stop(self, where: str, error: KeelError, key: str) -> None:
        """The stage would stop; `key` is used if the error has none."""
        cause: BaseException | None = error
        while cause is not None and not getattr(cause, "key", ""):
            cause = cause.__cause__
        own = getattr(cause, "key", "")
        if own:
            key = own if own.startswith("model.") else f"{self.prefix}{own}"
        self.add(found("would-stop", key, where=where, line=one_line(error)))

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
