"""One step's rollouts: prompts, completions, verdicts; refilled where a row wants variance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from keel.algorithms.spec import Algorithm
from keel.config.sampling import Rollout as RolloutChoice
from keel.config.seeds import derive
from keel.data.tasks.mixture import PromptStream
from keel.engines.multi_turn import converse
from keel.learn.token_budget import oom_context
from keel.rewards.judge.reward import spending
from keel.rewards.scorer import Scored, Scorer
from keel.runs.watchdog import Hung, watching
from keel.types import (
    Engine,
    Group,
    OnGroup,
    Prompt,
    Sampling,
    StreamingEngine,
    Task,
    Verdict,
)

Judged = tuple[Verdict, ...]


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Groups with their verdicts, in order; `extras` is what rewards recorded per completion."""

    groups: tuple[Group, ...]
    verdicts: tuple[Judged, ...]
    greedy: tuple[float, ...] | None = None
    extras: dict[str, list[object]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Sampler:
    """What rollouts are made with."""

    engine: Engine
    tokenizer: object
    tasks: dict[str, Task]
    stream: PromptStream
    scorer: Scorer
    choice: RolloutChoice
    seed: int
    less: str = ""
    """What asks less of the engine, where the recipe has no keys of `rollout` to set."""

    @property
    def sampling(self) -> Sampling:
        c = self.choice
        return Sampling(
            max_tokens=c.max_tokens, temperature=c.temperature, stop=c.stop, stop_ids=c.stop_ids
        )

    def judged(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        scorer: Scorer,
        step: int,
    ) -> tuple[list[Group], Scored]:
        """Completions of the prompts, and what a scorer says of them.

        It is asked while the last of them are drawn, where the recipe says so and the engine can
        hand over the first ones; a conversation must be over first.
        """
        overlaps = self.choice.overlap_rewards and self.choice.max_turns == 1
        if not overlaps or not isinstance(self.engine, StreamingEngine):
            groups = self.sample(prompts, n, sampling, seed)
            return groups, scorer(groups, step)
        with scorer.overlapping(prompts, step) as overlap:
            groups = self.sample(prompts, n, sampling, seed, overlap.add)
            return groups, scorer.conclude(groups, step, overlap.calls())

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Completions of the prompts, through as many turns as the task and the recipe allow.

        With `on_group` each goes there as well, as `StreamingEngine.stream` says, after one turn.
        Raises KeelError where there is no answer in time, or no memory for it.
        """
        smaller = self.less or f"lower rollout.max_rows (now {self.choice.max_rows})"
        try:
            with (
                oom_context(f"{len(prompts)} prompts were answered", smaller),
                watching("the engine", self.choice.timeout, "fix it, or raise rollout.timeout"),
            ):
                if on_group is not None and isinstance(self.engine, StreamingEngine):
                    return self.engine.stream(prompts, n, sampling, seed, on_group)
                return converse(
                    self.engine,
                    prompts,
                    n,
                    sampling,
                    seed,
                    tasks=self.tasks,
                    tokenizer=self.tokenizer,
                    max_turns=self.choice.max_turns,
                )
        except Hung as error:
            if not self.less:
                raise
            message = str(error).replace("raise rollout.timeout", self.less)
            raise Hung(message, error.stack) from error


def collect(sampler: Sampler, row: Algorithm, step: int) -> Rollouts:
    """The rollouts of a step, without groups that hold nothing to learn from.

    A group without any reward is dropped and counted; with dynamic sampling (DAPO,
    arXiv:2503.14476 §3.2) so is one whose rewards before the punishment of length are all equal (of
    0 and 1: all wrong or all right), and the step is refilled.
    """
    choice = sampler.choice
    kept: list[tuple[Group, Judged]] = []
    every: list[tuple[Group, Judged]] = []
    rounds: list[Mapping[str, float]] = []
    failures: dict[str, float] = {}
    extras: dict[str, list[object]] = {}
    refills = 0
    while True:
        prompts = sampler.stream.take(choice.prompts_per_step - len(kept))
        seed = derive(sampler.seed, "rollout", step, refills)
        groups, scored = sampler.judged(
            prompts, choice.group_size, sampler.sampling, seed, sampler.scorer, step
        )
        pairs = list(zip(groups, scored.verdicts, strict=True))
        keep = [
            not all_alike(judged, row.needs_steps)
            if choice.dynamic_sampling
            else bool(_rewards(judged))
            for _, judged in pairs
        ]
        every += pairs
        kept += [pair for pair, good in zip(pairs, keep, strict=True) if good]
        _gather_extras(extras, scored.extras, keep, choice.group_size, len(kept))
        rounds.append(scored.metrics)
        for name, count in scored.failures.items():
            key = f"rewards/{name}/failures"
            failures[key] = failures.get(key, 0.0) + count
        if (
            not choice.dynamic_sampling
            or len(kept) >= choice.prompts_per_step
            or refills >= choice.max_refills
        ):
            break
        refills += 1
    rollouts = Rollouts(
        groups=tuple(group for group, _ in kept),
        verdicts=tuple(judged for _, judged in kept),
        extras=extras,
        metrics={
            **_joined(rounds, spending(sampler.scorer.functions)),
            **failures,
            **describe(every),
            **_dropped(every, kept, refills, choice),
            "prompts/left_out": float(sum(sampler.stream.left_out.values())),
        },
    )
    return _with_greedy(sampler, rollouts, step) if row.needs_greedy and kept else rollouts


def describe(pairs: Sequence[tuple[Group, Judged]]) -> dict[str, float]:
    """Rewards and lengths of what was sampled, under TRL's names."""
    completions = [c for group, _ in pairs for c in group.completions]
    rewards = [v.reward for _, judged in pairs for v in judged if v.reward is not None]
    spreads = [_rewards(judged) for _, judged in pairs]
    lengths = np.array([int(c.written.sum()) for c in completions], dtype=np.float64)
    ended = np.array([c.finish != "length" for c in completions])
    stds = [float(np.std(r, ddof=1)) for r in spreads if len(r) > 1]
    return {
        "reward": float(np.mean(rewards)) if rewards else float("nan"),
        "reward_std": float(np.mean(stds)) if stds else 0.0,
        "frac_reward_zero_std": float(np.mean([_flat(judged) for _, judged in pairs])),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - ended.mean()),
        "completions/mean_terminated_length": float(lengths[ended].mean()) if ended.any() else 0.0,
        "completions/min_terminated_length": float(lengths[ended].min()) if ended.any() else 0.0,
        "completions/max_terminated_length": float(lengths[ended].max()) if ended.any() else 0.0,
        "rollout/tokens": float(lengths.sum()),
    }


def _joined(rounds: Sequence[Mapping[str, float]], added: Sequence[str]) -> dict[str, float]:
    """Each metric's mean over the rounds of sampling that have it; the sum of those `added`."""
    names = {name: None for metrics in rounds for name in metrics}
    values = {name: [m[name] for m in rounds if name in m] for name in names}
    return {n: float(sum(v) if n in added else np.mean(v)) for n, v in values.items()}


def _rewards(judged: Judged) -> list[float]:
    return [v.reward for v in judged if v.reward is not None]


def _flat(judged: Judged) -> bool:
    rewards = _rewards(judged)
    return not rewards or max(rewards) == min(rewards)


def all_alike(judged: Sequence[Verdict], of_steps: bool) -> bool:
    """Whether the rewards of a group are all equal before length is punished, or there are none.

    Where advantages are `of_steps`, the rewards are those of the steps, with what the answers' own
    hold besides them.
    """
    rewards: list[float] = []
    for verdict in judged:
        whole = verdict.reward if verdict.unshaped is None else verdict.unshaped
        if whole is None:
            continue
        steps = [step.reward for step in verdict.steps] if of_steps else []
        rewards += steps
        if not of_steps or verdict.outcome is not None:
            rewards.append(whole - math.fsum(steps))
    return not rewards or max(rewards) == min(rewards)


def _dropped(
    every: Sequence[object], kept: Sequence[object], refills: int, choice: RolloutChoice
) -> dict[str, float]:
    out = {"groups/dropped": float(len(every) - len(kept))}
    return {**out, "rollout/refills": float(refills)} if choice.dynamic_sampling else out


def _gather_extras(
    into: dict[str, list[object]],
    extras: Mapping[str, Sequence[object]],
    keep: Sequence[bool],
    group_size: int,
    groups: int,
) -> None:
    """Append what rewards recorded for the completions that are kept; `groups` are kept so far.

    None stands where a round did not record a name that another did.
    """
    before = (groups - sum(keep)) * group_size
    for name in {**into, **extras}:
        values = extras.get(name, [None] * (len(keep) * group_size))
        chosen = [value for i, value in enumerate(values) if keep[i // group_size]]
        into[name] = [*into.get(name, [None] * before), *chosen]


def _with_greedy(sampler: Sampler, rollouts: Rollouts, step: int) -> Rollouts:
    """The reward of each prompt's greedy completion (ReMax)."""
    prompts = [group.prompt for group in rollouts.groups]
    greedy = replace(sampler.sampling, temperature=0.0)
    seed = derive(sampler.seed, "greedy", step)
    _, scored = sampler.judged(prompts, 1, greedy, seed, sampler.scorer, step)
    rewards = [judged[0].reward for judged in scored.verdicts]
    spoken = [reward for reward in rewards if reward is not None]
    mean = {"reward/greedy": float(np.mean(spoken))} if spoken else {}
    added = spending(sampler.scorer.functions)
    asked = {name: scored.metrics[name] for name in added if name in scored.metrics}
    return replace(
        rollouts,
        greedy=tuple(float("nan") if reward is None else reward for reward in rewards),
        metrics={**rollouts.metrics, **_joined([rollouts.metrics, asked], added), **mean},
    )
