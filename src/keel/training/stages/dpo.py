"""Direct preference optimisation of the policy on pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from keel.algorithms.terms import Positive
from keel.config.fields import StageName
from keel.config.judging import JudgingStage
from keel.config.sources import TemplateKeywords
from keel.config.stage import Optimizer

if TYPE_CHECKING:
    from keel.training.setup import RunContext
    from keel.training.state import Progress


class DPOStage(JudgingStage):
    """Direct preference optimisation: the policy learns from pairs without a reward model."""

    panels: ClassVar[str] = "preferences"
    stage: Literal["dpo"] = "dpo"
    name: StageName = "dpo"
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """The DPO loss, or that of IPO."""
    beta: Positive = 0.1
    """Strength of the divergence from the reference, which is the policy before the stage."""
    smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of inverted labels (`sigmoid` only)."""
    chat_template: TemplateKeywords = Field(default_factory=dict)
    """Keyword arguments of the chat template for the prompts of `data`."""
    optimizer: Optimizer = Optimizer(learning_rate=1e-6)

    @property
    def keeps_reference(self) -> bool:
        return True

    @property
    def records(self) -> Literal["pairs"]:
        return "pairs"

    @property
    def template_keywords(self) -> dict[str, Any]:
        return self.chat_template

    @property
    def prompt_keywords(self) -> Mapping[str, Any]:
        if self.sampled is None:
            return self.chat_template
        return self.sampled.prompts.chat_template

    @model_validator(mode="after")
    def _smooths(self) -> DPOStage:
        if self.sampled is not None and self.chat_template:
            raise ValueError("chat_template is of data: set sampled.prompts.chat_template instead")
        if self.loss == "ipo" and self.smoothing:
            raise ValueError(f'smoothing = {self.smoothing:g} is of loss = "sigmoid": drop it')
        return self

    def train(self, run: RunContext, progress: Progress) -> Progress:
        from functools import partial

        from keel.learn.optimizer import WeightOptimizer, trainable
        from keel.models.reference import reference_for
        from keel.models.reward import Reader
        from keel.training import judging
        from keel.training.judged_data import encoder, sampled_pairs
        from keel.training.judged_losses import DPO, measure_pairs
        from keel.training.setup import token_budget
        from keel.training.state import read_reference

        policy, start = run.policy, run.resume_from
        reader = Reader(policy.tokenizer, policy.context, self.prompt_keywords, raw=self.raw)
        rows = judging.examples(run, self, sampled_pairs, encoder("pairs", reader), policy.context)
        optimizer = WeightOptimizer(trainable(policy), self.optimizer)
        reference = reference_for(policy, None if start is None else read_reference(start))
        budget = token_budget(run, self, progress)
        dpo = DPO(policy, reference, budget, self.loss, self.beta, self.smoothing)
        return judging.train_on_rows(
            run,
            self,
            progress,
            rows,
            optimizer,
            dpo.backward,
            partial(measure_pairs, judge=dpo.implied_rewards),
            policy.device,
            budget=budget,
            reference=reference,
        )


STAGE = DPOStage
