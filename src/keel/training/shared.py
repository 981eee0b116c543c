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
from keel.cluster.placement import offers
from keel.config.rl import RolloutStage
from keel.config.schema import Recipe
from keel.engines.registry import capabilities_of
from keel.learn.learner import Learner
from keel.learn.ranks import Ranks, prompt_units
from keel.learn.token_budget import TokenBudget
from keel.models.policy import Policy, load_policy
from keel.models.sharded import wholes
from keel.training.group_learner import GroupLearner
from keel.training.setup import build_learner, rollout_engine
from keel.types import Capabilities, Engine, Group, OnGroup, Prompt, Sampling


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


class SharedEngine(Engine):
    """Samples some of the prompts on each rank; see `keel.types.Engine`.

    Groups that this rank samples are handed over as they are done, the others at the end.
    """

    def __init__(self, group: RankGroup[Member], capabilities: Capabilities) -> None:
        self.group, self.capabilities = group, capabilities

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        bare = [replace(prompt, columns={}) for prompt in prompts]  # rewards are called on rank 0
        handed: set[int] = set()

        def hand(place: int, group: Group) -> None:
            handed.add(place)
            if on_group is not None:
                on_group(place, Group(prompts[place], group.completions))

        found: list[Group] = self.group.call(_sample, bare, n, sampling, seed, on_group=hand)
        for place, group in enumerate(found):
            if place not in handed:
                hand(place, group)
        return [Group(p, g.completions) for p, g in zip(prompts, found, strict=True)]

    def sync(self, weights: Mapping[str, Any]) -> None:
        """Nothing: `SharedLearner.weights` has brought them to every rank."""


@contextmanager
def shared_learner(
    recipe: Recipe,
    stage: RolloutStage,
    policy: Policy,
    seed: int,
    budget: TokenBudget,
    resume_from: Path | None,
) -> Iterator[tuple[SharedLearner, SharedEngine | None]]:
    """The learner and the engine of a stage on `cluster.processes` ranks, while the block runs.

    Another engine than the native one is none of theirs: it samples for rank 0 alone. Raises
    KeelError if a rank fails to start.
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
            own = group.member.engine
            offered = None if own is None else offers(recipe.cluster, own.capabilities)
            engine = None if offered is None else SharedEngine(group, offered)
            yield SharedLearner(group, policy, budget, *kinds), engine
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------- on every rank


def _other_member(
    recipe: Recipe,
    stage: RolloutStage,
    seed: int,
    tokens: int,
    resume_from: Path | None,
    ranks: Ranks,
) -> Member:
    policy = load_policy(recipe.model, recipe.seed)
    return _member(recipe, stage, seed, tokens, resume_from, policy, ranks)


def _member(
    recipe: Recipe,
    stage: RolloutStage,
    seed: int,
    tokens: int,
    resume_from: Path | None,
    policy: Policy,
    ranks: Ranks,
) -> Member:
    for tensor in policy.state_dict().values():
        dist.broadcast(tensor.detach(), 0)  # the weights that the stage before has left
    each = capabilities_of(stage.rollout.engine).in_process
    whole = policy if each or ranks.number == 0 else None
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
    engine = rollout_engine(policy, stage.rollout, model=policy.model) if each else None
    return Member(whole, learner, engine)


@torch.no_grad()
def _take_over(member: Member) -> dict[str, Tensor]:
    own = {} if member.policy is None else dict(member.policy.model.named_parameters())
    for name, weight in wholes(member.learner.weights()):
        if own:
            own[name].copy_(weight)
    return {name: weight for name, weight in own.items() if weight.requires_grad}


def _sample(
    member: Member,
    prompts: list[Prompt],
    n: int,
    sampling: Sampling,
    seed: int,
    *,
    on_group: OnGroup | None = None,
) -> list[Group]:
    ranks = member.learner.ranks
    places = prompt_units(prompts, sampling.max_tokens, ranks.count)[ranks.number]

    def hand(at: int, group: Group) -> None:
        if on_group is not None:
            on_group(places[at], group)

    assert member.engine is not None
    own = [prompts[at] for at in places]
    groups = member.engine.sample(own, n, sampling, seed, on_group=hand)
    found = dict(
        pair for part in ranks.gather(list(zip(places, groups, strict=True))) for pair in part
    )
    return [found[at] for at in range(len(prompts))]
