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
    """The highest rate of the schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    min_lr_ratio: Annotated[Unit, _CONSTANT] = 0.1
    """Learning rate at the end of a linear or cosine schedule, as a share of `learning_rate`."""
    warmup_steps: Index = 0
    """Steps in which the rate grows linearly from 0."""
    betas: Annotated[tuple[Decay, Decay], AsTuple] = (0.9, 0.999)
    """Decay rates of the two moments of AdamW."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Coefficient = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this norm; None: never."""


class Checkpoints(FrozenModel):
    """When checkpoints are written, and how many are kept."""

    every: Count = 100
    """Steps between checkpoints; the last step always writes one."""
    keep: Count = 2
    """How many of the newest are kept, over all stages, in addition to the best of each stage."""


class Trackers(FrozenModel):
    """Experiment trackers."""

    tensorboard: bool = False
    """Log the metrics to TensorBoard."""
    wandb: bool = False
    """Log the metrics to Weights & Biases."""
    project: Annotated[str, _NO_WANDB] = "keel"
    """W&B project."""
    run_name: Annotated[str | None, _NO_WANDB] = None
    """Name of the W&B run; None: the name of the run folder."""
    group: Annotated[str | None, _NO_WANDB] = None
    """W&B group, for example of the seeds of one experiment."""
    completions: Annotated[Index, _NO_WANDB] = 0
    """Completions per step in a W&B table, for the steps whose rollouts are written; 0: no table.
    """
