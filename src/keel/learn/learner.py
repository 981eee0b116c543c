"""The models that one objective needs, and what is asked of them on a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from keel.algorithms.spec import Algorithm
from keel.learn.batch import Batch
from keel.learn.finite import Cause, alone, in_tensors, in_weights, stop_unless_finite
from keel.learn.loss import Loss, loss
from keel.learn.optimizer import AdamW, step_all
from keel.learn.token_budget import TokenBudget
from keel.models.head import Scores
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.models.value import Critic, ValueHead
from keel.types import KeelError


@dataclass(frozen=True, eq=False)
class Learner:
    """Policy, and where the row asks for them reference and value model, with their optimizers."""

    policy: Policy
    optimizer: AdamW
    budget: TokenBudget
    reference: Reference | None = None
    value_head: ValueHead | None = None
    critic: Critic | None = None
    value_optimizer: AdamW | None = None
    temperature: float = 1.0

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What is trained beside the policy, by name."""
        pairs = {"value_head": self.value_head, "critic": self.critic}
        return {name: module for name, module in pairs.items() if module is not None}

    @property
    def optimizers(self) -> dict[str, AdamW]:
        pairs = {"optimizer": self.optimizer, "value_optimizer": self.value_optimizer}
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
        return self.budget.fitting(
            lambda tokens: self._measure(batch, old, reference, values, tokens),
            batch.sizes,
        )

    def clear(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers.values():
            optimizer.clear()

    def _measure(
        self, batch: Batch, old: bool, reference: bool, values: bool, tokens: int
    ) -> Batch:
        head = self.value_head if values else None
        parts: dict[str, list[Tensor]] = {}
        for micro in batch.micro_batches(tokens):
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
    learner: Learner, row: Algorithm, batch: Batch, beta: float, rates: tuple[float | None, float]
) -> dict[str, float]:
    """One optimizer step over the micro-batches of a prepared batch; its metrics.

    `rates` are the learning rates of the policy and of the value model; None leaves the policy and
    its optimizer's state as they are.

    Raises:
        NotFinite: the loss or a gradient is; no step was taken, by none of the optimizers.
    """
    moving, still = _by_gradient(row, batch, beta)
    metrics = learner.budget.fitting(
        lambda tokens: backward(learner, row, moving, beta, tokens),
        moving.sizes,
        undo=learner.clear,
    )
    if still.sequences:
        more = learner.budget.fitting(
            lambda tokens: _watched(learner, row, still, beta, tokens), still.sizes
        )
        metrics = {name: value + more[name] for name, value in metrics.items()}
    try:
        stop_unless_finite(metrics)
    except KeelError:
        learner.clear()
        raise
    names = ("grad_norm", "value/grad_norm")
    norms = step_all(list(learner.optimizers.values()), rates[: len(learner.optimizers)])
    metrics |= dict(zip(names, norms, strict=False))
    stop_unless_finite(metrics)
    return metrics


def backward(
    learner: Learner, row: Algorithm, batch: Batch, beta: float, tokens: int
) -> dict[str, float]:
    """Leave the gradient of a prepared batch in the parameters, so many tokens at a time."""

    def learned(micro: Batch) -> Loss:
        said = loss(row, micro, learner.scores(row, micro), beta)
        said.total.backward()  # type: ignore[no-untyped-call]
        return said

    return _summed(map(learned, batch.micro_batches(tokens)))


@torch.no_grad()
def _watched(
    learner: Learner, row: Algorithm, batch: Batch, beta: float, tokens: int
) -> dict[str, float]:
    """What `backward` says of a batch, without it."""
    micros = batch.micro_batches(tokens)
    return _summed(loss(row, micro, learner.scores(row, micro), beta) for micro in micros)


def _summed(parts: Iterable[Loss]) -> dict[str, float]:
    sums: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.metrics.items():
            sums[name] = sums[name] + value if name in sums else value
    return {name: float(value) for name, value in sums.items()}


def _by_gradient(row: Algorithm, batch: Batch, beta: float) -> tuple[Batch, Batch]:
    """The sequences that the loss has a gradient on, and the others.

    One that has an advantage of 0 on every token has none, unless another term than the surrogate
    asks for it. One sequence at least stays, so that each parameter has a gradient, be it 0.
    """
    assert batch.advantage_N is not None
    divergence = row.loss_divergence is not None and beta != 0
    if divergence or row.value is not None or row.entropy > 0 or row.surrogate.kind == "custom":
        return batch, batch.select([])
    pieces = torch.split((batch.advantage_N != 0).cpu(), list(batch.lengths))
    moves = [bool(piece.any()) for piece in pieces]
    if not any(moves):
        moves[0] = True
    if all(moves):
        return batch, batch.select([])
    chosen, others = ([i for i, m in enumerate(moves) if m is want] for want in (True, False))
    return batch.select(chosen), batch.select(others)


def cause_of(learner: Learner, row: Algorithm, batch: Batch, beta: float) -> Cause:
    """Where a loss or gradient of a prepared batch that is not finite comes from."""
    parameters = [
        pair for optimizer in learner.optimizers.values() for pair in optimizer.parameters
    ]

    def learn(i: int) -> dict[str, float]:
        return backward(learner, row, batch.select([i]), beta, learner.budget.tokens)

    return (
        in_weights(parameters)
        or in_tensors(batch)
        or alone(learn, range(batch.sequences), parameters, learner.clear)
    )
