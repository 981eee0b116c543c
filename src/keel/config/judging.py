"""The stages that learn from preferences and labels: reward models, and DPO. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keel.algorithms.terms import AsTuple, Coefficient, FrozenModel, Unit, UnusedIf
from keel.config.benchmarks import with_graders
from keel.config.evaluation import SamplingSource
from keel.config.fields import Answers, Count, Index, StageName, Temperature, Tokens
from keel.config.sources import PAST_THE_END, PreferenceData, Prompts, Rewards, Rollout, TaskSource
from keel.config.stage import JudgedSource, Records, StageConfig

PROMPTS_AT_ONCE = 128
"""Of a `SampledData` table: how many are answered in one call of the engine."""
HEADLINE = ("accuracy", "auc", "log_loss", "brier", "ece", "f1")
"""Figures of an evaluation that are metrics, as far as the kind of examples has them."""
NEVER_EVALUATED = UnusedIf(
    lambda key: key.stage.evaluation.rows == 0, "evaluation.rows = 0 disables evaluation"
)
_NO_PEOPLE = UnusedIf(
    lambda key: key.table.people is None, "the cost of labels is recorded with sampled.people only"
)
_NO_PAIRS = UnusedIf(
    lambda key: key.stage.records != "pairs", "the stage learns from {key.stage.records}"
)


class People(FrozenModel):
    """People label the train pairs that a reward model is least sure of, in place of the rewards.

    The run stops until they have: `keel prefs annotate RUN/preferences.db`, then
    `keel train --resume`.
    """

    labels: Count = 100
    """Number of pairs that people label."""
    by: Literal["margin", "bald", "d_optimal", "random"] = "margin"
    """How the pairs are chosen, from a posterior of the model's head."""
    noise: Unit | None = None
    """Simulate the people: labels of the rewards without noise, this share of them inverted. None:
    real people."""
    price: Coefficient = 0.0
    """Dollars for a label."""


class SampledData(FrozenModel):
    """Sample the examples: the policy answers prompts before the stage, and rewards score the
    answers."""

    tasks: Annotated[tuple[TaskSource, ...], AsTuple, Field(min_length=1)]
    prompts: Prompts = Prompts()
    rewards: Rewards = Rewards()
    """The rewards of the answers; without one, the score of the task."""
    train: Count = 512
    """Number of train prompts."""
    validation: Annotated[Count, NEVER_EVALUATED] = 128
    """Number of validation prompts."""
    group_size: Answers = 4
    """Answers to each prompt."""
    max_tokens: Tokens = 256
    """Longest answer, in tokens."""
    temperature: Temperature = 1.0
    """Temperature of the sampling distribution."""
    pairs: Annotated[Count, _NO_PAIRS] = 2
    """Most pairs made of the answers to one prompt."""
    noise: Unit = 0.0
    """Share of the train labels that are inverted, to imitate careless labelling. Validation labels
    are not."""
    price: Annotated[Coefficient, _NO_PEOPLE] = 0.0
    """Dollars that the rewards' label of a pair costs, for the ledger."""
    people: Annotated[People | None, _NO_PAIRS] = None

    @model_validator(mode="before")
    @classmethod
    def _graded(cls, data: Any) -> Any:
        return with_graders(data)

    @property
    def sampling(self) -> SamplingSource:
        """The same, as other code reads it."""
        return SamplingSource(
            key="sampled.",
            tasks=self.tasks,
            prompts=self.prompts,
            rewards=self.rewards,
            rollout=Rollout(
                prompts_per_step=min(self.train, PROMPTS_AT_ONCE),
                group_size=self.group_size,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
            ),
            train_prompts=self.train,
            validation_prompts=self.validation,
            seed_name=("sampled",),
            first_draw=("answers", "train", 0),
        )


class JudgedEvaluation(FrozenModel):
    """Evaluation on the validation examples."""

    every: Annotated[Index, NEVER_EVALUATED, PAST_THE_END] = 0
    """Steps between evaluations; 0: only before and after the stage."""
    rows: Index = 1000
    """Most validation examples; 0: no evaluation."""


class JudgingStage(StageConfig):
    """What the stages that learn from preference data have in common."""

    name: StageName = "judging"
    data: PreferenceData | None = None
    sampled: SampledData | None = None
    max_tokens: Tokens | None = None
    """Longer examples (prompt and answer) are left out and counted; None: what the context allows.
    """
    batch_size: Count = 32
    """Examples in a step."""
    evaluation: JudgedEvaluation = JudgedEvaluation()

    @model_validator(mode="after")
    def _one_source(self) -> JudgingStage:
        if (self.data is None) == (self.sampled is None):
            raise ValueError(
                "set exactly one of data (rows from a file) and sampled (answers of the policy)"
            )
        few = self.sampled is not None and self.sampled.group_size < 2
        if few and self.records == "pairs":
            raise ValueError(
                "sampled.group_size = 1 gives no two answers to compare: set 2 or more"
            )
        compares = self.reward_model == "outcome" and self.records == "pairs"
        if self.sampled is not None and self.sampled.people is not None and not compares:
            raise ValueError(
                "sampled.people label pairs for an outcome reward model, which this is not: drop it"
            )
        return self

    @property
    def sampling(self) -> SamplingSource | None:
        return None if self.sampled is None else self.sampled.sampling

    @property
    def evaluation_interval(self) -> int:
        return self.evaluation.every

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        return tuple(f"eval/{name}" for name in HEADLINE)

    @property
    def preference_data(self) -> PreferenceData | None:
        return self.data

    def on_examples(
        self,
        *,
        tasks: tuple[TaskSource, ...],
        data: PreferenceData,
        rewards: Rewards,
        prompts: int | None,
    ) -> Self:
        update: dict[str, Any] = {"evaluation": JudgedEvaluation(rows=0)}
        if self.sampled is None:
            return self.model_copy(update={**update, "data": data})
        taken = min(self.sampled.train, PROMPTS_AT_ONCE, prompts or PROMPTS_AT_ONCE)
        own = {"tasks": tasks, "rewards": rewards, "train": taken, "validation": 1}
        sampled = self.sampled.model_copy(update={**own, "noise": 0.0, "people": None})
        return self.model_copy(update={**update, "sampled": sampled})

    @property
    def template_keywords(self) -> dict[str, Any]:
        """Keyword arguments of the chat template for the prompts of `data`."""
        return {}

    @property
    def records(self) -> Records:
        raise NotImplementedError

    @property
    def judged(self) -> JudgedSource:
        return JudgedSource(
            self.records,
            self.data,
            self.batch_size,
            self.max_tokens,
            self.raw,
            self.template_keywords,
            self.evaluation.rows,
        )

    @property
    def raw(self) -> bool:
        """Whether plain prompts of the rows go without the chat template.

        Sampled rows hold conversations if the policy read some, else text.
        """
        if self.sampled is not None:
            return any(source.raw for source in self.sampled.tasks)
        return self.data is not None and self.data.raw
