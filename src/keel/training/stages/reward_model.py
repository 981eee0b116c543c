"""An outcome reward model, from pairs or labelled answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from keel.algorithms.terms import Coefficient
from keel.config.fields import StageName
from keel.config.judging import JudgingStage
from keel.config.model import BaseModelChoice

if TYPE_CHECKING:
    from keel.training.setup import RunContext
    from keel.training.state import Progress


class RewardModelStage(JudgingStage):
    """An outcome reward model: one score for a whole answer."""

    reward_model: ClassVar[Literal["outcome"]] = "outcome"
    trains_policy: ClassVar[bool] = False
    panels: ClassVar[str] = "preferences"
    stage: Literal["reward_model"] = "reward_model"
    name: StageName = "reward_model"
    objective: Literal["pairs", "labels"] = "pairs"
    """Bradley–Terry on prompt/chosen/rejected, or cross-entropy on prompt/completion/label."""
    centering: Coefficient = 0.0
    """Factor of the squared sum of the scores of a pair, which keeps scores around 0."""
    base: BaseModelChoice = BaseModelChoice()

    @property
    def records(self) -> Literal["pairs", "labels"]:
        return self.objective

    @property
    def base_model(self) -> BaseModelChoice:
        return self.base

    @model_validator(mode="after")
    def _comparisons(self) -> RewardModelStage:
        if self.objective == "labels" and self.centering:
            raise ValueError(
                f"centering = {self.centering:g} is of pairs, and labels fix the score's zero: "
                "drop it"
            )
        return self

    def train(self, run: RunContext, progress: Progress) -> Progress:
        from functools import partial

        from keel.training.judged_data import sampled_labels, sampled_pairs
        from keel.training.judged_losses import labels_backward, pairs_backward
        from keel.training.judging import new_model, train_reward_model

        model = new_model(run, self, self.base, "outcome")
        if self.objective == "pairs":
            make, backward = sampled_pairs, partial(pairs_backward, model, self.centering)
        else:
            make, backward = sampled_labels, partial(labels_backward, model)
        return train_reward_model(run, self, progress, model, make, backward)


STAGE = RewardModelStage
