"""Direct preference optimisation of the policy, on pairs or labelled answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from keel.algorithms.preferences import PREFERENCE_LOSSES
from keel.algorithms.terms import Coefficient, Positive
from keel.config.fields import StageName
from keel.config.judging import JudgingStage
from keel.config.sources import TemplateKeywords
from keel.config.stage import Optimizer

if TYPE_CHECKING:
    from keel.training.setup import RunContext
    from keel.training.state import Progress


class DPOStage(JudgingStage):
    """Direct preference optimisation: the policy learns from judged answers without a reward
    model."""

    panels: ClassVar[str] = "preferences"
    stage: Literal["dpo"] = "dpo"
    name: StageName = "dpo"
    loss: Literal[
        "sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "cpo", "simpo", "orpo", "kto"
    ] = "sigmoid"
    """DPO, or a loss of its kind. `cpo`, `simpo` and `orpo` have no reference; `kto` learns from
    labelled answers (prompt/completion/label) instead of pairs."""
    beta: Positive | None = None
    """Strength of the divergence from the reference, which is the policy before the stage; without
    one, the factor of log-probabilities. None: 0.1 (`simpo` 2, `sigmoid_norm` 5)."""
    smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of inverted labels (`sigmoid`, `sigmoid_norm`, `robust`, `cpo`)."""
    margin: Coefficient | None = None
    """By how much the chosen answer's reward is to lie above (`simpo`). None: 1."""
    nll: Coefficient | None = None
    """Factor of the negative log-likelihood of a chosen answer's token (all but `kto`); of `orpo`
    the prompt's tokens count too. None: 0 (`cpo` and `orpo` 1)."""
    desirable_weight: Coefficient = 1.0
    """Weight of right answers (`kto`)."""
    undesirable_weight: Coefficient = 1.0
    """Weight of wrong answers (`kto`)."""
    chat_template: TemplateKeywords = Field(default_factory=dict)
    """Keyword arguments of the chat template for the prompts of `data`."""
    optimizer: Optimizer = Optimizer(learning_rate=1e-6)

    @property
    def loss_keys(self) -> dict[str, float]:
        """What the loss reads, its own values in place of None."""
        own = PREFERENCE_LOSSES[self.loss].keys
        given = {key: getattr(self, key) for key in own}
        return {key: own[key] if value is None else value for key, value in given.items()}

    @property
    def keeps_reference(self) -> bool:
        return PREFERENCE_LOSSES[self.loss].reference

    @property
    def records(self) -> Literal["pairs", "labels"]:
        return PREFERENCE_LOSSES[self.loss].records

    @property
    def template_keywords(self) -> dict[str, Any]:
        return self.chat_template

    @property
    def prompt_keywords(self) -> Mapping[str, Any]:
        if self.sampled is None:
            return self.chat_template
        return self.sampled.prompts.chat_template

    @model_validator(mode="after")
    def _reads(self) -> DPOStage:
        if self.sampled is not None and self.chat_template:
            raise ValueError("chat_template is of data: set sampled.prompts.chat_template instead")
        for key in sorted({key for one in PREFERENCE_LOSSES.values() for key in one.keys}):
            value, fields = getattr(self, key), type(self).model_fields
            if key not in PREFERENCE_LOSSES[self.loss].keys and value != fields[key].default:
                its = (f'"{name}"' for name, one in PREFERENCE_LOSSES.items() if key in one.keys)
                raise ValueError(
                    f'{key} = {value:g} is not read by loss = "{self.loss}" '
                    f"(but by {', '.join(its)}): drop it"
                )
        if self.records == "labels" and self.batch_size < 2:
            raise ValueError(
                f'batch_size = {self.batch_size}: loss = "{self.loss}" compares each answer with '
                "that of another row: set 2 or more"
            )
        return self

    def train(self, run: RunContext, progress: Progress) -> Progress:
        from functools import partial

        from keel.learn.optimizer import WeightOptimizer, trainable
        from keel.models.reference import reference_for
        from keel.models.reward import Reader
        from keel.training import judging
        from keel.training.judged_data import encoder, sampled_labels, sampled_pairs
        from keel.training.judged_losses import PolicyLoss, reward_model_metrics
        from keel.training.setup import token_budget
        from keel.training.state import read_reference

        policy, start = run.policy, run.resume_from
        reader = Reader(policy.tokenizer, policy.context, self.prompt_keywords, raw=self.raw)
        make = sampled_labels if self.records == "labels" else sampled_pairs
        rows = judging.examples(run, self, make, encoder(self.records, reader), policy.context)
        optimizer = WeightOptimizer(trainable(policy), self.optimizer)
        reference = None
        if self.keeps_reference:
            reference = reference_for(policy, None if start is None else read_reference(start))
        budget = token_budget(run, self, progress)
        limit = judging.longest_row(self, policy.context)
        chosen = PREFERENCE_LOSSES[self.loss]
        loss = PolicyLoss(policy, reference, budget, chosen, self.loss_keys, limit)
        return judging.train_on_rows(
            run,
            self,
            progress,
            rows,
            optimizer,
            loss.backward,
            partial(reward_model_metrics, self.records, judge=loss.implied_rewards),
            policy.device,
            budget=budget,
            reference=reference,
        )


STAGE = DPOStage
