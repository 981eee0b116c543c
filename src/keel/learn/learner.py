"""The models of one objective: their scores of a batch, and one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keel.algorithms.spec import Algorithm
from keel.learn.batch import Batch, TrainBatch
from keel.learn.finite import (
    Cause,
    find_offending_sequence,
    in_tensors,
    in_weights,
    stop_unless_finite,
)
from keel.learn.loss import Loss, loss
from keel.learn.optimizer import AdamW, step_all
from keel.learn.token_budget import TokenBudget
from keel.models.head import Scores
from keel.models.policy import Policy
from keel.models.reference import FrozenPolicy, Reference
from keel.models.value import Critic, ValueHead
from keel.types import KeelError


@dataclass(frozen=True, eq=False)
class Learner:
    """The policy, and the reference, teacher and value model that the algorithm needs, with
    optimizers."""

    policy: Policy
    optimizer: AdamW
    budget: TokenBudget
    reference: Reference | None = None
    teacher: FrozenPolicy | None = None
    value_head: ValueHead | None = None
    critic: Critic | None = None
    value_optimizer: AdamW | None = None
    temperature: float = 1.0

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What is trained with the policy, by name."""
        pairs = {"value_head": self.value_head, "critic": self.critic}
        return {name: module for name, module in pairs.items() if module is not None}

    @property
    def optimizers(self) -> dict[str, AdamW]:
        pairs = {"optimizer": self.optimizer, "value_optimizer": self.value_optimizer}
        return {name: optimizer for name, optimizer in pairs.items() if optimizer is not None}

    def scores(self, algorithm: Algorithm, batch: Batch) -> Scores:
        """The current models' scores that the loss reads, with gradients."""
        divergence = algorithm.loss_divergence
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
    def score(self, batch: Batch, *, old: bool, reference: bool, others: bool = True) -> Batch:
        """The batch with the log-probabilities of the policy (`old`) and of the reference, and
        (`others`) with those of the teacher and with values, where there are such models."""
        attempt = partial(self._score, batch, old, reference, others)
        return self.budget.fitting(attempt, batch.sizes)

    def clear(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers.values():
            optimizer.clear()

    def _score(self, batch: Batch, old: bool, reference: bool, others: bool, tokens: int) -> Batch:
        head = self.value_head if others else None
        frozen = {
            "reference_log_prob_N": self.reference if reference else None,
            "teacher_log_prob_N": self.teacher if others else None,
        }
        parts: dict[str, list[Tensor]] = {}
        for micro in batch.micro_batches(tokens):
            if old or head is not None:
                scores = self.policy.scores(micro.packed, self.temperature, value_head=head)
                if old:
                    parts.setdefault("old_log_prob_N", []).append(scores.log_prob_N)
                if scores.value_N is not None:
                    parts.setdefault("value_N", []).append(scores.value_N)
            if others and self.critic is not None:
                parts.setdefault("value_N", []).append(self.critic.values(micro.packed))
            for name, model in frozen.items():
                if model is not None:
                    log_prob_N = model.log_probs(micro.packed, self.temperature)
                    parts.setdefault(name, []).append(log_prob_N)
        found: dict[str, Any] = {name: torch.cat(tensors) for name, tensors in parts.items()}
        return replace(batch, **found)


@dataclass(frozen=True, eq=False)
class Losses:
    """The metrics of a batch's loss, and the values of its tokens (see `Loss`)."""

    metrics: Mapping[str, float]
    tokens: Mapping[str, Tensor]


def update(
    learner: Learner,
    algorithm: Algorithm,
    batch: TrainBatch[Batch],
    beta: float,
    rates: tuple[float | None, float],
) -> Losses:
    """One optimizer step on a batch, and its losses.

    `rates` are the learning rates of the policy and of the value model; with None the policy and
    its optimizer's state stay as they are.

    Raises:
        NotFinite: the loss or a gradient is not finite; no optimizer took a step.
    """
    chosen, others = _by_gradient(algorithm, batch, beta)
    with_gradient = batch.select(chosen) if others else batch
    made = learner.budget.fitting(
        partial(backward, learner, algorithm, with_gradient, beta),
        with_gradient.actions.sizes,
        undo=learner.clear,
    )
    metrics, tokens = dict(made.metrics), made.tokens
    if others:
        without = batch.select(others)
        attempt = partial(_losses, learner, algorithm, without, beta)
        more = learner.budget.fitting(attempt, without.actions.sizes)
        metrics = {name: value + more.metrics[name] for name, value in metrics.items()}
        places = batch.actions.action_index([*chosen, *others]).argsort()
        tokens = {name: torch.cat([v, more.tokens[name]])[places] for name, v in tokens.items()}
    try:
        stop_unless_finite(metrics)
    except KeelError:
        learner.clear()
        raise
    names = ("grad_norm", "value/grad_norm")
    norms = step_all(list(learner.optimizers.values()), rates[: len(learner.optimizers)])
    metrics |= dict(zip(names, norms, strict=False))
    stop_unless_finite(metrics)
    return Losses(metrics, tokens)


def backward(
    learner: Learner, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float, tokens: int
) -> Losses:
    """Add a batch's gradient to the parameters', `tokens` at a time; its losses."""
    parts = []
    for micro in _micro_batches(batch, tokens):
        part = loss(algorithm, micro, learner.scores(algorithm, micro.actions), beta)
        part.total.backward()  # type: ignore[no-untyped-call]
        parts.append(replace(part, total=part.total.detach()))
    return _joined(parts)


@torch.no_grad()
def _losses(
    learner: Learner, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float, tokens: int
) -> Losses:
    """The losses of a batch without its gradient."""
    return _joined(
        [
            loss(algorithm, micro, learner.scores(algorithm, micro.actions), beta)
            for micro in _micro_batches(batch, tokens)
        ]
    )


def _micro_batches(batch: TrainBatch[Batch], tokens: int) -> list[TrainBatch[Batch]]:
    spans = batch.actions.spans(tokens)
    return [batch] if len(spans) == 1 else [batch.select(span) for span in spans]


def _joined(parts: Sequence[Loss]) -> Losses:
    """Metrics summed, values of tokens end to end."""
    sums: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.metrics.items():
            sums[name] = sums[name] + value if name in sums else value
    metrics = {name: float(value) for name, value in sums.items()}
    names = parts[0].tokens
    return Losses(metrics, {name: torch.cat([p.tokens[name] for p in parts]) for name in names})


def _by_gradient(
    algorithm: Algorithm, batch: TrainBatch[Batch], beta: float
) -> tuple[list[int], list[int]]:
    """The sequences that the loss has a gradient on, and the others.

    A sequence whose advantages are all 0 has none, unless the loss has another term than the
    surrogate. At least one sequence is among the first, so that each parameter has a gradient.
    """
    divergence = algorithm.loss_divergence is not None and beta != 0
    other_terms = divergence or algorithm.value is not None or algorithm.entropy > 0
    if other_terms or algorithm.surrogate.kind == "custom":
        return list(range(batch.sequences)), []
    pieces = torch.split((batch.advantage_N != 0).cpu(), list(batch.lengths))
    moves = [bool(piece.any()) for piece in pieces]
    if not any(moves):
        moves[0] = True
    chosen, others = ([i for i, m in enumerate(moves) if m is want] for want in (True, False))
    return chosen, others


def cause_of(
    learner: Learner, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float
) -> Cause:
    """Where a loss or gradient that is not finite comes from."""
    parameters = [p for optimizer in learner.optimizers.values() for p in optimizer.parameters]

    def backward_alone(i: int) -> Mapping[str, float]:
        return backward(learner, algorithm, batch.select([i]), beta, learner.budget.tokens).metrics

    return (
        in_weights(parameters)
        or in_tensors(batch)
        or find_offending_sequence(
            backward_alone, range(batch.sequences), parameters, learner.clear
        )
    )
