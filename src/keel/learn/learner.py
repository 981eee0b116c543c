"""The models of one objective: their scores of a batch, and one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keel.algorithms.spec import Algorithm
from keel.learn.batch import Batch, TrainBatch, read
from keel.learn.loss import Loss, loss, whole_batch
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import (
    Cause,
    WeightOptimizer,
    apply_all,
    bad_weight,
    find_offending_sequence,
    in_tensors,
    in_weights,
    stop_unless_finite,
)
from keel.learn.ranks import ONE, Ranks, save_learned, spans
from keel.models.head import OtherStates, Scores, ValueHead
from keel.models.policy import Policy
from keel.models.reference import Critic, FrozenPolicy, Reference
from keel.objective import segments

T = TypeVar("T")
P = TypeVar("P", Batch, TrainBatch[Batch])


class Trainer(Protocol):
    """What the loop of reinforcement learning trains: a `Learner`, here or in other processes."""

    @property
    def policy(self) -> Policy:
        """Whole, with the weights of the last `weights()`."""
        ...

    @property
    def budget(self) -> TokenBudget: ...
    @property
    def device(self) -> torch.device:
        """Where batches have to be."""
        ...

    @property
    def has_reference(self) -> bool: ...
    @property
    def learns_values(self) -> bool: ...
    @property
    def began(self) -> bool:
        """Whether the policy's optimizer has ever stepped."""
        ...

    def score(
        self,
        batch: Batch,
        *,
        old: bool,
        reference: bool,
        others: bool = True,
        entropy: bool = False,
        squares: bool = False,
        teacher: bool = True,
    ) -> Batch: ...
    def update(
        self,
        algorithm: Algorithm,
        batch: TrainBatch[Batch],
        beta: float,
        rates: tuple[float | None, float],
        *,
        moved: bool = True,
    ) -> Losses: ...
    def cause_of(self, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float) -> Cause: ...
    def bad_weight(self) -> str | None: ...
    def refresh_reference(self, rate: float = 1.0) -> None: ...
    def weights(self) -> dict[str, Tensor]: ...
    def save(self, folder: Path) -> None:
        """Write what a checkpoint holds besides the policy."""
        ...


@dataclass(frozen=True, eq=False)
class Learner:
    """The policy, and the reference, teacher and value model that the algorithm needs, with
    optimizers."""

    policy: Policy
    optimizer: WeightOptimizer
    budget: TokenBudget
    reference: Reference | None = None
    teachers: Sequence[FrozenPolicy] = ()
    value_head: ValueHead | None = None
    critic: Critic | None = None
    value_optimizer: WeightOptimizer | None = None
    temperature: float = 1.0
    ranks: Ranks = ONE

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    @property
    def learns_values(self) -> bool:
        return self.value_optimizer is not None

    @property
    def began(self) -> bool:
        return self.optimizer.began

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What is trained with the policy, by name."""
        pairs = {"value_head": self.value_head, "critic": self.critic}
        return {name: module for name, module in pairs.items() if module is not None}

    @property
    def optimizers(self) -> dict[str, WeightOptimizer]:
        pairs = {"optimizer": self.optimizer, "value_optimizer": self.value_optimizer}
        return {name: optimizer for name, optimizer in pairs.items() if optimizer is not None}

    def scores(self, algorithm: Algorithm, batch: Batch) -> Scores:
        """The current models' scores that the loss reads, with gradients."""
        divergence = algorithm.loss_divergence
        full = divergence is not None and divergence.estimator == "full"
        packed, places = batch.read
        taught, teacher = algorithm.loss_distillation, None
        if taught is not None:
            read = packed if batch.taught is None else batch.taught.packed
            [own] = self.teachers
            teacher = OtherStates(own.hidden(read), own.head, taught.value)
        scores = self.policy.scores(
            packed,
            self.temperature,
            entropy=True,
            value_head=self.value_head,
            reference=self.reference if full else None,
            teacher=teacher,
        )
        if places is not None:
            scores = scores.parted(places, len(batch.target_N))
        if self.critic is not None:
            scores = replace(scores, value_N=self.critic.values(batch.rollouts.packed))
        return scores

    @torch.no_grad()
    def score(
        self,
        batch: Batch,
        *,
        old: bool,
        reference: bool,
        others: bool = True,
        entropy: bool = False,
        squares: bool = False,
        teacher: bool = True,
    ) -> Batch:
        """The batch with the log-probabilities of the policy (`old`) and of the reference, and
        (`others`) with those of the `teacher` and with values, where there are such models; with
        `entropy` and `squares` (Σ_v π²) those of the policy too."""
        attempt = partial(
            self._score, batch, old, reference, others, entropy, squares, others and teacher
        )
        return self.budget.fitting(attempt, batch.sizes, retry=self.ranks.count == 1)

    def passes(self, batch: P, tokens: int) -> tuple[list[P], int]:
        """The micro-batches that this rank computes, and how many of them are its own.

        Those beyond the rank's own repeat a sequence and have no effect: sharded models compute on
        all ranks at once, so that all need as many passes.
        """

        def actions(part: P) -> Batch:
            return part.actions if isinstance(part, TrainBatch) else part

        def cut(part: P) -> list[P]:
            spans = actions(part).spans(tokens)
            return [part] if len(spans) == 1 else [part.select(span) for span in spans]

        ranks, sizes = self.ranks, actions(batch).sizes
        if ranks.count == 1:
            own = cut(batch)
            return own, len(own)
        common = sizes.shared or (0,) * len(sizes.lengths)
        costs = [n - shared for n, shared in zip(sizes.lengths, common, strict=True)]
        share = spans(costs, ranks.count)[ranks.number]
        own = cut(batch.select(share)) if share else []
        missing = max(ranks.gather(len(own))) - len(own)
        return own + missing * cut(batch.select([0])), len(own)

    def update(
        self,
        algorithm: Algorithm,
        batch: TrainBatch[Batch],
        beta: float,
        rates: tuple[float | None, float],
        *,
        moved: bool = True,
    ) -> Losses:
        """One optimizer step on a batch, and its losses.

        `rates` are the learning rates of the policy and of the value model; with None the policy
        and its optimizer's state stay as they are. `moved` says whether the policy is another than
        the one that the batch's old log-probabilities were scored with: a term that reads the whole
        batch then has it scored once more.

        Raises:
            NotFinite: the loss or a gradient is not finite; no optimizer took a step.
        """
        batch = self._prepared(algorithm, batch, moved)
        chosen, others = by_gradient(algorithm, batch, beta)
        with_gradient = batch.select(chosen) if others else batch
        alone = self.ranks.count == 1
        made = self.budget.fitting(
            partial(backward, self, algorithm, with_gradient, beta),
            with_gradient.actions.sizes,
            undo=self.clear,
            retry=alone,
            pending=lambda: sum(one.pending for one in self.optimizers.values()),
        )
        sums, tokens = [made.metrics], made.tokens
        if others:
            without = batch.select(others)
            attempt = partial(backward, self, algorithm, without, beta, gradient=False)
            more = self.budget.fitting(attempt, without.actions.sizes, retry=alone)
            sums.append(more.metrics)
            places = batch.actions.action_index([*chosen, *others]).argsort()
            tokens = {name: torch.cat([v, more.tokens[name]])[places] for name, v in tokens.items()}
        optimizers = list(self.optimizers.values())
        # The one read of losses and norms: until here the host is ahead of the device.
        metrics, norms = _numbers(self.ranks, sums, [one.clip() for one in optimizers])
        try:
            stop_unless_finite(metrics)
            metrics |= dict(zip(("grad_norm", "value/grad_norm"), norms, strict=False))
            stop_unless_finite(metrics)
            apply_all(optimizers, rates[: len(optimizers)])
        finally:
            self.clear()
        return Losses(metrics, tokens)

    def cause_of(self, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float) -> Cause:
        """Where a loss or gradient that is not finite comes from."""
        batch = self._prepared(algorithm, batch, moved=True)
        parameters = [p for optimizer in self.optimizers.values() for p in optimizer.parameters]

        def backward_alone(i: int) -> Mapping[str, float]:
            made = backward(self, algorithm, batch.select([i]), beta, self.budget.tokens)
            return _numbers(self.ranks, [made.metrics], [])[0]

        return (
            in_weights(parameters)
            or in_tensors(batch)
            or find_offending_sequence(
                backward_alone, range(batch.sequences), parameters, self.clear
            )
        )

    def bad_weight(self) -> str | None:
        """The first weight that learns and is not finite."""
        return bad_weight(
            [p for optimizer in self.optimizers.values() for p in optimizer.parameters]
        )

    def refresh_reference(self, rate: float = 1.0) -> None:
        """Copy the policy to the reference, or bring it nearer by this share."""
        assert self.reference is not None
        self.reference.refresh(self.policy, rate)

    def weights(self) -> dict[str, Tensor]:
        """The weights that learn, by the model's names, for engines to sample with."""
        named = self.policy.model.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}

    def save(self, folder: Path) -> None:
        """Write what a checkpoint holds besides the policy; with several ranks, this one's part."""
        save_learned(folder, self.optimizers, self.modules, self.reference, self.ranks)

    def clear(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers.values():
            optimizer.clear()

    def _prepared(
        self, algorithm: Algorithm, batch: TrainBatch[Batch], moved: bool
    ) -> TrainBatch[Batch]:
        """The batch with what its terms read of all of it, under the current policy."""
        if not algorithm.whole_batch:
            return batch
        now, entropy = batch.actions.rollouts, algorithm.reads_entropy
        if moved:
            now = self.score(now, old=True, reference=False, others=False, entropy=entropy)
        assert now.old_log_prob_N is not None
        return whole_batch(algorithm, batch, now.old_log_prob_N, now.old_entropy_N)

    def _score(
        self,
        batch: Batch,
        old: bool,
        reference: bool,
        others: bool,
        entropy: bool,
        squares: bool,
        teacher: bool,
        tokens: int,
    ) -> Batch:
        head = self.value_head if others else None
        found: list[dict[str, Tensor]] = []
        micros, own = self.passes(batch, tokens)
        for micro in micros:
            made: dict[str, Tensor] = {}
            if old or entropy or squares or head is not None:
                scores = self.policy.scores(
                    micro.packed,
                    self.temperature,
                    entropy=entropy,
                    squares=squares,
                    value_head=head,
                )
                if old:
                    made["old_log_prob_N"] = scores.log_prob_N
                if scores.entropy_N is not None:
                    made["old_entropy_N"] = scores.entropy_N
                if scores.squares_N is not None:
                    made["old_squares_N"] = scores.squares_N
                if scores.value_N is not None:
                    made["value_N"] = scores.value_N
            if others and self.critic is not None:
                made["value_N"] = self.critic.values(micro.packed)
            if reference and self.reference is not None:
                made["reference_log_prob_N"] = self.reference.log_probs(
                    micro.packed, self.temperature
                )
            if teacher and self.teachers:
                made["teacher_log_prob_N"] = self._taught(micro.taught or micro)
            found.append(made)
        whole: dict[str, Any] = _end_to_end(self.ranks, found[:own], batch.target_N.device)
        return replace(batch, **whole)

    def _taught(self, read: Batch) -> Float[Tensor, " N"]:
        """Each sequence's log-probabilities of its own teacher. All teachers compute, as sharded
        ones do on all ranks at once."""
        if len(self.teachers) == 1:
            return self.teachers[0].log_probs(read.packed, self.temperature)
        found_N = read.engine_log_prob_N
        for at, one in enumerate(self.teachers):
            own = [place for place, its in enumerate(read.teachers) if its == at]
            if not own and self.ranks.count == 1:
                continue
            part = read.select(own or [0])
            log_prob_K = one.log_probs(part.packed, self.temperature)
            index_K = read.action_index(own)
            found_N = found_N.to(log_prob_K).index_copy(0, index_K, log_prob_K[: len(index_K)])
        return found_N


@dataclass(frozen=True, eq=False)
class LossSums:
    """`Losses` of this rank, which the host has not read; the tokens are those of all ranks."""

    metrics: Mapping[str, Tensor]
    tokens: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Losses:
    """The metrics of a batch's loss, and the values of its tokens (see `Loss`)."""

    metrics: Mapping[str, float]
    tokens: Mapping[str, Tensor]


def backward(
    learner: Learner,
    algorithm: Algorithm,
    batch: TrainBatch[Batch],
    beta: float,
    tokens: int,
    *,
    gradient: bool = True,
) -> LossSums:
    """The losses of a batch, `tokens` at a time, whose gradient is added to the parameters'."""
    micros, own = learner.passes(batch, tokens)
    parts = []
    for number, micro in enumerate(micros):
        with torch.set_grad_enabled(gradient):
            part = loss(algorithm, micro, learner.scores(algorithm, micro.actions), beta)
        if gradient:
            total = part.total if number < own else part.total * 0
            total.backward()  # type: ignore[no-untyped-call]
            part = replace(part, total=total.detach())
        parts.append(part)
    return _joined(learner, parts[:own], batch)


def _joined(learner: Learner, parts: Sequence[Loss], batch: TrainBatch[Batch]) -> LossSums:
    """Metrics summed, values of tokens end to end over the ranks."""
    sums: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.metrics.items():
            sums[name] = sums[name] + value if name in sums else value
    device = batch.actions.target_N.device
    tokens = _end_to_end(learner.ranks, [dict(part.tokens) for part in parts], device)
    return LossSums(sums, tokens)


def _numbers(
    ranks: Ranks, sums: Sequence[Mapping[str, Tensor]], norms: Sequence[Tensor]
) -> tuple[dict[str, float], list[float]]:
    """The metrics, summed over parts of a batch and over the ranks, and the norms: one transfer."""
    flat = [value for part in sums for value in part.values()]
    found = read([*flat, *norms]) if flat or norms else []
    left = iter(found)
    own = [{name: next(left) for name in part} for part in sums]
    metrics: dict[str, float] = {}
    for parts in zip(*ranks.gather(own), strict=True):
        whole: dict[str, float] = {}
        for part in parts:
            for name, number in part.items():
                whole[name] = whole.get(name, 0.0) + number
        metrics = {n: metrics[n] + v if n in metrics else v for n, v in whole.items()}
    return metrics, list(left)


def _end_to_end(
    ranks: Ranks, parts: Sequence[Mapping[str, Tensor]], device: torch.device
) -> dict[str, Tensor]:
    """The values of the tokens of all ranks, in order."""
    names = parts[0] if parts else ()
    own = {name: torch.cat([part[name] for part in parts]) for name in names}
    if ranks.count == 1:
        return own
    every = [found for found in ranks.gather({n: v.cpu() for n, v in own.items()}) if found]
    joined = every[0] if every else ()
    return {name: torch.cat([found[name] for found in every]).to(device) for name in joined}


def by_gradient(
    algorithm: Algorithm, batch: TrainBatch[Batch], beta: float
) -> tuple[list[int], list[int]]:
    """The sequences that the loss has a gradient on, and the others.

    A sequence whose advantages are all 0 has none, unless the loss has another term than the
    surrogate. At least one sequence is among the first, so that each parameter has a gradient.
    """
    other_terms = algorithm.value is not None or algorithm.bonus > 0
    other_terms |= algorithm.loss_divergence is not None and beta != 0
    other_terms |= algorithm.loss_distillation is not None
    other_terms |= any(term.active for term in algorithm.auxiliary)
    if other_terms or not algorithm.surrogate.reads_advantage:
        return list(range(batch.sequences)), []
    changes_N = (batch.advantage_N != 0).to(torch.float32)
    moves: list[bool] = (segments.segment_sum(changes_N, batch.actions.lengths_S) > 0).tolist()
    if not any(moves):
        moves[0] = True
    chosen, others = ([i for i, m in enumerate(moves) if m is want] for want in (True, False))
    return chosen, others
