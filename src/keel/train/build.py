"""From a stage's recipe to the things that its loop works with."""

from __future__ import annotations

from keel.config.schema import Model, RLStage, TaskSource
from keel.learn.learner import Learner
from keel.learn.optimizer import AdamW, trainable
from keel.models.loading import load_critic
from keel.models.policy import Policy
from keel.models.reference import Reference, make_reference
from keel.models.value import Critic, ValueHead
from keel.tasks import build_task
from keel.types import KeelError, Task


def build_tasks(sources: tuple[TaskSource, ...], seed: int) -> dict[str, Task]:
    """The tasks of a mixture by name, in order."""
    tasks: dict[str, Task] = {}
    for source in sources:
        task = build_task(source, seed)
        if task.name in tasks:
            raise KeelError(f"tasks: {task.name!r} is named twice: give one entry its whole weight")
        tasks[task.name] = task
    return tasks


def build_learner(stage: RLStage, model: Model, policy: Policy, seed: int) -> Learner:
    """Policy, and the models that the row asks for, each with its optimizer."""
    row = stage.algorithm
    value_head: ValueHead | None = None
    critic: Critic | None = None
    if row.value is not None and stage.value.kind == "head":
        value_head = ValueHead(policy.hidden_size).to(policy.device)
    elif row.value is not None:
        critic = load_critic(stage.value, model, policy, seed)
    parameters = trainable(policy.model)
    if value_head is not None:
        parameters += trainable(value_head, "value_head.")
    reference: Reference | None = make_reference(policy) if row.needs_reference else None
    return Learner(
        policy=policy,
        optimizer=AdamW(parameters, stage.optimizer),
        reference=reference,
        value_head=value_head,
        critic=critic,
        critic_optimizer=None
        if critic is None
        else AdamW(trainable(critic), stage.value.optimizer or stage.optimizer),
        temperature=stage.rollout.temperature,
        token_budget=stage.token_budget,
    )
