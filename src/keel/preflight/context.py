"""What `keel check` finds: findings and how they are written; what is known of a stage by then."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import takewhile
from typing import Any, Literal

from scipy.stats import CensoredData, ecdf

from keel.analysis.statistics import wilson_interval
from keel.config.evaluation import SamplingSource
from keel.config.fields import derive
from keel.config.schema import Recipe, Stage
from keel.data.tasks import BaseTask
from keel.models.policy import Policy
from keel.preflight.trial import LongestExample
from keel.rewards.judge_questions import Cost, JudgeOptions
from keel.training.setup import PromptSource
from keel.types import KeelError, Prompt, one_line

Severity = Literal["error", "warning"]
"""An error: the run would stop, or learn nothing. A warning: it would waste or mislead."""
Figure = str | int | float


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a recipe: what, the evidence, the key to change, and how to fix it.

    `kind` is a short name that stays the same from version to version (`zero-variance`);
    docs/check.md lists all. `key` is written as in the recipe (`rollout.max_tokens`).
    """

    kind: str
    what: str
    evidence: str
    key: str
    fix: str
    severity: Severity = "warning"


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """What findings say, by kind: the table `findings.toml`."""
    table = resources.files("keel.preflight") / "findings.toml"
    return tomllib.loads(table.read_text(encoding="utf-8"))


def found(kind: str, key: str, severity: Severity | None = None, /, **facts: Any) -> Finding:
    """The finding of a kind at a key, with these facts in its texts."""
    own = catalogue()[kind]
    what, evidence, fix = (own[part].format(**facts) for part in ("what", "evidence", "fix"))
    return Finding(kind, what, evidence, key, fix, severity or own.get("severity", "warning"))


def percent(share: float) -> str:
    """A share as `42 %`; small ones with one decimal."""
    digits = 1 if 0 < share < 0.1 else 0
    return f"{100 * share:.{digits}f} %"


def surely_more(count: int, n: int, share: float) -> bool:
    """Whether `count` of `n` shows more than a share: by the lower end of its 95 % interval."""
    return n > 0 and wilson_interval(count, n).low > share


def interval(count: int, n: int) -> str:
    """The 95 % interval of a share, in words."""
    share = wilson_interval(count, n)
    return f"95 % interval {percent(share.low)} to {percent(share.high)}"


# ---------------------------------------------------------------- lengths


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """A budget that holds a share of all completions; a lower bound if not `known`."""

    tokens: int
    known: bool

    def __str__(self) -> str:
        return f"{self.tokens}" if self.known else f"more than {self.tokens}"


def holding(lengths: Sequence[int], ended: Sequence[bool], share: float = 0.95) -> BudgetShare:
    """The smallest budget that holds `share` of the completions, by Kaplan and Meier's estimate.

        S(t) = Π_{t_i ≤ t} (1 − d_i / n_i),   budget = min {t : 1 − S(t) ≥ share}

    d_i completions end at length t_i, n_i are at least that long. A completion that was cut
    (`ended` is False) is only known to be longer. Where the estimate does not reach the share, the
    longest length is a lower bound. Source: Kaplan and Meier 1958, JASA 53:457.

    Raises ValueError for no lengths.
    """
    if not lengths:
        raise ValueError("no lengths")
    cut = [not done for done in ended]
    shares = ecdf(CensoredData.right_censored(lengths, cut)).cdf
    reached = shares.quantiles[shares.probabilities >= share - 1e-12]  # rounding of the product
    return BudgetShare(int(reached[0]), True) if len(reached) else BudgetShare(max(lengths), False)


def quantile(lengths: Sequence[int], share: float) -> int:
    """The smallest length that `share` of the lengths do not exceed. Raises ValueError for none."""
    return holding(lengths, [True] * len(lengths), share).tokens


# ---------------------------------------------------------------- a stage while it is inspected


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
        return any(isinstance(t, BaseTask) and t.replies for t in self.source.tasks.values())

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


@dataclass(frozen=True, slots=True)
class Forecast:
    """A stage's questions to one judge, `evaluation` of them from validation, and their cost.

    `costs` are the low end, the estimate and the high end. The interval: 95 % of the mean length of
    the sampled answers, the bytes of a token and the length of a reply, evaluations that all
    ask the same or never, and no refill or all (dynamic sampling).
    """

    name: str
    key: str
    questions: int
    evaluation: int
    costs: tuple[Cost, Cost, Cost]
    options: JudgeOptions

    def __str__(self) -> str:
        priced = self.costs[1].dollars > 0
        low, estimate, high = (
            f"${cost.dollars:.2f}" if priced else str(cost.tokens) for cost in self.costs
        )
        asked = f"{self.questions} questions, {self.evaluation} of them in evaluation"
        return f"{asked}: about {estimate}{'' if priced else ' tokens'} ({low} to {high})"


@dataclass(eq=False)
class StageContext:
    """A stage and what its inspection found: figures in order, findings, and what it left out.

    `unread` are the keywords that the chat template does not read. A trial of the stage runs on
    `longest`, its longest example, with at most `step_prompts` prompts a step; `shown` are the
    tokens of the longest demonstration that is imitated besides. `scoring` are the
    seconds that a step's rewards take, `forecasts` the costs of judges, `metrics` the names of
    what the batch and the trial recorded.
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
    shown: int = 0
    step_prompts: int | None = None
    scoring: float = 0.0
    forecasts: list[Forecast] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)

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
        earlier = takewhile(lambda stage: stage.name != self.stage.name, self.recipe.stages)
        return next((s.name for s in reversed(list(earlier)) if s.trains_policy), None)

    def resolve(self, size: int | None, batch: int) -> None:
        """Find the number of steps of a stage that makes passes over `size` examples. Raises
        StageStops if they have no end."""
        if self.stage.unresolved:
            with self.stops("before its first step", f"{self.prefix}num_train_epochs"):
                self.stage = self.stage.lasting(size, batch)
            self.figures["steps"] = self.stage.steps

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
