"""The models that one objective needs, and what is asked of them on a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from keel.algorithms.spec import Algorithm
from keel.learn.batch import Batch
from keel.learn.loss import loss
from keel.learn.optimizer import AdamW
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.models.scores import Scores
from keel.models.value import Critic, ValueHead
from keel.types import KeelError


@dataclass(frozen=True, eq=False)
class Learner:
    """Policy, and where the row asks for them reference and value model, with their optimizers."""

    policy: Policy
    optimizer: AdamW
    reference: Reference | None = None
    value_head: ValueHead | None = None
    critic: Critic | None = None
    critic_optimizer: AdamW | None = None
    temperature: float = 1.0
    token_budget: int = 16_384

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What is trained beside the policy, by name."""
        pairs = {"value_head": self.value_head, "critic": self.critic}
        return {name: module for name, module in pairs.items() if module is not None}

    @property
    def optimizers(self) -> dict[str, AdamW]:
        pairs = {"optimizer": self.optimizer, "critic_optimizer": self.critic_optimizer}
        return {name: optimizer for name, optimizer in pairs.items() if optimizer is not None}

    def scores(self, row: Algorithm, batch: Batch) -> Scores:
        """What the loss reads of the current models, with gradients."""
        divergence = row.loss_divergence
        full = divergence is not None and divergence.estimator == "full"
        scores = self.policy.scores(
            batch.packed,
            self.temperature,
            entropy=True,
            value_head=self.value_head,
            reference=self.reference if full else None,
        )
        if self.critic is not None:
            scores = replace(scores, value_N=self.critic.values(batch.packed))
        return scores

    @torch.no_grad()
    def measure(self, batch: Batch, *, old: bool, reference: bool, values: bool = True) -> Batch:
        """The batch with old log-probabilities, reference log-probabilities and values filled in.

        Values are measured wherever a value model is.
        """
        head = self.value_head if values else None
        parts: dict[str, list[Tensor]] = {}
        for micro in batch.micro_batches(self.token_budget):
            if old or head is not None:
                scores = self.policy.scores(micro.packed, self.temperature, value_head=head)
                if old:
                    parts.setdefault("old_log_prob_N", []).append(scores.log_prob_N)
                if scores.value_N is not None:
                    parts.setdefault("value_N", []).append(scores.value_N)
            if values and self.critic is not None:
                parts.setdefault("value_N", []).append(self.critic.values(micro.packed))
            if reference and self.reference is not None:
                seen = self.reference.log_probs(micro.packed, self.temperature)
                parts.setdefault("reference_log_prob_N", []).append(seen)
        found: dict[str, Any] = {name: torch.cat(tensors) for name, tensors in parts.items()}
        return replace(batch, **found)


def update(
    learner: Learner, row: Algorithm, batch: Batch, beta: float, rates: tuple[float, float]
) -> dict[str, float]:
    """One optimizer step over the micro-batches of a prepared batch; its metrics.

    `rates` are the learning rates of the policy and of a separate critic.
    """
    sums: dict[str, Tensor] = {}
    for micro in batch.micro_batches(learner.token_budget):
        part = loss(row, micro, learner.scores(row, micro), beta)
        part.total.backward()  # type: ignore[no-untyped-call]
        for name, value in part.metrics.items():
            sums[name] = sums[name] + value if name in sums else value
    metrics = {name: float(value) for name, value in sums.items()}
    stop_unless_finite(metrics)
    metrics["grad_norm"] = learner.optimizer.step(rates[0])
    if learner.critic_optimizer is not None:
        metrics["value/grad_norm"] = learner.critic_optimizer.step(rates[1])
    stop_unless_finite(metrics)
    return metrics


def stop_unless_finite(metrics: Mapping[str, float]) -> None:
    """Raises KeelError where a metric of a step is NaN or infinite."""
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise KeelError(
            f"{', '.join(bad)} came out non-finite: its step was not taken; lower "
            "optimizer.learning_rate or see the step's rollouts"
        )
