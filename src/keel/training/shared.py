"""A stage's learner and engine on several processes (`cluster.processes`).

Rank 0 runs the loop. The models that learn are sharded over all ranks, and each rank trains on some
of the sequences. With the native engine each samples some too, for which it has the policy whole as
well; another engine samples for rank 0. Rank 0's whole policy is the run's, which checkpoints hold,
so that a run resumes on any number of processes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keel.cluster import group as started
from keel.cluster import launched
from keel.cluster.group import RankGroup
from keel.config.schema import Recipe, RLStage
from keel.learn.learner import Learner
from keel.learn.ranks import Ranks, prompt_units
from keel.learn.token_budget import TokenBudget
from keel.models.policy import Policy, load_policy
from keel.models.sharded import wholes
from keel.training.group_learner import GroupLearner
from keel.training.setup import build_learner, rollout_engine
from keel.types import Engine, Group, Prompt, Sampling


@dataclass(frozen=True, eq=False)
class Member:
    """What a rank has: the sharded learner; the native engine where that is to sample, and the
    policy whole, to sample with (rank 0 always, others only where they sample)."""

    policy: Policy | None
    learner: Learner
    engine: Engine | None


@dataclass(frozen=True, eq=False)
class SharedLearner(GroupLearner):
    """A learner whose work all ranks do; its policy is rank 0's, copied to ranks that sample."""

    def weights(self) -> dict[str, Tensor]:
        """The whole policy's weights, which are now those of the learner on every rank."""
        found: dict[str, Tensor] = self.group.call(_take_over)
        return found


@dataclass(eq=False)
class SharedEngine:
    """Samples some of the prompts on each rank; see `keel.types.Engine`."""

    group: RankGroup[Member]
    weight_version: int = 0

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int
    ) -> list[Group]:
        bare = [replace(prompt, columns={}) for prompt in prompts]  # rewards are called on rank 0
        found: list[Group] = self.group.call(_sample, bare, n, sampling, seed)
        version = self.weight_version
        return [
            Group(prompt, tuple(replace(c, weight_version=version) for c in group.completions))
            for prompt, group in zip(prompts, found, strict=True)
        ]

    def sync(self, weights: Mapping[str, Any]) -> None:
        """Count it; `SharedLearner.weights` has brought them to every rank."""
        self.weight_version += 1


@contextmanager
def shared_learner(
    recipe: Recipe,
    stage: RLStage,
    policy: Policy,
    seed: int,
    budget: TokenBudget,
    resume_from: Path | None,
) -> Iterator[tuple[SharedLearner, SharedEngine | None]]:
    """The learner and the engine of a stage on `cluster.processes` ranks, while the block runs.

    Another engine than the native one is none of theirs: it samples for rank 0 alone. Raises
    KeelError where a rank fails to start.
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
        more = (each, policy.device.type, recipe.cluster.deadline)
        with ranks.start(count, own, others, *more) as group:
            learner = group.member.learner
            kinds = (learner.has_reference, learner.learns_values)
            engine = None if group.member.engine is None else SharedEngine(group)
            yield SharedLearner(group, policy, budget, *kinds), engine
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
    native = stage.rollout.engine == "native"
    whole = policy if native or ranks.number == 0 else None
    learner = build_learner(
        stage,
        recipe.model,
        policy if whole is None else copy.deepcopy(policy),
        seed,
        TokenBudget(tokens),
        resume_from,
        ranks,
        recipe.cluster.offload == "cpu",
    )
    engine = rollout_engine(policy, stage.rollout, model=policy.model) if native else None
    return Member(whole, learner, engine)


@torch.no_grad()
def _take_over(member: Member) -> dict[str, Tensor]:
    own = {} if member.policy is None else dict(member.policy.model.named_parameters())
    for name, weight in wholes(member.learner.weights()):
        if own:
            own[name].copy_(weight)
    return {name: weight for name, weight in own.items() if weight.requires_grad}


def _sample(
    member: Member, prompts: list[Prompt], n: int, sampling: Sampling, seed: int
) -> list[Group]:
    ranks = member.learner.ranks
    places = prompt_units(prompts, sampling.max_tokens, ranks.count)[ranks.number]
    assert member.engine is not None
    groups = member.engine.sample([prompts[at] for at in places], n, sampling, seed)
    found = dict(
        pair for part in ranks.gather(list(zip(places, groups, strict=True))) for pair in part
    )
    return [found[at] for at in range(len(prompts))]
