"""What a stage samples, and how it is evaluated: on its validation split, and on further sets.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from keel.algorithms.terms import AsTuple, FrozenModel, Unit, UnusedIf
from keel.config.benchmarks import benchmarks, with_graders
from keel.config.fields import Answers, Index, Real, Temperature, Tokens, unknown
from keel.config.model import TeacherModel
from keel.config.sources import (
    NEVER_EVALUATED,
    PAST_THE_END,
    NamedAlgorithm,
    Prompts,
    Rewards,
    Rollout,
    TaskSource,
)

_NO_EVALUATION = UnusedIf(lambda key: key.table.prompts == 0, NEVER_EVALUATED.why)
_NOT_SAMPLED = UnusedIf(
    lambda key: key.table.samples == 0 and key.stage is not key.recipe.stages[-1],
    "evaluation.samples = 0 leaves sampling out",
)


class SampledEvaluation(FrozenModel):
    """What is sampled of some prompts, and how it is judged."""

    prompts: Index = 200
    """Validation prompts; 0: no evaluation."""
    samples: Annotated[int, Field(ge=0, le=65_536), NEVER_EVALUATED] = 0
    """Completions sampled of each prompt, besides the greedy one."""
    k: Annotated[tuple[Answers, ...], AsTuple, NEVER_EVALUATED, _NOT_SAMPLED] = ()
    """Values of k of pass@k and maj@k, by estimates from all samples; none: `samples`."""
    temperature: Annotated[Temperature, NEVER_EVALUATED, _NOT_SAMPLED] = 1.0
    """Temperature of the sampled completions."""
    top_k: Annotated[Index, NEVER_EVALUATED, _NOT_SAMPLED] = 0
    """top-k of the sampled completions; 0: off."""
    top_p: Annotated[float, Field(gt=0, le=1), NEVER_EVALUATED, _NOT_SAMPLED] = 1.0
    """top-p of the sampled completions; 1: off."""
    min_p: Annotated[Unit, NEVER_EVALUATED, _NOT_SAMPLED] = 0.0
    """min-p of the sampled completions; 0: off."""
    component: Annotated[str | None, NEVER_EVALUATED] = None
    """The reward that is evaluated; None: the first declared as correctness, else the total."""
    threshold: Annotated[Real, NEVER_EVALUATED] = 1.0
    """A completion is right if that reward is at least this."""

    @model_validator(mode="after")
    def _k_of_samples(self) -> Self:
        if any(k > self.samples > 0 for k in self.k):
            raise ValueError(
                f"k = {list(self.k)} needs at least {max(self.k)} samples, and samples is "
                f"{self.samples}: raise it"
            )
        return self

    @property
    def at(self) -> tuple[int, ...]:
        """The values of k, in rising order."""
        return tuple(sorted(set(self.k))) or (self.samples,)

    def named(self, prefix: str = "eval/") -> tuple[str, ...]:
        """Names of the metrics that it records; `pass@1` or `reward`, as the rewards are."""
        if self.prompts == 0:
            return ()
        rates = ["pass@1", "reward"]
        if self.samples:
            rates += [
                "sampled",
                *(f"{name}@{k}" for name in ("pass", "maj") for k in self.at if k > 1),
            ]
        ends = [f"{rate}{end}" for rate in rates for end in ("", "/low", "/high")]
        return tuple(prefix + name for name in (*ends, "mean_length", "judge/*", "ifeval/*"))


class EvaluationSet(SampledEvaluation):
    """A further evaluation, of the prompts of a task."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][\w.-]*$")]
    """Its metrics are `eval/NAME/…`."""
    task: TaskSource
    """The task, by its table or its name. All its stored examples are read, or those of
    `validation_path`."""
    rewards: Rewards | None = None
    """None: the benchmark's, if the task is one, else the stage's."""
    every: Index | None = None
    """Steps between evaluations, 0: only before and after the stage; None: as the stage's."""
    max_tokens: Tokens | None = None
    """Longest completion, in tokens; None: of a benchmark its own, at most half of the context,
    else `rollout.max_tokens`."""

    @model_validator(mode="before")
    @classmethod
    def _task_by_name(cls, data: Any) -> Any:
        """A benchmark sets its graders and how it is sampled, unless they are given."""
        if not isinstance(data, dict) or "task" not in data:
            return data
        task = {"name": data["task"]} if isinstance(data["task"], str) else data["task"]
        graded = with_graders({"tasks": [task], "rewards": data.get("rewards")})
        known = benchmarks().get(task.get("name", "") if isinstance(task, dict) else task.name)
        sampling = {} if known is None else known.sampling
        return {**sampling, **data, "task": task, "rewards": graded["rewards"]}


class Evaluation(SampledEvaluation):
    """Greedy pass@1 and sampled pass@k on the validation split; if no reward is declared as
    correctness, the mean reward."""

    every: Annotated[Index, _NO_EVALUATION, PAST_THE_END] = 50
    """Steps between evaluations; 0: only before and after the stage."""
    sets: Annotated[tuple[EvaluationSet, ...], AsTuple] = ()
    """Further evaluations, each on a task of its own."""
    best: Annotated[str | None, NEVER_EVALUATED] = None
    """Metric whose greatest value selects the best checkpoint, such as `eval/NAME/pass@1`; None:
    the stage's greedy pass@1, or mean reward."""

    @model_validator(mode="after")
    def _sets_and_best(self) -> Self:
        names = [one.name for one in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"two evaluation.sets have one name, of {names}: rename one")
        if self.sets and self.prompts == 0:
            raise ValueError("prompts = 0 disables evaluation, and sets are named: set it to 1")
        if self.best is not None and not any(fnmatchcase(self.best, n) for n in self.metrics):
            raise ValueError(unknown("metric", self.best, self.metrics))
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of all evaluations."""
        own = [one.named(f"eval/{one.name}/") for one in self.sets]
        return (*self.named(), *chain.from_iterable(own))


@dataclass(frozen=True, slots=True)
class SamplingSource:
    """What a stage samples and scores.

    `train_prompts` is the number of prompts that the stage samples to learn from, over all steps.
    `key` is the table of these settings within the stage ("" or "sampled."), `seed_name` the stream
    that their seeds come from, `first_draw` the name of the first step's draw in that stream.
    The others are those of a stage that trains on what it samples: `ratio_stays_one` if its loop
    gives the importance ratio no chance to move, `own_ratio` if its update's own log-probs may be
    the old ones.
    """

    key: str
    tasks: tuple[TaskSource, ...]
    prompts: Prompts
    rewards: Rewards
    rollout: Rollout
    validation_prompts: int
    seed_name: tuple[str, ...]
    first_draw: tuple[str | int, ...]
    algorithm: NamedAlgorithm | None = None
    evaluation: Evaluation | None = None
    teacher: TeacherModel | None = None
    epochs: int = 1
    ratio_stays_one: bool = False
    own_ratio: bool = False
    train_prompts: int = 0

    @property
    def needs_reward(self) -> bool:
        """Whether the stage learns from rewards, and not from a teacher alone."""
        return self.algorithm is None or self.algorithm.needs_reward

    def setting(self, name: str) -> str:
        """The key of a setting of the rollouts, within the stage."""
        return f"{self.key}{name}" if self.key else f"rollout.{name}"
