"""What a batch's rewards show: they refuse right answers, never vary, or are never earned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keel.analysis.statistics import wilson_interval
from keel.data.tasks.build import UserTask
from keel.preflight.batch import SAMPLES, TrialBatch
from keel.preflight.context import PromptStats, SamplingPlan, StageContext
from keel.preflight.finding import Finding, interval, percent, surely_more
from keel.preflight.gold_answers import (
    OTHER_COLUMN,
    RIGHT,
    Gold,
    Rated,
    gold_over_budget,
    gold_refused,
    gold_unwritable,
    own_reward_fix,
    threshold_unreached,
)
from keel.rewards.registry import TASK, NamedReward
from keel.training.rollout import all_alike
from keel.types import RewardResult

FLAT = 0.6
"""A third to a half of equal groups is common in good runs (all right, or all wrong): only if
surely more than this share is equal does a step mostly sample in vain. Eight groups of eight, or 28
of 32, are so sure."""


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """What a stage's first step samples, its rewards, and what they give to the gold answers.

    `results` are empty if no reward was called; `judging` is the reward that evaluation counts
    right answers by; `partial`: some rewards could not be called.
    """

    plan: SamplingPlan
    stats: PromptStats
    batch: TrialBatch
    results: Sequence[Sequence[RewardResult]]
    gold: Gold | None
    rewards: Sequence[Rated]
    judging: NamedReward | None
    partial: bool

    def values(self, name: str) -> list[float]:
        """The values that a reward gave to the samples."""
        every = (v.components.get(name) for judged in self.results for v in judged)
        return [value for value in every if value is not None]

    def gold_values(self, name: str) -> list[float]:
        """The best values that a reward gave to the gold answers it can judge."""
        best = () if self.gold is None else self.gold.best.get(name, ())
        return [value for value in best if value is not None]


def check_gold(context: StageContext, scored: ScoredBatch) -> None:
    """What the gold answers show of the tokenizer, the budget and the rewards."""
    plan, stats, gold = scored.plan, scored.stats, scored.gold
    if gold is None:
        return
    n = len(gold.known) + len(gold.unwritable)
    context.figures["gold answers"] = n
    budget_key = plan.setting("max_tokens")
    context.add(
        gold_unwritable(gold.unwritable, n, "model.build.alphabet"),
        gold_over_budget(gold.lengths, plan.sampling.rollout.max_tokens, budget_key),
    )
    users = any(isinstance(task, UserTask) for task in stats.source.tasks.values())
    refused, texts = False, [text for _, text in gold.known]
    for reward, function in scored.rewards:
        name = function.name
        values = scored.gold_values(name)
        if not values:
            continue
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            context.figures[f"gold answers, {name}"] = round(float(np.mean(finite)), 3)
        full = reward.function in RIGHT and not (reward.function == TASK and users)
        own = ":" in reward.function
        task = f"{plan.key}{stats.task_key(gold.known[0][0])}"
        finding = gold_refused(
            name, texts, gold.best[name], 1.0 if full else 1e-9, scored.values(name),
            f"{plan.key}rewards.functions" if own else f"{task}.answer", gold.wrong.get(name, ()),
            own_reward_fix(stats.conversations, task) if own else OTHER_COLUMN,
        )  # fmt: skip
        refused |= finding is not None
        context.add(finding)
    evaluation = plan.sampling.evaluation
    if refused or evaluation is None or not evaluation.prompts or scored.judging is None:
        return
    name, key = scored.judging.name, f"{plan.key}evaluation.threshold"
    threshold = evaluation.threshold
    context.add(
        threshold_unreached(name, scored.gold_values(name), scored.values(name), threshold, key)
    )


def check_sampled_rewards(context: StageContext, scored: ScoredBatch) -> None:
    """What the batch's rewards show, as far as policy and rewards are those of the stage."""
    plan, batch = scored.plan, scored.batch
    key, rollout = f"{plan.key}rewards.functions", plan.sampling.rollout
    for _, function in scored.rewards:
        values = scored.values(function.name)
        if values:
            context.figures[f"reward {function.name} (mean)"] = round(float(np.mean(values)), 4)
    algorithm = plan.sampling.algorithm
    if algorithm is not None and not algorithm.needs_reward:
        return
    totals = [value for judged in scored.results for value in _rewards_of(judged)]
    if not totals and not scored.partial:
        context.add(reward_none(batch.completions, key))
    if not totals or not batch.whole:
        return
    never = [
        reward_zero(f.name, scored.values(f.name), scored.gold_values(f.name), key)
        for _, f in scored.rewards
        if f.source.weight
    ]
    context.add(*never)
    if scored.partial:
        return
    if not any(never):
        texts = {c.text for group in batch.groups for c in group.completions}
        constant = reward_constant(totals, len(texts), *_flattened(scored, key))
        never.append(constant)
        context.add(constant)
    if any(never) or any(one.kind == "gold-refused" for one in context.findings):
        return
    dynamic = rollout.dynamic_sampling
    of_steps = algorithm is not None and algorithm.needs_steps
    flat = sum(all_alike(one, of_steps) if dynamic else _flat(one) for one in scored.results)
    groups = len(scored.results)
    context.figures["groups with equal rewards"] = f"{flat} of {groups} ({interval(flat, groups)})"
    if context.stage.compares or dynamic:
        refills = rollout.max_refills if dynamic else None
        size_key = plan.setting("group_size")
        context.add(zero_variance(flat, groups, batch.size.members, refills, size_key))


def _flattened(scored: ScoredBatch, key: str) -> tuple[str, str | None]:
    """The key of a gate or a clip that makes all rewards equal, and what it does."""
    weighed = [function for _, function in scored.rewards if function.source.weight]
    for at, (_, function) in enumerate(scored.rewards):
        values = scored.values(function.name)
        gate, clip = function.source.gate_below, function.source.clip
        if gate is not None and values and max(values) < gate:
            return f"{key}.{at}.gate_below", f"the gate {function.name!r} is shut for each of them"
        if clip is not None and len(weighed) == 1 and function.source.weight and values:
            cut = {min(max(value, clip[0]), clip[1]) for value in values}
            if len(cut) == 1 and len(set(values)) > 1:
                return f"{key}.{at}.clip", f"clip makes {next(iter(cut)):g} of every value"
    return key, None


def _rewards_of(judged: Sequence[RewardResult]) -> list[float]:
    """What a group's advantages are made of: rewards of steps, if there are any."""
    steps = [step.reward for result in judged for step in result.steps]
    return steps or [v.reward for v in judged if v.reward is not None]


def _flat(judged: Sequence[RewardResult]) -> bool:
    return len(set(_rewards_of(judged))) <= 1


# ---------------------------------------------------------------- findings


def reward_zero(
    name: str, values: Sequence[float], gold: Sequence[float], key: str
) -> Finding | None:
    """A reward that no sample earns, though gold answers do.

    A warning: so few samples cannot tell never from seldom, and seldom is enough to learn from.
    """
    if len(values) < SAMPLES or any(values) or max(gold, default=0) <= 0:
        return None
    high = percent(wilson_interval(0, len(values)).high)
    return Finding(
        "reward-zero",
        f"no sample earns the reward {name!r}, though the gold answer does",
        f"0 for each of {len(values)} completions (95 %: at most {high} earn it); the gold answers "
        f"get {sum(gold) / len(gold):.2g} on average",
        key,
        "begin with an sft stage or a better model, give easier prompts, ask for the shape that "
        "the reward reads, or add a reward for part of the way",
    )


def reward_none(n: int, key: str) -> Finding | None:
    """Not one of `n` completions gets a reward."""
    if n < SAMPLES:
        return None
    return Finding(
        "reward-none",
        "no sample gets a reward, so nothing can be learned",
        f"None for each of {n} completions",
        key,
        "return a number if the reward applies, or give prompts that it applies to",
        "error",
    )


def reward_constant(
    totals: Sequence[float], texts: int, key: str, why: str | None = None
) -> Finding | None:
    """The same reward for every sample, of which `texts` differ from each other.

    `why` describes the gate or the clip that makes them so, whose key `key` then is.
    """
    if len(totals) < SAMPLES or max(totals) > min(totals):
        return None
    what = "the reward never varies, so nothing can be learned from it"
    evidence = (
        f"{totals[0]:g} for each of {len(totals)} completions, {texts} different ones among them"
    )
    fix = "use a reward that differs between answers, or harder prompts"
    if why is not None:
        evidence = f"{evidence}; {why}"
        fix = "set it to what some of the answers reach, or leave it out"
    elif texts == 1:
        what = "every sample is the same, and so is its reward"
        key = key.rpartition("rewards")[0] + "rollout.temperature"
        fix = "raise it, or give different prompts"
    return Finding("reward-constant", what, evidence, key, fix, "error")


def zero_variance(
    flat: int, groups: int, members: int, refills: int | None, key: str
) -> Finding | None:
    """Groups in which all completions have the same reward; `refills` if these are replaced."""
    if members < 2 or not surely_more(flat, groups, FLAT):
        return None
    evidence = f"{flat} of {groups} groups of {members} ({interval(flat, groups)})"
    if refills is not None:
        rounds = groups / (groups - flat) if flat < groups else None
        wanted = (
            "no number of refills fills" if rounds is None else f"about {rounds:.0f} rounds fill"
        )
        evidence += f"; dynamic sampling replaces them: {wanted} a step, {refills + 1} are made"
    return Finding(
        "zero-variance",
        f"{percent(flat / groups)} of the groups have equal rewards, and teach nothing",
        evidence,
        key,
        "raise it, or the temperature too, mix in prompts of another difficulty, or add a reward "
        "that differs between answers",
    )
