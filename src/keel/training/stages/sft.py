"""Supervised fine-tuning on the demonstrations of tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from keel.algorithms.terms import EntryPoint
from keel.config.fields import AsTuple, Count, StageName
from keel.config.sources import Prompts, TaskSource
from keel.config.stage import DemonstrationSource, StageConfig

if TYPE_CHECKING:
    from keel.training.setup import RunContext
    from keel.training.state import Progress


class SFTStage(StageConfig):
    """Supervised fine-tuning on the task's demonstrations."""

    panels: ClassVar[str] = "sft"
    stage: Literal["sft"] = "sft"
    name: StageName = "sft"
    tasks: Annotated[tuple[TaskSource, ...], AsTuple, Field(min_length=1)]
    prompts: Prompts = Prompts()
    demonstration: EntryPoint = "keel.data.tasks:gold"
    """`module:function` of (prompt, gold answer, random generator) that returns the text to
    imitate."""
    batch_size: Count = 32
    """Demonstrations in a step."""

    @property
    def trained_tasks(self) -> tuple[TaskSource, ...]:
        return self.tasks

    @property
    def demonstrations(self) -> DemonstrationSource:
        return DemonstrationSource(self.tasks, self.prompts, self.demonstration, self.batch_size)

    @property
    def prompts_in_step(self) -> int:
        return self.batch_size

    def on_examples(self, *, tasks: tuple[TaskSource, ...], **_: Any) -> Self:
        gold = SFTStage.model_fields["demonstration"].default
        return self.model_copy(update={"tasks": tasks, "demonstration": gold})

    def train(self, run: RunContext, progress: Progress) -> Progress:
        from keel.config.entry import load_entry
        from keel.config.fields import derive
        from keel.learn.optimizer import WeightOptimizer, trainable
        from keel.training.setup import open_prompts
        from keel.training.supervised import Demonstrations, train_on_examples

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
        demonstrations = Demonstrations(
            stage=self.name,
            entry=self.demonstration,
            demonstrate=load_entry(self.demonstration, "demonstration"),
            tasks=source.tasks,
            stream=source.stream,
            batch_size=self.batch_size,
            policy=run.policy,
            seed=seed,
            encoder=source.encoder,
        )
        return train_on_examples(run, self, progress, demonstrations.examples(), optimizer)


STAGE = SFTStage
