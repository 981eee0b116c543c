"""The rollouts of a step: prompts, completions and rewards; refilled with dynamic sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from keel.algorithms.spec import Algorithm
from keel.config.fields import derive
from keel.config.sampling import Rollout as SamplingConfig
from keel.data.columns import shown_gold
from keel.data.mixture import PromptStream
from keel.engines.endpoint.programs import ProgramConfig, sample_with_program
from keel.engines.turns import generate_multi_turn
from keel.learn.batch import Batch
from keel.learn.token_budget import oom_context
from keel.models.chat import ChatEncoder
from keel.models.text import token_texts
from keel.platform.time_limit import time_limit
from keel.rewards.scorer import Scored, Scorer
from keel.runs.rollouts import RolloutRow
from keel.types import (
    Completion,
    Engine,
    Group,
    OnGroup,
    Prompt,
    RewardResult,
    Sampling,
    Task,
)

Results = tuple[RewardResult, ...]


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Groups with their rewards, in order; `extras` is what rewards logged for each completion."""

    groups: tuple[Group, ...]
    results: tuple[Results, ...]
    greedy: tuple[float, ...] | None = None
    extras: dict[str, list[object]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Sampler:
    """The engine and the scorer that make rollouts, and their settings."""

    engine: Engine
    chat: ChatEncoder
    tasks: dict[str, Task]
    stream: PromptStream
    scorer: Scorer
    config: SamplingConfig
    seed: int
    less: str = ""
    """The hint of an error, if the recipe has no table `rollout`."""
    program: ProgramConfig | None = None
    before_rewards: Callable[[], None] | None = None
    """If several steps are sampled at once: waits for the rewards of those before."""

    @property
    def sampling(self) -> Sampling:
        c = self.config
        return Sampling(
            max_tokens=c.max_tokens,
            temperature=c.temperature,
            stop=c.stop,
            stop_ids=c.stop_ids,
            ignore_eos=c.ignore_eos,
        )

    def sample_and_score(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        scorer: Scorer,
        step: int,
    ) -> tuple[list[Group], Scored]:
        """Completions of the prompts, with the results of a scorer.

        With `overlap_rewards` the scorer runs while the engine samples the last completions, if
        completions have one turn.
        """
        one_turn = self.config.max_turns == 1 and self.program is None
        overlaps = self.config.overlap_rewards and one_turn and self.before_rewards is None
        if not overlaps:
            groups = self.sample(prompts, n, sampling, seed)
            if self.before_rewards is not None:
                self.before_rewards()
            return groups, scorer(groups, step)
        with scorer.overlapping(prompts, step) as overlap:
            groups = self.sample(prompts, n, sampling, seed, overlap.add)
            return groups, scorer.results(groups, overlap.finish())

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """Completions of the prompts, through as many turns as the task and the recipe allow.

        `on_group` gets each finished group, if the engine streams them. Raises KeelError if the
        engine exceeds its timeout or memory runs out.
        """
        version, asked = self.engine.weight_version, (prompts, n, sampling, seed)
        smaller = self.less or f"lower rollout.max_num_seqs (now {self.config.max_num_seqs})"
        hint = f"fix it, or {self.less or 'raise rollout.timeout'}"
        with (
            oom_context(f"{len(prompts)} prompts were answered", smaller),
            time_limit("the engine", self.config.timeout, hint, in_c=True),
        ):
            if on_group is not None:
                groups = self.engine.sample(*asked, on_group=on_group)
            elif self.program is not None:
                groups = sample_with_program(
                    self.engine,
                    *asked,
                    program=self.program,
                    chat=self.chat,
                    loop=self.scorer.loop,
                )
            else:
                groups = generate_multi_turn(
                    self.engine,
                    *asked,
                    tasks=self.tasks,
                    chat=self.chat,
                    max_turns=self.config.max_turns,
                    reply_role=self.config.reply_role,
                )
        return [
            replace(g, completions=tuple(replace(c, weight_version=version) for c in g.completions))
            for g in groups
        ]


def take(stream: PromptStream, count: int) -> tuple[list[Prompt], int]:
    """The next prompts of a stream, and how many it had left out by then."""
    return stream.take(count), sum(stream.left_out.values())


def collect(
    sampler: Sampler,
    algorithm: Algorithm,
    step: int,
    first: tuple[list[Prompt], int] | None = None,
) -> Rollouts:
    """The rollouts of a step, without groups that hold nothing to learn from.

    `first` is what `take` gave if its prompts have been taken before.

    A group without any reward is dropped and counted, if the advantage reads rewards; with
    dynamic sampling (DAPO, arXiv:2503.14476 §3.2) so is one whose rewards before the length penalty
    are all equal (as all wrong or all right), and the step is refilled.
    """
    config = sampler.config
    kept: list[tuple[Group, Results]] = []
    every: list[tuple[Group, Results]] = []
    rounds: list[Mapping[str, float]] = []
    failures: dict[str, float] = {}
    extras: dict[str, list[object]] = {}
    refills = 0
    while True:
        prompts, left_out = first or take(sampler.stream, config.prompts_per_step - len(kept))
        first = None
        seed = derive(sampler.seed, "rollout", step, refills)
        groups, scored = sampler.sample_and_score(
            prompts, config.group_size, sampler.sampling, seed, sampler.scorer, step
        )
        pairs = list(zip(groups, scored.results, strict=True))
        keep = [
            not all_alike(judged, algorithm.needs_steps)
            if config.dynamic_sampling
            else bool(_rewards(judged)) or not algorithm.needs_reward
            for _, judged in pairs
        ]
        every += pairs
        kept += [pair for pair, good in zip(pairs, keep, strict=True) if good]
        _gather_extras(extras, scored.extras, keep, config.group_size, len(kept))
        rounds.append(scored.metrics)
        for name, count in scored.failures.items():
            key = f"rewards/{name}/failures"
            failures[key] = failures.get(key, 0.0) + count
        if (
            not config.dynamic_sampling
            or len(kept) >= config.prompts_per_step
            or refills >= config.max_refills
        ):
            break
        refills += 1
    rollouts = Rollouts(
        groups=tuple(group for group, _ in kept),
        results=tuple(judged for _, judged in kept),
        extras=extras,
        metrics={
            **_joined(rounds, sampler.scorer.spending),
            **failures,
            **describe(every),
            **_dropped(every, kept, refills, config),
            "prompts/left_out": float(left_out),
        },
    )
    return _with_greedy(sampler, rollouts, step) if algorithm.needs_greedy and kept else rollouts


def describe(pairs: Sequence[tuple[Group, Results]]) -> dict[str, float]:
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


def _rewards(judged: Results) -> list[float]:
    return [v.reward for v in judged if v.reward is not None]


def _flat(judged: Results) -> bool:
    rewards = _rewards(judged)
    return not rewards or max(rewards) == min(rewards)


def all_alike(judged: Sequence[RewardResult], of_steps: bool) -> bool:
    """Whether the rewards of a group are all equal before length is punished, or there are none.

    If advantages are `of_steps`, these are the rewards of the steps and of whole answers.
    """
    rewards: list[float] = []
    for result in judged:
        whole = result.unshaped
        if whole is None:
            continue
        steps = [step.reward for step in result.steps] if of_steps else []
        rewards += steps
        if not of_steps or result.outcome is not None:
            rewards.append(whole - math.fsum(steps))
    return not rewards or max(rewards) == min(rewards)


def _dropped(
    every: Sequence[object], kept: Sequence[object], refills: int, config: SamplingConfig
) -> dict[str, float]:
    out = {"groups/dropped": float(len(every) - len(kept))}
    return {**out, "rollout/refills": float(refills)} if config.dynamic_sampling else out


def _gather_extras(
    into: dict[str, list[object]],
    extras: Mapping[str, Sequence[object]],
    keep: Sequence[bool],
    group_size: int,
    groups: int,
) -> None:
    """Append what rewards logged for the completions that are kept; `groups` are kept so far.

    None if a round did not log a name that another did.
    """
    before = (groups - sum(keep)) * group_size
    for name in {**into, **extras}:
        values = extras.get(name, [None] * (len(keep) * group_size))
        chosen = [value for i, value in enumerate(values) if keep[i // group_size]]
        into[name] = [*into.get(name, [None] * before), *chosen]


def _with_greedy(sampler: Sampler, rollouts: Rollouts, step: int) -> Rollouts:
    """The reward of each prompt's greedy completion (ReMax), whose tokens are counted too."""
    prompts = [group.prompt for group in rollouts.groups]
    greedy = replace(sampler.sampling, temperature=0.0)
    seed = derive(sampler.seed, "greedy", step)
    groups, scored = sampler.sample_and_score(prompts, 1, greedy, seed, sampler.scorer, step)
    rewards = [judged[0].reward for judged in scored.results]
    known = [reward for reward in rewards if reward is not None]
    mean = {"reward/greedy": float(np.mean(known))} if known else {}
    written = sum(int(c.written.sum()) for group in groups for c in group.completions)
    spent = {**scored.metrics, "rollout/tokens": float(written)}
    added = (*sampler.scorer.spending, "rollout/tokens")
    asked = {name: spent[name] for name in added if name in spent}
    return replace(
        rollouts,
        greedy=tuple(float("nan") if reward is None else reward for reward in rewards),
        metrics={**rollouts.metrics, **_joined([rollouts.metrics, asked], added), **mean},
    )


# ---------------------------------------------------------------- records


def rollout_records(
    rollouts: Rollouts, batch: Batch, tokens: Mapping[str, Tensor], tokenizer: Any
) -> list[RolloutRow]:
    """A step's rollouts as the records of its Parquet file: one for each completion.

    `tokens` are values (N,) of the batch's tokens by the name of their column.
    """
    ends = np.cumsum(batch.lengths)[:-1]
    split = {
        name: np.split(value_N.detach().cpu().numpy(), ends) for name, value_N in tokens.items()
    }
    rows = completion_rows(rollouts.groups, rollouts.results, tokenizer)
    completions = [c for group in rollouts.groups for c in group.completions]
    return [
        replace(
            row,
            values={name: _placed(completion, parts[at]) for name, parts in split.items()},
            extras={name: extras[at] for name, extras in rollouts.extras.items()},
        )
        for at, (row, completion) in enumerate(zip(rows, completions, strict=True))
    ]


def completion_rows(
    groups: Sequence[Group], results: Sequence[Sequence[RewardResult]], tokenizer: Any
) -> list[RolloutRow]:
    """Completions with their results as records, without values of their tokens."""
    ids = {int(i) for group in groups for c in group.completions for i in c.tokens}
    texts = token_texts(tokenizer, sorted(ids))
    return [
        RolloutRow(
            group=g,
            prompt_id=group.prompt.id,
            task=group.prompt.task,
            prompt=group.prompt.content,
            expected=expected_answer(group.prompt),
            completion=completion.transcript,
            tokens=completion.tokens,
            pieces=tuple(texts[int(i)] for i in completion.tokens),
            log_probs=completion.log_probs,
            written=completion.written,
            finish=completion.finish,
            weight_version=completion.weight_version,
            reward=result.reward,
            components=result.components,
            steps=result.steps,
            outcome=result.outcome,
        )
        for g, (group, judged) in enumerate(zip(groups, results, strict=True))
        for completion, result in zip(group.completions, judged, strict=True)
    ]


def expected_answer(prompt: Prompt) -> str | None:
    """The answer that the data has, of several each; None if it has none."""
    answer = prompt.columns.get("answer")
    return shown_gold(answer) if isinstance(answer, str | int | float | list) else None


def _placed(completion: Completion, written: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Values of the written tokens at their places in the completion, 0 at the others."""
    out = np.zeros(len(completion), dtype=np.float32)
    out[completion.written] = written
    return out
