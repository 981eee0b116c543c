"""A stage's learner and engine on several processes (`cluster.processes`).

Rank 0 runs the loop. The models that learn are sharded over all ranks, and each rank samples and
trains on some of the sequences. Each rank has the policy whole as well, to sample with; rank 0's is
the run's policy, which checkpoints hold, so that a run resumes on any number of processes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keel.algorithms.spec import Algorithm
from keel.cluster import group as started
from keel.cluster import launched
from keel.cluster.group import RankGroup
from keel.config.schema import Recipe, RLStage
from keel.engines.registry import build_engine
from keel.learn.batch import B, Batch, TrainBatch, to_device
from keel.learn.finite import Cause
from keel.learn.learner import Learner, Losses, Saved
from keel.learn.ranks import Ranks, spans
from keel.learn.token_budget import TokenBudget
from keel.models.policy import Policy, load_policy
from keel.models.sharded import wholes
from keel.training.setup import build_learner
from keel.types import Engine, Group, Prompt, Sampling

CPU = "cpu"
"""Where batches are on their way to other ranks."""


@dataclass(frozen=True, eq=False)
class Member:
    """What a rank has: the policy whole, which samples by `engine`, and the sharded learner."""

    policy: Policy
    learner: Learner
    engine: Engine

    def own(self, batch: B) -> B:
        """A batch on this rank's device."""
        return to_device(batch, self.policy.device)


@dataclass(frozen=True, eq=False)
class SharedLearner(Learner):
    """A learner whose work all ranks do; made of rank 0's own."""

    group: RankGroup[Member] | None = None

    def score(self, batch: Batch, *, old: bool, reference: bool, others: bool = True) -> Batch:
        found: Batch = self._call(_score, to_device(batch, CPU), old, reference, others)
        return found

    def update(
        self,
        algorithm: Algorithm,
        batch: TrainBatch[Batch],
        beta: float,
        rates: tuple[float | None, float],
    ) -> Losses:
        found: Losses = self._call(_update, algorithm, to_device(batch, CPU), beta, rates)
        return found

    def cause_of(self, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float) -> Cause:
        found: Cause = self._call(_cause_of, algorithm, to_device(batch, CPU), beta)
        return found

    def bad_weight(self) -> str | None:
        found: str | None = self._call(_bad_weight)
        return found

    def refresh_reference(self) -> None:
        self._call(_refresh_reference)

    def weights(self) -> dict[str, Tensor]:
        """The whole policy's weights, which are now those of the learner on every rank."""
        found: dict[str, Tensor] = self._call(_take_over)
        return found

    def saved(self) -> Saved:
        return Saved(self.policy, save_parts=partial(self._call, _save_parts))

    def _call(self, function: Any, *arguments: Any) -> Any:
        assert self.group is not None
        return self.group.call(function, *arguments)


@dataclass(frozen=True, eq=False)
class SharedEngine:
    """Samples some of the prompts on each rank; see `keel.types.Engine`."""

    group: RankGroup[Member]

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int
    ) -> list[Group]:
        found: list[Group] = self.group.call(_sample, list(prompts), n, sampling, seed)
        return found

    def sync(self, weights: Mapping[str, Any]) -> None:
        """`SharedLearner.weights` has brought them to every rank."""


@contextmanager
def shared_learner(
    recipe: Recipe,
    stage: RLStage,
    policy: Policy,
    seed: int,
    budget: TokenBudget,
    resume_from: Path | None,
) -> Iterator[tuple[SharedLearner, SharedEngine]]:
    """The learner and the engine of a stage on `cluster.processes` ranks, while the block runs.

    Raises KeelError where a rank fails to start.
    """
    parts = (recipe, stage, seed, budget.tokens, resume_from)
    own = partial(_member, *parts, policy)
    others = partial(_other_member, *parts)
    threads = torch.get_num_threads()
    count = recipe.cluster.processes
    each = threads if recipe.threads is not None else max(threads // count, 1)
    torch.set_num_threads(each)
    try:
        ranks = launched if dist.is_initialized() else started  # torchrun's, or our own
        with ranks.start(count, own, others, each, policy.device.type) as group:
            learner = group.member.learner
            values = {f.name: getattr(learner, f.name) for f in fields(Learner)}
            values |= {"budget": budget, "policy": policy}
            yield SharedLearner(**values, group=group), SharedEngine(group)
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------- on every rank


def _other_member(
    recipe: Recipe,
    stage: RLStage,
    seed: int,
    tokens: int,
    resume_from: Path | None,
    ranks: Ranks,
) -> Member:
    policy = load_policy(recipe.model, recipe.seed)
    return _member(recipe, stage, seed, tokens, resume_from, policy, ranks)


def _member(
    recipe: Recipe,
    stage: RLStage,
    seed: int,
    tokens: int,
    resume_from: Path | None,
    policy: Policy,
    ranks: Ranks,
) -> Member:
    for tensor in policy.state_dict().values():
        dist.broadcast(tensor.detach(), 0)  # the weights that the stage before has left
    learner = build_learner(
        stage,
        recipe.model,
        copy.deepcopy(policy),
        seed,
        TokenBudget(tokens),
        resume_from,
        ranks,
        recipe.cluster.offload == "cpu",
    )
    engine = build_engine(
        stage.rollout.engine,
        model=policy.model,
        tokenizer=policy.tokenizer,
        max_rows=stage.rollout.max_rows,
        autocast=policy.autocast,
        dtype=stage.rollout.dtype,
    )
    return Member(policy, learner, engine)


def _score(member: Member, batch: Batch, old: bool, reference: bool, others: bool) -> Batch:
    return member.learner.score(member.own(batch), old=old, reference=reference, others=others)


def _update(
    member: Member,
    algorithm: Algorithm,
    batch: TrainBatch[Batch],
    beta: float,
    rates: tuple[float | None, float],
) -> Losses:
    return member.learner.update(algorithm, member.own(batch), beta, rates)


def _cause_of(member: Member, algorithm: Algorithm, batch: TrainBatch[Batch], beta: float) -> Cause:
    return member.learner.cause_of(algorithm, member.own(batch), beta)


def _bad_weight(member: Member) -> str | None:
    return member.learner.bad_weight()


def _refresh_reference(member: Member) -> None:
    member.learner.refresh_reference()


@torch.no_grad()
def _take_over(member: Member) -> dict[str, Tensor]:
    own = dict(member.policy.model.named_parameters())
    for name, weight in wholes(member.learner.weights()):
        own[name].copy_(weight)
    return {name: weight for name, weight in own.items() if weight.requires_grad}


def _save_parts(member: Member, folder: Path) -> None:
    member.learner.save_parts(folder)


def _sample(
    member: Member, prompts: list[Prompt], n: int, sampling: Sampling, seed: int
) -> list[Group]:
    """All occurrences of a prompt on one rank, since random numbers depend on their order."""
    ranks = member.learner.ranks
    costs: Counter[str] = Counter()
    for prompt in prompts:
        costs[prompt.id] += len(prompt.tokens) + sampling.max_tokens
    ids = list(costs)
    own = {ids[at] for at in spans(list(costs.values()), ranks.count)[ranks.number]}
    places = [at for at, prompt in enumerate(prompts) if prompt.id in own]
    groups = member.engine.sample([prompts[at] for at in places], n, sampling, seed)
    found = dict(
        pair for part in ranks.gather(list(zip(places, groups, strict=True))) for pair in part
    )
    return [found[at] for at in range(len(prompts))]
