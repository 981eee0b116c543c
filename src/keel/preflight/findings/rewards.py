"""What a batch's rewards and the gold answers give away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keel.analysis.statistics import wilson_interval
from keel.config.schema import Stage
from keel.config.sources import RewardSource
from keel.data.tasks.user import UserTask
from keel.preflight.context import StageContext
from keel.preflight.finding import Finding
from keel.preflight.findings import samples as sample_findings
from keel.preflight.gold_answers import RIGHT, Gold
from keel.preflight.prompt_stats import PromptStats, SamplingPlan
from keel.preflight.trial_batch import TrialBatch
from keel.rewards.registry import TASK, NamedReward
from keel.training.rollout import all_alike
from keel.types import Verdict


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """A batch, what its rewards said, and what they say of the gold answers.

    `verdicts` are empty where nothing was asked; `judging` is the reward that evaluation counts
    right answers by; `partial`: some rewards could not be asked.
    """

    batch: TrialBatch
    verdicts: Sequence[Sequence[Verdict]]
    gold: Gold | None
    pairs: Sequence[tuple[RewardSource, NamedReward]]
    judging: NamedReward | None
    partial: bool

    def values(self, name: str) -> list[float]:
        """What a reward said of the samples."""
        every = (v.components.get(name) for judged in self.verdicts for v in judged)
        return [value for value in every if value is not None]

    @property
    def totals(self) -> list[float]:
        return [value for judged in self.verdicts for value in _rewards_of(judged)]

    @property
    def weighed(self) -> list[NamedReward]:
        """The rewards that are learned from."""
        return [function for _, function in self.pairs if function.weight]


def check_gold(
    seen: StageContext, plan: SamplingPlan, judged: ScoredBatch, source: PromptStats
) -> None:
    """What the gold answers say: of the tokenizer, of the budget, of the rewards."""
    gold = judged.gold
    if gold is None:
        return
    n = len(gold.texts) + len(gold.unwritable)
    seen.figures["gold answers"] = n
    key = plan.setting("max_tokens")
    alphabet = "model.build.alphabet"
    seen.add(
        sample_findings.gold_unwritable(gold.unwritable, n, alphabet),
        sample_findings.gold_over_budget(gold.lengths, plan.rollout.max_tokens, key),
    )
    users = any(isinstance(task, UserTask) for task in source.tasks.values())
    for reward, function in judged.pairs:
        best = gold.best.get(function.name, ())
        told = [value for value in best if value is not None]
        if not told:
            continue
        full = reward.function in RIGHT and not (reward.function == TASK and users)
        spoken = [value for value in told if math.isfinite(value)]
        if spoken:
            seen.figures[f"gold answers, {function.name}"] = round(float(np.mean(spoken)), 3)
        own = ":" in reward.function
        first = list(source.tasks).index(gold.prompts[0].task)
        seen.add(
            sample_findings.gold_refused(
                function.name, gold.texts, best, 1.0 if full else 1e-9,
                judged.values(function.name),
                f"{plan.key}rewards.functions" if own else f"{plan.key}tasks.{first}.answer",
                gold.wrong.get(function.name, ()),
                sample_findings.mend_refused(own, source.conversations, f"{plan.key}tasks.{first}"),
            )
        )  # fmt: skip
    if not any(one.kind == "gold-refused" for one in seen.findings):
        seen.add(_threshold(plan, judged, gold))


def check_sampled_rewards(
    seen: StageContext, stage: Stage, plan: SamplingPlan, judged: ScoredBatch
) -> None:
    """What the batch's rewards say, as far as policy and rewards are those of the stage."""
    batch, verdicts, gold = judged.batch, judged.verdicts, judged.gold
    for _, function in judged.pairs:
        values = judged.values(function.name)
        if values:
            seen.figures[f"reward {function.name} (mean)"] = round(float(np.mean(values)), 4)
    key = f"{plan.key}rewards.functions"
    totals = judged.totals
    if not totals and not judged.partial:
        seen.add(sample_findings.reward_none(batch.completions, key))
    if not totals or not batch.whole:
        return
    before = len(seen.findings)
    for _, function in judged.pairs:
        best = () if gold is None or not function.weight else gold.best.get(function.name, ())
        seen.add(
            sample_findings.reward_zero(function.name, judged.values(function.name), best, key)
        )
    if judged.partial:
        return
    texts = {c.text for group in batch.groups for c in group.completions}
    if len(seen.findings) == before:
        seen.add(
            sample_findings.reward_constant(totals, len(texts), *_flattened(judged, plan, key))
        )
    if len(seen.findings) > before or any(f.kind == "gold-refused" for f in seen.findings):
        return
    algorithm = plan.sampling.algorithm
    of_groups = stage.compares
    of_steps = algorithm is not None and algorithm.needs_steps
    dynamic = plan.rollout.dynamic_sampling
    flat = sum(all_alike(one, of_steps) if dynamic else _flat(one) for one in verdicts)
    seen.figures["groups with equal rewards"] = _share(flat, len(verdicts))
    if of_groups or dynamic:
        refills = plan.rollout.max_refills if dynamic else None
        size = plan.setting("group_size")
        seen.add(
            sample_findings.zero_variance(flat, len(verdicts), batch.size.members, refills, size)
        )


# ---------------------------------------------------------------- details


def _threshold(plan: SamplingPlan, judged: ScoredBatch, gold: Gold) -> Finding | None:
    """Gold answers that no evaluation counts as right."""
    evaluation = plan.sampling.evaluation
    if evaluation is None or not evaluation.prompts or judged.judging is None:
        return None
    name = judged.judging.name
    best = [value for value in gold.best.get(name, ()) if value is not None]
    key = f"{plan.key}evaluation.threshold"
    return sample_findings.threshold_unreached(
        name, best, judged.values(name), evaluation.threshold, key
    )


def _flattened(judged: ScoredBatch, plan: SamplingPlan, key: str) -> tuple[str, str | None]:
    """What makes one reward of all of them, a gate or a clip: its key, and what it does."""
    for at, (_, function) in enumerate(judged.pairs):
        values = judged.values(function.name)
        gate, clip = function.gate_below, function.clip
        if gate is not None and values and max(values) < gate:
            return f"{key}.{at}.gate_below", f"the gate {function.name!r} is shut for each of them"
        if clip is not None and len(judged.weighed) == 1 and function.weight and values:
            cut = {min(max(value, clip[0]), clip[1]) for value in values}
            if len(cut) == 1 and len(set(values)) > 1:
                return f"{key}.{at}.clip", f"clip makes {next(iter(cut)):g} of every value"
    return key, None


def _rewards_of(judged: Sequence[Verdict]) -> list[float]:
    """What a group's advantages are made of: rewards of steps, where there are any."""
    steps = [step.reward for verdict in judged for step in verdict.steps]
    return steps or [v.reward for v in judged if v.reward is not None]


def _flat(judged: Sequence[Verdict]) -> bool:
    rewards = _rewards_of(judged)
    return not rewards or max(rewards) == min(rewards)


def _share(part: int, whole: int) -> str:
    share = wilson_interval(part, whole)
    return f"{part} of {whole} (95 % interval {share.low:.0%} to {share.high:.0%})"
