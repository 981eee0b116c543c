"""The keys of learning, keeping and tracking that every stage has. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from keel.algorithms.spec import Coefficient, FrozenModel, Positive, Unit, UnusedIf
from keel.config.fields import AsTuple, Count, Index, LearningRate

Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a running mean."""
OnNonfinite = Literal["stop", "skip"]
"""Whether a run stops at a loss or gradient that is not finite, or goes on without the step."""

_CONSTANT = UnusedIf(
    lambda key: key.table.schedule == "constant", 'schedule = "constant" keeps the learning rate'
)
_NO_WANDB = UnusedIf(lambda key: not key.table.wandb, "trackers.wandb is off")


class Optimizer(FrozenModel):
    """AdamW, and the schedule of its learning rate over the stage's steps."""

    learning_rate: LearningRate = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Annotated[Unit, _CONSTANT] = 0.1
    """What is left of the learning rate at the end of a linear or cosine schedule."""
    warmup_steps: Index = 0
    betas: Annotated[tuple[Decay, Decay], AsTuple] = (0.9, 0.999)
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    weight_decay: Coefficient = 0.0
    max_grad_norm: Positive | None = 1.0


class Checkpoints(FrozenModel):
    every: Count = 100
    keep: Count = 2
    """How many of the newest are kept, of any stage, in addition to the best of each."""


class Trackers(FrozenModel):
    tensorboard: bool = False
    wandb: bool = False
    project: Annotated[str, _NO_WANDB] = "keel"
    run_name: Annotated[str | None, _NO_WANDB] = None
    """Of the W&B run; None: the name of the run folder."""
    group: Annotated[str | None, _NO_WANDB] = None
    """The W&B group, which puts runs together, as of several seeds."""
    completions: Annotated[Index, _NO_WANDB] = 0
    """How many completions of each step whose rollouts are written go into a W&B table; 0: none."""
