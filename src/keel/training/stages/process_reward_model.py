"""A process reward model, from labelled steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from keel.algorithms.terms import Unit
from keel.config.fields import StageName
from keel.config.judging import NEVER_EVALUATED, JudgingStage
from keel.config.model import BaseModelChoice
from keel.config.stage import JudgedSource

if TYPE_CHECKING:
    from keel.training.setup import RunContext
    from keel.training.state import Progress


class ProcessRewardModelStage(JudgingStage):
    """A process reward model: a judgement at the last token of each step."""

    reward_model: ClassVar[Literal["process"]] = "process"
    trains_policy: ClassVar[bool] = False
    panels: ClassVar[str] = "preferences"
    stage: Literal["process_reward_model"] = "process_reward_model"
    name: StageName = "process_reward_model"
    separator: str = "\n"
    """Text between two steps of an answer."""
    threshold: Annotated[Unit, NEVER_EVALUATED] = 0.5
    """The first step whose probability of being right is below this is the predicted mistake."""
    base: BaseModelChoice = BaseModelChoice()

    @property
    def records(self) -> Literal["steps"]:
        return "steps"

    @property
    def judged(self) -> JudgedSource:
        found = super().judged
        return replace(found, separator=self.separator, threshold=self.threshold)

    @property
    def base_model(self) -> BaseModelChoice:
        return self.base

    def train(self, run: RunContext, progress: Progress) -> Progress:
        from functools import partial

        from keel.models.text import decode
        from keel.training.judged_data import sampled_steps
        from keel.training.judged_losses import labels_backward
        from keel.training.judging import new_model, train_reward_model

        model = new_model(run, self, self.base, "process")
        tokenizer = run.policy.tokenizer
        make = sampled_steps(self.separator, lambda ids: decode(tokenizer, [ids])[0])
        backward = partial(labels_backward, model)
        return train_reward_model(run, self, progress, model, make, backward)


STAGE = ProcessRewardModelStage
