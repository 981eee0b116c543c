"""The rollouts of steps: prompts, completions and rewards; refilled with dynamic sampling, and
sampled before they are trained on.

`rollout.async_level` is how many steps ahead: the rollouts of step n + level are sampled while step
n is trained on, with the weights from before its update, so that no completion is trained on more
than `level` updates after the weights that it was begun with. Which weights those are is a function
of the step and not of time, and prompts are taken in the order of the steps: a run is a function of
recipe and seed. A checkpoint waits for what is being sampled, and holds the rollouts that no step
has trained on yet, so that a resumed run does not sample or score them again.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from keel.algorithms.spec import Algorithm
from keel.config.fields import derive
from keel.config.sources import Rollout as SamplingConfig
from keel.data.columns import shown_gold
from keel.data.curriculum import CurriculumStream
from keel.engines.endpoint.programs import ProgramConfig, sample_with_program
from keel.engines.turns import generate_multi_turn
from keel.learn.memory import oom_context
from keel.models.chat import ChatEncoder
from keel.platform.time_limit import cancelled_by, raise_if_cancelled, time_limit
from keel.rewards.scorer import Scored, Scorer
from keel.runs.values import plain
from keel.runs.writer import Clock
from keel.types import (
    Engine,
    Group,
    KeelError,
    OnGroup,
    Prompt,
    PromptSupply,
    RewardResult,
    Sampling,
    Task,
)

Results = tuple[RewardResult, ...]
PATIENCE = 30.0
"""Seconds to wait for cancelled sampling: a decode step, a prefill, a reply are shorter."""
POLL = 0.1
"""Seconds between two checks whether sampling is cancelled."""


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Groups with their rewards, in order; `extras` is what rewards logged for each completion.

    `roles` are those of the groups. `seconds` were spent in the engine; 0 if it is not known, as of
    rollouts from a checkpoint.
    """

    groups: tuple[Group, ...]
    results: tuple[Results, ...]
    greedy: tuple[float, ...] | None = None
    roles: tuple[str, ...] = ()
    extras: dict[str, list[object]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Sampler:
    """The engine and the scorer that make rollouts, and their settings."""

    engine: Engine
    chat: ChatEncoder
    tasks: dict[str, Task]
    stream: PromptSupply
    scorer: Scorer
    config: SamplingConfig
    seed: int
    less: str = ""
    """The hint of an error, if the recipe has no table `rollout`."""
    curriculum: CurriculumStream | None = None
    """The stream, if it chooses prompts by their rewards."""
    program: ProgramConfig | None = None
    before_rewards: Callable[[], None] | None = None
    """If several steps are sampled at once: waits for the rewards of those before."""
    stopwatch: Clock = field(default_factory=Clock)
    """The seconds in the engine."""

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
            self.stopwatch("generation"),
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


def take(stream: PromptSupply, count: int) -> tuple[list[Prompt], int]:
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
    sampler.stopwatch.take()
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
        if sampler.curriculum is not None:
            sampler.curriculum.observe(_unshaped(pairs))
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
        roles=tuple(_role(group.prompt, algorithm.advantage.role_column) for group, _ in kept),
        extras=extras,
        metrics={
            **_joined(rounds, sampler.scorer.spending),
            **failures,
            **describe(every),
            **_dropped(every, kept, refills, config),
            "prompts/left_out": float(left_out),
            **({} if sampler.curriculum is None else sampler.curriculum.metrics()),
        },
    )
    if algorithm.needs_greedy and kept:
        rollouts = _with_greedy(sampler, rollouts, step)
    return replace(rollouts, seconds=sampler.stopwatch.take().get("generation", 0.0))


def _role(prompt: Prompt, column: str | None) -> str:
    if column is not None and column not in prompt.columns:
        raise KeelError(
            f"algorithm.advantage.role: prompt {prompt.id!r} has no column {column!r}: name one "
            'that every task has, or set role = "none" for the task\'s name'
        )
    return prompt.task if column is None else str(prompt.columns[column])


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


def _unshaped(pairs: Sequence[tuple[Group, Results]]) -> Iterator[tuple[str, list[float]]]:
    for group, judged in pairs:
        yield group.prompt.id, [v.unshaped for v in judged if v.unshaped is not None]


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


# ---------------------------------------------------------------- sampled ahead


Pending = Mapping[int, Rollouts]
"""Rollouts that no step has trained on yet, by their step."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """A step's place among those that are sampled at once: rewards are called step by step."""

    before: threading.Event
    done: threading.Event

    def wait(self) -> None:
        """Until the rewards of the steps before have been called."""
        while not self.before.wait(POLL):
            raise_if_cancelled()


Sample = Callable[[], Rollouts]
Begin = Callable[[int, Ticket], Sample]
"""Takes the prompts of a step, in the order of the steps; returns what samples and scores them."""


def begin_alone(sampler: Sampler, algorithm: Algorithm, step: int, turn: Ticket) -> Sample:
    """A step that is sampled while no other is, with the engine's weights."""
    return partial(collect, sampler, algorithm, step)


def begin_pinned(sampler: Sampler, algorithm: Algorithm, step: int, turn: Ticket) -> Sample:
    """A step that is sampled with the weights of now, whatever the engine takes over meanwhile."""
    first = take(sampler.stream, sampler.config.prompts_per_step)
    engine = sampler.engine.pinned()
    sampler = replace(sampler, engine=engine, before_rewards=turn.wait, stopwatch=Clock())
    return partial(collect, sampler, algorithm, step, first)


class RolloutPrefetcher:
    """Samples the rollouts of steps, `level` steps ahead.

    With `at_once` sampling goes on while the engines take over new weights, and several steps are
    sampled at once; else a step's update ends only when the rollouts of the next are there.
    `pending` are those that a checkpoint held; `columns` are those of `as_kept`.
    """

    def __init__(
        self,
        begin: Begin,
        level: int,
        at_once: bool = False,
        pending: Pending | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        self._begin = begin
        self._columns = columns
        self.level = level
        self._at_once = at_once
        self._kept = dict(pending or {})
        self._running: dict[int, _Thread] = {}
        self._last_turn = threading.Event()
        self._last_turn.set()

    @property
    def pending(self) -> Pending:
        """The rollouts that no step has trained on yet, once all are there."""
        with self._ended_on_error():
            for step in list(self._running):
                self._finish(step)
        return dict(sorted(self._kept.items()))

    def __call__(self, step: int, last: int) -> Rollouts:
        """The rollouts of a step, sampled before or now; those of later ones are begun."""
        if not self._at_once:
            kept = self._kept.pop(step, None)
            return self._now(step) if kept is None else kept
        with self._ended_on_error():
            for number in range(step, min(step + self.level - 1, last) + 1):
                self._start(number)
            self._finish(step)
        return self._kept.pop(step)

    @contextmanager
    def prefetch(self, step: int, last: int) -> Iterator[None]:
        """Begin the rollouts that are due while a step trains, unless they are after the `last`.

        Raises what sampling raises, after the block or when its step comes; an error in the block
        cancels the sampling. In either case no thread is left, except one that hangs in a task's or
        a user's code.
        """
        with self._ended_on_error():
            if 0 < self.level <= last - step:
                self._start(step + self.level)
            yield
            if not self._at_once:
                for number in list(self._running):
                    self._finish(number)

    def close(self) -> None:
        """Cancel what is being sampled."""
        running, self._running = list(self._running.values()), {}
        for thread in running:
            thread.cancel()
        for thread in running:
            thread.join(PATIENCE)

    def _now(self, step: int) -> Rollouts:
        sample, turn = self._work(step)
        try:
            return sample()
        finally:
            turn.done.set()

    def _start(self, step: int) -> None:
        if step not in self._kept and step not in self._running:
            sample, turn = self._work(step)
            thread = self._running[step] = _Thread(sample, turn)
            thread.start()

    def _work(self, step: int) -> tuple[Sample, Ticket]:
        turn = Ticket(self._last_turn, threading.Event())
        self._last_turn = turn.done
        return self._begin(step, turn), turn

    def _finish(self, step: int) -> None:
        if step in self._running:
            self._kept[step] = as_kept(self._running[step].result(), self._columns)
            del self._running[step]

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


class _Thread(threading.Thread):
    """Samples with the caller's number of torch threads, which decides the last bits."""

    def __init__(self, sample: Sample, turn: Ticket) -> None:
        super().__init__(name="keel-ahead", daemon=True)
        self._sample, self._turn = sample, turn
        self._threads = torch.get_num_threads()
        self._rollouts: Rollouts | None = None
        self._error: BaseException | None = None
        self._cancelled = threading.Event()

    def run(self) -> None:
        try:
            torch.set_num_threads(self._threads)
            with cancelled_by(self._cancelled):
                self._rollouts = self._sample()
        except BaseException as error:
            self._error = error
        finally:
            self._turn.done.set()

    def result(self) -> Rollouts:
        """Wait for the rollouts. Raises what sampling raised."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._rollouts is not None
        return self._rollouts

    def cancel(self) -> None:
        """End the sampling at its next check (`raise_if_cancelled`)."""
        self._cancelled.set()


def as_kept(rollouts: Rollouts, columns: Sequence[str] = ()) -> Rollouts:
    """What a step and its records need of rollouts, in a form that a checkpoint can hold.

    Of the columns of prompts and completions those are left that are named, which a teacher is
    shown, and the answer, which is recorded; what rewards logged becomes plain values.
    """
    return replace(
        rollouts,
        groups=tuple(
            Group(
                _bare(group.prompt, columns),
                tuple(replace(c, columns=_named(c.columns, columns)) for c in group.completions),
            )
            for group in rollouts.groups
        ),
        extras={name: plain(values) for name, values in rollouts.extras.items()},
    )


def _named(columns: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    kept = {name: columns[name] for name in names if name in columns}
    return cast(dict[str, Any], json.loads(json.dumps(kept, default=plain)))


def _bare(prompt: Prompt, names: Sequence[str]) -> Prompt:
    # As JSON reads it back; the order of keys stays, since a template may write it.
    content, tools = json.loads(json.dumps((prompt.content, prompt.tools), default=plain))
    answer = expected_answer(prompt)
    columns = {} if answer is None else {"answer": answer}
    columns |= _named(prompt.columns, names)
    return replace(prompt, content=content, columns=columns, tools=tuple(tools))


def expected_answer(prompt: Prompt) -> str | None:
    """The answer that the data has, of several each; None if it has none."""
    answer = prompt.columns.get("answer")
    return shown_gold(answer) if isinstance(answer, str | int | float | list) else None
