"""One batch, sampled as the first step would sample it, within seconds, and how its answers end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from keel.analysis.statistics import wilson_interval
from keel.engines.registry import evaluating
from keel.models.families import context_length
from keel.models.policy import Policy
from keel.preflight.context import (
    BudgetShare,
    Finding,
    PromptStats,
    SamplingPlan,
    StageContext,
    found,
    holding,
    interval,
    percent,
    quantile,
    surely_more,
)
from keel.rewards.scorer import Scorer
from keel.training.rollout import Sampler
from keel.training.setup import build_sampler, rollout_engine
from keel.types import Capabilities, Group, Prompt

GROUPS = 8
"""The fewest prompts: a share of eight groups shows whether it is most of them."""
MEMBERS = 4
"""The fewest completions of each, if the recipe samples more."""
LONGER = 4
"""How many times the budget cut completions are sampled on, to see where they end."""
SHORTEST = 32
"""The fewest tokens, however large the model."""
WORK: Final = {"cpu": 2e12, "mps": 2e12, "cuda": 2e15}
"""Parameters times tokens that a batch may take: at most half a minute on a laptop."""
LONGEST: Final = {"cpu": 5e10, "mps": 5e10, "cuda": 1e13}
"""Parameters times steps of its decoding, each of which reads all weights."""
STEPS = 4_000
"""Steps of decoding: each takes some milliseconds, however small the model."""
TRIED = 64
"""Tokens of answers that only try the rewards out."""
SAMPLES = 32
"""Fewer completions do not show that something never happens: of 32, none shows it with a chance
of one in four if one in 23 would."""
CUT = 0.05
"""The budget should hold 95 %: surely more than this share is cut (the interval's lower end)."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a step is sampled. Fewer `tokens` than the budget cut completions early."""

    prompts: int
    members: int
    tokens: int


@dataclass(frozen=True, eq=False)
class TrialBatch:
    """Groups of the first step's prompts; in `longer` some that were cut are sampled on.

    `whole`: no completion was cut before the recipe's own budget. `engine`: what the engine that
    sampled them can do.
    """

    groups: Sequence[Group]
    longer: Sequence[Group]
    size: Size
    budget: int
    engine: Capabilities

    @property
    def whole(self) -> bool:
        return self.size.tokens >= self.budget

    @property
    def completions(self) -> int:
        return sum(len(group.completions) for group in self.groups)


def longest_of(parameters: int, device: str) -> int:
    """How many steps of decoding with this number of parameters take seconds."""
    return max(SHORTEST, min(STEPS, int(LONGEST[device] / parameters)))


def size_for(prompts: int, members: int, budget: int, parameters: int, device: str) -> Size:
    """As much of a step as takes seconds: all, or fewer prompts, then fewer answers to each, then
    shorter ones. A function of its arguments, so that a recipe always gives the same report.
    """
    tokens = WORK[device] / parameters
    length = min(budget, longest_of(parameters, device))
    fits = max(1, int(tokens / length))
    if prompts * members > fits:
        prompts = min(prompts, max(GROUPS, fits // members))
    if prompts * members > fits:
        members = min(members, max(MEMBERS, fits // prompts))
    if prompts * members * length > tokens:
        length = min(length, max(SHORTEST, int(tokens / (prompts * members))))
    return Size(prompts, members, length)


def sample(
    policy: Policy, plan: SamplingPlan, stats: PromptStats, scorer: Scorer, *, trial: bool
) -> TrialBatch:
    """Completions of the first prompts, the same as those of a run's first step.

    A `trial` is of a policy that an earlier stage will train: a few short ones, to try the rewards.
    """
    rollout, load = plan.sampling.rollout, load_of(policy)
    prompts = min(GROUPS, len(stats.first)) if trial else len(stats.first)
    budget = min(TRIED, rollout.max_tokens) if trial else rollout.max_tokens
    size = size_for(prompts, rollout.group_size, budget, *load)
    engine = rollout_engine(policy, evaluating(rollout), model=policy.model)
    sampler = build_sampler(engine, stats.source, scorer, rollout, plan.seed)
    sampling = replace(sampler.sampling, max_tokens=size.tokens)
    groups = sampler.sample(stats.first[: size.prompts], size.members, sampling, plan.first_seed)
    longer: Sequence[Group] = groups
    if not trial and size.tokens == rollout.max_tokens:
        longest = min(size.tokens * LONGER, longest_of(*load))
        context = context_length(policy.model)
        longer = _sampled_on(sampler, groups, size, plan.first_seed, longest, context)
    return TrialBatch(groups, longer, size, rollout.max_tokens, sampler.engine.capabilities)


def load_of(policy: Policy) -> tuple[int, str]:
    """What decoding with the policy costs: its parameters, and where they are."""
    return sum(p.numel() for p in policy.model.parameters()), policy.device.type


def _sampled_on(
    sampler: Sampler,
    groups: Sequence[Group],
    size: Size,
    seed: int,
    longest: int,
    context: int | None,
) -> list[Group]:
    """The groups; those with most cut completions sampled with a budget of `longest`.

    They are `size.prompts / LONGER` prompts, so that it costs about as much as the batch did. A
    completion depends on its prompt, place and seed, so that it begins as it did before.
    """
    cut = {
        at: sum(c.finish == "length" for c in group.completions) for at, group in enumerate(groups)
    }
    chosen = sorted((at for at in cut if cut[at]), key=lambda at: -cut[at])
    chosen = sorted(chosen[: math.ceil(len(groups) / LONGER)])
    prompts: list[Prompt] = [groups[at].prompt for at in chosen]
    if context is not None and prompts:
        longest = min([longest, *(context - len(p.tokens) for p in prompts)])
    # Each occurrence of an id has its own random stream, so that repeated ids do not line up.
    repeated = len({group.prompt.id for group in groups}) < len(groups)
    if not prompts or longest <= size.tokens or repeated:
        return list(groups)
    sampling = replace(sampler.sampling, max_tokens=longest)
    longer = dict(zip(chosen, sampler.sample(prompts, size.members, sampling, seed), strict=True))
    return [longer.get(at, group) for at, group in enumerate(groups)]


# ---------------------------------------------------------------- how completions end


def check_ends(context: StageContext, plan: SamplingPlan, batch: TrialBatch) -> None:
    """Figures and findings of how the batch's completions end."""
    size, n = batch.size, batch.completions
    context.figures |= {"sampled prompts": size.prompts, "sampled completions": n}
    if context.trained_by is not None:
        context.skipped_checks.append(
            f"how completions end and what they earn: stage {context.trained_by!r} is yet to train "
            "the policy"
        )
        return
    if not batch.whole:
        context.skipped_checks.append(
            f"completions beyond {size.tokens} tokens (of a budget of {batch.budget}): this model "
            "would take minutes here"
        )
    sampled = [c for group in batch.groups for c in group.completions]
    cut = sum(c.finish == "length" for c in sampled)
    longer = [c for group in batch.longer for c in group.completions]
    held = holding([len(c) for c in longer], [c.finish != "length" for c in longer])
    context.figures |= {
        "completion tokens (median)": quantile([len(c) for c in sampled], 0.5),
        "cut at the budget": f"{cut} of {n}",
        "a budget for 95 %": str(held),
    }
    if context.recipe.model.build is None and batch.whole:  # a built model's weights are random
        context.add(truncated(cut, n, batch.budget, held, plan.setting("max_tokens")))


def truncated(cut: int, n: int, budget: int, held: BudgetShare, key: str) -> Finding | None:
    """Completions cut at the budget, or not one that ends; `held` is the budget that holds 95 %."""
    raised = f"raise it to {held.tokens}"
    if n >= SAMPLES and cut == n:
        low = percent(wilson_interval(0, n).high)
        end = f"some end by {held.tokens}" if held.known else f"nor do they within {held.tokens}"
        fix = (
            "raise it, or name what ends an answer (stop, stop_ids), or begin with an sft stage "
            "that teaches the end"
        )
        if held.known:
            fix = raised
        return found("eos-never", key, n=n, budget=budget, low=low, end=end, fix=fix)
    if not surely_more(cut, n, CUT):
        return None
    return found(
        "truncated", key, share=percent(cut / n), cut=cut, n=n, interval=interval(cut, n),
        budget=budget, held=held, fix=raised if held.known else f"{raised} or more",
    )  # fmt: skip
