"""Supervised fine-tuning on conversations and texts, or on the demonstrations of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from keel.algorithms.terms import AsTuple, EntryPoint, FrozenModel, UnusedIf
from keel.config.fields import Count, Index, StageName, Tokens
from keel.config.sources import PAST_THE_END, PreferenceData, Prompts, SFTData, TaskSource
from keel.config.stage import DemonstrationSource, ImitationSource, StageConfig

if TYPE_CHECKING:
    from keel.training.setup import RunContext
    from keel.training.state import Progress


_OF_TASKS = UnusedIf(
    lambda key: bool(key.stage.tasks), "the stage imitates demonstrations of tasks"
)
_OF_DATA = UnusedIf(lambda key: bool(key.stage.data), "the stage imitates the examples of data")
_NEVER_EVALUATED = UnusedIf(
    lambda key: bool(key.stage.tasks) or key.table.rows == 0,
    "without data, or with evaluation.rows = 0, nothing is evaluated",
)


class SFTEvaluation(FrozenModel):
    """The loss on the validation examples of `data`."""

    every: Annotated[Index, _NEVER_EVALUATED, PAST_THE_END] = 50
    """Steps between evaluations; 0: only before and after the stage."""
    rows: Annotated[Index, _OF_TASKS] = 1000
    """Most validation examples of each set; 0: no evaluation."""


class SFTStage(StageConfig):
    """Supervised fine-tuning on examples, or on demonstrations of tasks."""

    panels: ClassVar[str] = "sft"
    stage: Literal["sft"] = "sft"
    name: StageName = "sft"
    data: Annotated[tuple[SFTData, ...], AsTuple] = ()
    """Sets of examples, each with its weight."""
    tasks: Annotated[tuple[TaskSource, ...], AsTuple] = ()
    """Tasks whose gold answers become demonstrations, instead of `data`."""
    prompts: Prompts = Prompts()
    demonstration: Annotated[EntryPoint, _OF_DATA] = "keel.data.tasks:gold"
    """`module:function` of (prompt, gold answer, random generator) that returns the text to
    imitate."""
    batch_size: Count = 32
    """Examples in a step; with `packing`: blocks."""
    loss_on: Annotated[Literal["assistant", "all"], _OF_TASKS] = "assistant"
    """Which tokens of an example bear loss: those that the model itself would write (in every turn
    of the assistant, what closes it included; of a `prompt` and its `completion`, the completion),
    or all. All of a `text` do."""
    packing: Annotated[bool, _OF_TASKS] = False
    """Fill blocks of `max_tokens` with examples by best fit. They stay apart: none attends to
    another."""
    max_tokens: Annotated[Tokens | None, _OF_TASKS] = None
    """The longest example, and the size of a block; None: the model's context."""
    overlong: Annotated[Literal["cut", "drop"], _OF_TASKS] = "cut"
    """What happens to an example of more tokens; the number is reported."""
    shuffle: Annotated[bool, _OF_TASKS] = True
    """Take the examples of each epoch in another order; a streamed set stays in its own."""
    evaluation: SFTEvaluation = SFTEvaluation()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.data) == bool(self.tasks):
            raise ValueError("set exactly one of data (examples) and tasks (demonstrations)")
        if self.data and self.prompts.max_tokens is not None:
            raise ValueError(
                f"prompts.max_tokens = {self.prompts.max_tokens} is of tasks: of examples of data, "
                "set max_tokens"
            )
        if self.num_train_epochs is not None and any(one.streams for one in self.data):
            raise ValueError(
                "num_train_epochs counts passes, and a streamed set has no known end: set steps"
            )
        return self

    @property
    def trained_tasks(self) -> tuple[TaskSource, ...]:
        return self.tasks

    @property
    def prompt_keywords(self) -> Mapping[str, Any]:
        return self.prompts.chat_template

    @property
    def demonstrated(self) -> DemonstrationSource | None:
        if not self.tasks:
            return None
        return DemonstrationSource(self.tasks, self.prompts, self.demonstration, self.batch_size)

    @property
    def imitated(self) -> ImitationSource | None:
        if not self.data:
            return None
        return ImitationSource(
            data=self.data,
            batch_size=self.batch_size,
            loss_on=self.loss_on,
            packing=self.packing,
            max_tokens=self.max_tokens,
            drops=self.overlong == "drop",
            shuffle=self.shuffle,
            template_keywords=self.prompts.chat_template,
            validation_rows=self.evaluation.rows,
        )

    @property
    def prompts_in_step(self) -> int | None:
        return self.batch_size if self.tasks else None

    @property
    def evaluation_interval(self) -> int | None:
        return self.evaluation.every if self.data else None

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        return ("eval/loss", "eval/mean_token_accuracy") if self.data else ()

    def on_examples(self, *, tasks: tuple[TaskSource, ...], data: PreferenceData, **_: Any) -> Self:
        if self.tasks:
            gold = SFTStage.model_fields["demonstration"].default
            return self.model_copy(update={"tasks": tasks, "demonstration": gold})
        own = SFTData(name=data.name, options=data.options, raw=data.raw)
        return self.model_copy(update={"data": (own,), "evaluation": SFTEvaluation(rows=0)})

    def train(self, run: RunContext, progress: Progress) -> Progress:
        from keel.config.fields import derive
        from keel.learn.optimizer import WeightOptimizer, trainable
        from keel.training.setup import open_prompts
        from keel.training.supervised import demonstrations, train_on_examples, train_on_sets

        if self.imitated is not None:
            return train_on_sets(run, self, progress, self.imitated)
        seed = derive(run.recipe.seed, self.name)
        optimizer = WeightOptimizer(trainable(run.policy), self.optimizer)
        source = open_prompts(
            run,
            self.name,
            self.tasks,
            self.prompts,
            seed,
            max_tokens=1,
            key="the shortest demonstration",
            state=progress.stream,
        )
        examples = demonstrations(
            run.policy, self.name, self.demonstration, self.batch_size, source, seed
        )
        size = source.size() if self.unresolved else None
        stage = run.resolved(self, size, self.batch_size)
        return train_on_examples(run, stage, progress, examples, optimizer)


STAGE = SFTStage
