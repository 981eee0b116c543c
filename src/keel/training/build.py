"""From a stage's recipe to the things that its loop works with."""

from __future__ import annotations

from pathlib import Path

from keel.config.model import Model
from keel.config.schema import RLStage
from keel.learn.learner import Learner
from keel.learn.loss import check_entries
from keel.learn.optimizer import AdamW, trainable
from keel.learn.token_budget import Budget
from keel.models.policy import Policy
from keel.models.reference import reference_for
from keel.models.value import Critic, ValueHead, critic_from_policy, load_critic, value_head_for
from keel.training.state import read_reference, restore_modules, restore_optimizers


def build_learner(
    stage: RLStage,
    model: Model,
    policy: Policy,
    seed: int,
    budget: Budget,
    resume_from: Path | None = None,
) -> Learner:
    """Policy, and the models that the row asks for, each with its optimizer.

    Fresh ones, or as the checkpoint `resume_from` of this stage holds them.
    """
    row = stage.algorithm
    check_entries(row)
    value_head: ValueHead | None = None
    critic: Critic | None = None
    if row.value is not None and stage.value.kind == "head":
        value_head = value_head_for(policy)
    elif row.value is not None and stage.value.name is not None:
        critic = load_critic(stage.value.name, policy, model, seed)
    elif row.value is not None:
        critic = critic_from_policy(policy)
    value_model: ValueHead | Critic | None = critic if value_head is None else value_head
    state = None if resume_from is None else read_reference(resume_from)
    reference = reference_for(policy, state) if stage.keeps_reference else None
    learner = Learner(
        policy=policy,
        optimizer=AdamW(trainable(policy), stage.optimizer),
        budget=budget,
        reference=reference,
        value_head=value_head,
        critic=critic,
        value_optimizer=None
        if value_model is None
        else AdamW(trainable(value_model), stage.value.optimizer or stage.optimizer),
        temperature=stage.rollout.temperature,
    )
    if resume_from is not None:
        restore_modules(resume_from, learner.modules)
        restore_optimizers(resume_from, learner.optimizers)
    return learner
