"""A step of reinforcement learning, readable in one sitting.

task.prompts → engine.sample → rewards.score → score (old policy, reference, values) → estimate
  (advantages) → update (epochs, mini-batches, micro-batches) → engine.sync → record
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.spec import Algorithm
from keel.algorithms.terms import OldLogProbs
from keel.config.fields import derive
from keel.config.model import TeacherModel
from keel.config.stage import Optimizer
from keel.learn.advantages import estimate, outcome
from keel.learn.batch import Batch, Estimates, TrainBatch, from_groups
from keel.learn.learner import Losses, Trainer, by_gradient
from keel.learn.loss import (
    WEIGHTS,
    adapted_beta,
    adapted_bonus,
    demonstrated,
    limited,
    prepare,
    value_metrics,
    with_bonus,
)
from keel.learn.memory import LESS, oom_context
from keel.learn.optimizer import Cause, NotFinite, learning_rate
from keel.learn.teacher_server import TeacherServer
from keel.models.chat import teacher_groups
from keel.objective import corrections, divergences, ratios
from keel.objective.segments import segment_sum
from keel.runs.rows import LOSS, RolloutRow
from keel.training.evaluator import Evaluators
from keel.training.loop import EvaluationResult, Loop, StepResult, write_batch
from keel.training.rollout import RolloutPrefetcher, Rollouts, Sampler
from keel.training.speed import StepWork, operations_of, peak_of, speeds_of
from keel.training.state import Progress, State, rollout_records


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Which sequences of a step are in the loss, and what is computed for it before the update.

    `score_old`, `score_reference` and `score_teacher` say whether the trainer computes the
    log-probabilities of the policy before the update, of the reference and of the teacher,
    `score_entropy` and `score_squares` whether the policy's entropy and Σ_v π² too; with
    `old_log_probs` = "engine" the first
    are the engine's. With `ratio_to_itself` the ratio divides by the update's own, so that it is 1
    although dropout moves them.
    """

    max_tokens: int
    mask_truncated: bool = False
    old_log_probs: OldLogProbs = "trainer"
    score_old: bool = True
    score_entropy: bool = False
    score_squares: bool = False
    score_reference: bool = False
    score_teacher: bool = True
    ratio_to_itself: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often each batch is trained on, and the learning rates over the stage's steps."""

    steps: int
    epochs: int
    minibatches: int
    optimizer: Optimizer
    value_optimizer: Optimizer
    value_warmup_steps: int = 0
    """Steps at the start in which only the value model learns; the policy's schedule begins after
    them."""
    reference_reset_every: int | None = None
    reference_rate: float = 1.0
    """Share of the policy's weights that the reference then gets; below 1 for an average."""

    def rates(self, number: int, scale: float) -> tuple[float | None, float]:
        """The learning rates of the policy (None: it does not learn yet) and the value model,
        times `scale`."""
        warm_up = self.value_warmup_steps
        rate = learning_rate(self.optimizer, number - 1 - warm_up, self.steps - warm_up)
        return (
            None if number <= warm_up else scale * rate,
            scale * learning_rate(self.value_optimizer, number - 1, self.steps),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class RLLoop(Loop):
    """The loop of a stage, with its parts."""

    algorithm: Algorithm
    loss: LossConfig
    schedule: Schedule
    learner: Trainer
    sampler: Sampler
    prefetcher: RolloutPrefetcher
    demonstrations: Callable[[int, int], Batch] | None = None
    """Those of an optimizer step, by the number of its step and its own in that."""
    evaluators: Evaluators | None = None
    taught_by: TeacherModel | None = None
    teacher: TeacherServer | None = None
    """The teacher, if a server has it."""
    seed: int

    @property
    def evaluates(self) -> bool:
        return self.evaluators is not None

    def evaluation_due(self, step: int) -> bool:
        return self.evaluators is not None and self.evaluators.due(step)

    def evaluated(self, step: int, whole: bool) -> EvaluationResult:
        assert self.evaluators is not None
        return self.evaluators(step, whole)

    def close(self) -> None:
        """Cancel what is being sampled, and close all rewards."""
        with ExitStack() as stack:
            sets = self.evaluators.sets if self.evaluators else ()
            scorers = [self.sampler.scorer, *(one.scorer for one, _ in sets)]
            for scorer in {id(one.loop): one for one in scorers}.values():  # of the same functions
                stack.callback(scorer.close)
            stack.callback(self.prefetcher.close)

    def take_step(self, progress: Progress, number: int) -> StepResult:
        """Rollouts with their rewards, the updates on them, and the engines' new weights."""
        algorithm, schedule, beta = self.algorithm, self.schedule, progress.beta
        advantage = progress.advantage
        clock, skipped, bonus = self.writer.clock, 0, progress.bonus
        records: Callable[[], Sequence[RolloutRow]] = tuple
        work: StepWork | None = None
        with clock("rollout"):
            rollouts = self.prefetcher(number, schedule.steps)
        if self.prefetcher.level == 0:  # else it samples while the trainer works
            with clock("sync"):
                self.sampler.engine.sleep()
        metrics = {**rollouts.metrics, **_staleness(self, rollouts, number), "step/tokens": 0.0}
        with self.prefetcher.prefetch(number, schedule.steps):
            if rollouts.groups:
                with clock("score"):
                    batch = score(self, rollouts, number)
                    weights = self.sampler.scorer.weights
                    rewards = outcome(
                        rollouts.groups, rollouts.results, rollouts.greedy, weights, rollouts.roles
                    )
                    estimates = estimate(algorithm, batch, rewards, beta, advantage)
                advantage = estimates.state
                with clock("update"):
                    updated = update_models(self, batch, estimates, rollouts, progress, number)
                metrics |= updated.metrics
                shown = (p.batch.actions.input_lengths[len(p.places) :] for p, _ in updated.tokens)
                metrics["step/tokens"] = float(sum(batch.input_lengths) + sum(map(sum, shown)))
                skipped, bonus = updated.skipped, updated.bonus
                work = _work(self, rollouts, [part for part, _ in updated.tokens], beta)
                values, tokenizer = _token_values(batch, updated), self.sampler.chat.tokenizer
                records = partial(rollout_records, rollouts, values, tokenizer)
                if number > schedule.value_warmup_steps:  # before, the policy did not move
                    beta = adapted(self, updated.minibatches, metrics, beta)
            else:
                self.writer.note(f"step {number}: no group had anything to learn from")
            _reset_reference(self, number)
        with clock("sync"):
            sync(self, number)
        return StepResult(
            metrics,
            int(metrics["step/tokens"]),
            skipped,
            beta,
            advantage,
            bonus,
            self.sampler.stream.state(),
            records,
            work,
        )

    def state(self, progress: Progress) -> State:
        learner = self.learner
        return State(progress, learner.policy, learner.save, self.prefetcher.pending)


def sample_only(loop: RLLoop, progress: Progress) -> Progress:
    """A stage of no steps: the rollouts that its first step would train on, recorded as step 0."""
    writer, start = loop.writer, time.perf_counter()
    with writer.clock("rollout"):
        rollouts = loop.prefetcher(1, 1)
    seconds, metrics = time.perf_counter() - start, dict(rollouts.metrics)
    speeds = speeds_of(StepWork(metrics["rollout/tokens"], rollouts.seconds), seconds, 0.0)
    writer.callbacks.step(0, metrics, seconds, speeds, evaluates=False)
    records = rollout_records(rollouts, {}, loop.sampler.chat.tokenizer)
    writer.recorded(progress, metrics, records, seconds, speeds)
    return progress


@dataclass(frozen=True, eq=False)
class Minibatch:
    """The sequences of a batch that one optimizer step trains on, and their places in the batch."""

    places: Sequence[int]
    batch: TrainBatch[Batch]


@dataclass(frozen=True, eq=False)
class UpdateResult:
    """The mini-batches of a step, the metrics of its updates, how many were not finite, and for
    each one that was taken the values of its tokens; `bonus` is the progress's after it."""

    minibatches: Sequence[Minibatch]
    metrics: dict[str, float]
    tokens: Sequence[tuple[Minibatch, Mapping[str, Tensor]]] = ()
    skipped: int = 0
    bonus: Sequence[float] = ()


@oom_context("the engine took the weights over", LESS)
def sync(loop: RLLoop, number: int) -> None:
    """Copy the weights after step `number` into the engines of rollouts and of evaluation."""
    weights = loop.learner.weights()
    engines = [loop.sampler.engine]
    if loop.evaluators is not None and loop.evaluators.main.sampler.engine is not engines[0]:
        engines.append(loop.evaluators.main.sampler.engine)
    for engine in engines:
        engine.sync(weights)
        engine.weight_version = number


def score(loop: RLLoop, rollouts: Rollouts, number: int) -> Batch:
    """The rollouts as a batch, with the scores that the algorithm needs before the first update of
    step `number`."""
    learner, config = loop.learner, loop.loss
    replies = any(term.of == "replies" and term.coefficient for term in loop.algorithm.auxiliary)
    batch = from_groups(rollouts.groups, learner.device, replies=replies)
    if (choice := loop.taught_by) is not None and choice.by_task:
        of = [choice.of_task(group.prompt.task) for group in rollouts.groups]
        batch = replace(batch, teachers=tuple(of[group] for group in batch.groups))
    if choice is not None and choice.prompt is not None:
        longest, chat = learner.policy.context, loop.sampler.chat
        taught = from_groups(
            [*teacher_groups(rollouts.groups, choice.prompt, chat, longest)], learner.device
        )
        batch = replace(batch, taught=replace(taught, teachers=batch.teachers))
    if config.old_log_probs == "engine":
        batch = replace(batch, old_log_prob_N=batch.engine_log_prob_N)
    elif config.old_log_probs == "log_linear":
        batch = replace(batch, lags=tuple(_behind(batch.versions, number)))
    with loop.teacher.scoring(batch.taught or batch) if loop.teacher else nullcontext() as found:
        scored = learner.score(
            batch,
            old=config.score_old,
            reference=config.score_reference,
            entropy=config.score_entropy,
            squares=config.score_squares,
            teacher=config.score_teacher,
        )
        return scored if found is None else replace(scored, teacher_log_prob_N=found())


def update_models(
    loop: RLLoop,
    batch: Batch,
    estimates: Estimates,
    rollouts: Rollouts,
    progress: Progress,
    number: int,
) -> UpdateResult:
    """The optimizer steps on a batch: its mini-batches, once in every epoch."""
    keep = _learnable(loop, rollouts)
    if not keep:
        return UpdateResult([], {}, bonus=progress.bonus)
    schedule, algorithm, shown = loop.schedule, loop.algorithm, loop.algorithm.demonstrations
    seed = derive(loop.seed, "minibatches", number)
    own = loop.loss.ratio_to_itself
    batches = minibatches(
        algorithm,
        replace(batch, old_log_prob_N=None) if own else batch,
        estimates,
        keep,
        count=schedule.minibatches,
        max_tokens=loop.loss.max_tokens,
        seed=seed,
    )
    rates = schedule.rates(number, progress.rate_scale)
    taken: list[tuple[Minibatch, Losses]] = []
    skipped, bonus, applied = 0, progress.bonus, list[float]()
    for at, rolled_out in enumerate([*batches] * schedule.epochs):
        now = with_bonus(algorithm, bonus)
        drawn = replace(rolled_out.batch, seed=derive(seed, "masks", at))
        if loop.demonstrations is not None and rates[0] is not None:
            drawn = demonstrated(algorithm, drawn, loop.demonstrations(number, at), number)
        part = replace(rolled_out, batch=drawn)
        try:
            moved = bool(taken) or not loop.loss.score_old
            made = loop.learner.update(now, drawn, progress.beta, rates, moved=moved)
            taken.append((part, made))
            applied.append(now.bonus)
            if rates[0] is not None:  # before, the policy does not move
                bonus = adapted_bonus(algorithm, bonus, made.metrics["entropy"])
        except NotFinite as error:
            loop.skip(
                progress,
                error,
                number=at,
                skipped=skipped,
                began=loop.learner.began,
                weight=loop.learner.bad_weight,
                diagnose=partial(_diagnose, loop, now, rollouts, part, progress.beta),
                keep=partial(write_batch, batch=drawn),
            )
            skipped += 1
    found = [losses.metrics for _, losses in taken]
    metrics = {name: float(np.mean([m[name] for m in found])) for name in found[0]} if found else {}
    kept = estimates.select(batch.action_index(keep))
    watched = {
        **_before_update(batch.select(keep), kept),
        **_engine_difference(loop.loss, batch.select(keep), taken),
        **_corrected(algorithm, batches),
        **metrics,
        "learning_rate": rates[0] or 0.0,
        **({"value/learning_rate": rates[1]} if loop.learner.learns_values else {}),
        "beta": progress.beta,
        **({"demonstrations/share": shown.share(number)} if shown and rates[0] is not None else {}),
        **({"entropy/coefficient": float(np.mean(applied))} if bonus else {}),
    }
    tokens = [(part, losses.tokens) for part, losses in taken]
    return UpdateResult(batches, watched, tokens, skipped, bonus)


def minibatches(
    algorithm: Algorithm,
    batch: Batch,
    estimates: Estimates,
    keep: Sequence[int],
    *,
    count: int,
    max_tokens: int,
    seed: int,
) -> list[Minibatch]:
    """A batch split at random into mini-batches, of whose sequences only those of `keep` are in
    the loss; one without any is left out. A surrogate that reads groups has them whole."""
    every = range(batch.sequences)
    rng = np.random.default_rng(seed)
    whole = algorithm.surrogate.reads_groups
    units = [*dict.fromkeys(batch.groups)] if whole else every
    order = rng.permutation(units).tolist() if count > 1 else units
    chunks = [chunk.tolist() for chunk in np.array_split(order, count)]
    if whole:
        parts_of = [frozenset(chunk) for chunk in chunks]
        chunks = [[i for i in every if batch.groups[i] in one] for one in parts_of]
    # Sorted again, so that completions of one prompt are neighbours: it is then computed once.
    chunks = [sorted(chunk) for chunk in chunks]
    kept = frozenset(keep)
    parts: list[Minibatch] = []
    for chunk in chunks:
        inside = [i for i, place in enumerate(chunk) if place in kept]
        if not inside:
            continue
        part = prepare(
            algorithm,
            batch.select(chunk),
            estimates.select(batch.action_index(chunk)),
            max_tokens,
            inside,
        )
        parts.append(Minibatch([chunk[i] for i in inside], part))
    return parts


def adapted(
    loop: RLLoop,
    batches: Sequence[Minibatch],
    metrics: dict[str, float],
    beta: float,
) -> float:
    """β for the next step: fixed, or by PPO's or Ziegler's rule."""
    divergence = loop.algorithm.divergence
    if divergence is None or divergence.adaptive is None or not batches:
        return beta
    rule = divergence.adaptive
    if rule.rule == "ziegler":
        kl = metrics["kl/sequence"]
    else:
        kl = metrics["kl/after"] = _divergence_now(loop, [part.batch.actions for part in batches])
    return adapted_beta(rule, beta, kl, sum(part.batch.sequences for part in batches))


# ---------------------------------------------------------------- details


def _work(loop: RLLoop, rollouts: Rollouts, parts: Sequence[Minibatch], beta: float) -> StepWork:
    """What a step generated, and the operations of its updates if the card's peak is known."""
    policy, operations = loop.learner.policy, 0.0
    peak = peak_of(policy.device)
    for part in parts if peak is not None else ():
        moving, _ = by_gradient(loop.algorithm, part.batch, beta)
        operations += operations_of(policy, part.batch.actions, moving)
    return StepWork(rollouts.metrics["rollout/tokens"], rollouts.seconds, operations, peak)


def _staleness(loop: RLLoop, rollouts: Rollouts, number: int) -> dict[str, float]:
    """How many updates the weights that completions were begun with are behind the policy's."""
    if loop.prefetcher.level == 0:
        return {}
    versions = [c.weight_version for group in rollouts.groups for c in group.completions]
    if not versions:
        return {}
    behind = _behind(versions, number)
    return {
        "rollout/staleness/mean": float(np.mean(behind)),
        "rollout/staleness/max": float(max(behind)),
    }


def _behind(versions: Sequence[int], number: int) -> list[int]:
    """How many updates these weights are behind the policy in step `number`."""
    return [number - 1 - version for version in versions]


def _reset_reference(loop: RLLoop, number: int) -> None:
    """Copy the policy to the reference if the schedule does after this step."""
    every = loop.schedule.reference_reset_every
    if loop.learner.has_reference and every is not None and number % every == 0:
        loop.learner.refresh_reference(loop.schedule.reference_rate)


def _diagnose(
    loop: RLLoop, algorithm: Algorithm, rollouts: Rollouts, part: Minibatch, beta: float
) -> tuple[Cause, str]:
    """The cause of a loss or gradient that is not finite, and the sequence that it comes from."""
    cause = loop.learner.cause_of(algorithm, part.batch, beta)
    if cause.sequence is None:
        return cause, ""
    beyond = cause.sequence - len(part.places)
    if beyond >= 0:
        return cause, f"demonstration {beyond} of the optimizer step"
    prompts = [group.prompt.id for group in rollouts.groups for _ in group.completions]
    place = part.places[cause.sequence]
    return cause, f"sequence {place} (prompt {prompts[place]!r})"


def _learnable(loop: RLLoop, rollouts: Rollouts) -> list[int]:
    """The sequences that are in the loss.

    Truncated ones are left out if the recipe masks them; those without a reward are left out unless
    the advantage compares a group, which gives them 0, or reads no reward.
    """
    algorithm = loop.algorithm
    needed = algorithm.needs_reward and not algorithm.needs_groups
    results = [v for judged in rollouts.results for v in judged]
    completions = [c for group in rollouts.groups for c in group.completions]
    keep = []
    for i, (completion, result) in enumerate(zip(completions, results, strict=True)):
        cut = loop.loss.mask_truncated and completion.finish == "length"
        unrewarded = needed and result.reward is None
        if not cut and not unrewarded and completion.written.any():
            keep.append(i)
    return keep


@torch.no_grad()
def _before_update(batch: Batch, estimates: Estimates) -> dict[str, float]:
    """Metrics of the policy, the teacher and the value model before the update."""
    metrics: dict[str, float] = {}
    old_N, reference_N = batch.old_log_prob_N, batch.reference_log_prob_N
    if old_N is not None and reference_N is not None:
        k1_N = divergences.k1(old_N, reference_N)
        metrics["kl/reference"] = metrics["kl"] = float(k1_N.mean())
        metrics["kl/sequence"] = float(k1_N.sum()) / batch.sequences
    if old_N is not None and batch.teacher_log_prob_N is not None:
        metrics["teacher/kl"] = float(divergences.k1(old_N, batch.teacher_log_prob_N).mean())
    return {**metrics, **value_metrics(batch, estimates)}


@torch.no_grad()
def _engine_difference(
    config: LossConfig,
    batch: Batch,
    taken: Sequence[tuple[Minibatch, Losses]],
) -> dict[str, float]:
    """How far the log-probabilities of the trainer are from the engine's, before the update, and
    what that costs.

    If the trainer did not score the policy before the update, the first update that was taken
    did: until then the weights are those before it. Its tokens are then all of the batch, or those
    of its mini-batch if the engine's log-probabilities stand in for the trainer's.
    """
    if config.score_old:
        trainer_N = batch.old_log_prob_N
        assert trainer_N is not None
    elif taken:
        part, losses = taken[0]
        rollouts = part.batch.actions.select(range(len(part.places)))  # no demonstrations
        trainer_N, batch = losses.tokens["log_probs"], rollouts
    else:
        return {}
    engine_N = batch.engine_log_prob_N.to(trainer_N)
    gap_N, lengths_S = (trainer_N - engine_N).abs(), batch.lengths_S
    sums_S = segment_sum(trainer_N - engine_N, lengths_S)
    weight_N, weight_S = ratios.exponential(trainer_N - engine_N), ratios.exponential(sums_S)
    found = {
        "sampling/sampling_logp_difference/mean": gap_N.mean(),
        "sampling/sampling_logp_difference/max": gap_N.max(),
        "sampling/kl/k1": divergences.k1(engine_N, trainer_N).mean(),
        "sampling/kl/k3": divergences.k3(engine_N, trainer_N).mean(),
        "sampling/effective_sample_size": corrections.effective_sample_size(weight_N),
        "sampling/chi_squared/token": corrections.chi_squared(weight_N),
        "sampling/chi_squared/sequence": corrections.chi_squared(weight_S),
        "sampling/perplexity_ratio": corrections.perplexity_ratio(engine_N, trainer_N, lengths_S),
    }
    return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True))


@torch.no_grad()
def _corrected(algorithm: Algorithm, batches: Sequence[Minibatch]) -> dict[str, float]:
    """The weights that corrections gave the tokens of the mini-batches, and how many they cut."""
    weights = [p.batch.correction_N for p in batches if p.batch.correction_N is not None]
    if not weights:
        return {}
    weight_N = torch.cat(weights)
    cut_N = torch.cat([limited(algorithm, part.batch.actions) for part in batches])
    found = torch.stack([cut_N.to(weight_N).mean(), (weight_N == 0).to(weight_N).mean(),
                         weight_N.mean()])  # fmt: skip
    names = ("clipped", "masked", "mean")
    return {f"{WEIGHTS}/{name}": value for name, value in zip(names, found.tolist(), strict=True)}


def _divergence_now(loop: RLLoop, batches: Sequence[Batch]) -> float:
    """KL(old‖π), token mean, of the updated policy (arXiv:1707.06347 §4)."""
    total, count = 0.0, 0
    for part in batches:
        now = loop.learner.score(part, old=True, reference=False, others=False)
        assert part.old_log_prob_N is not None
        assert now.old_log_prob_N is not None
        total += float(divergences.k3(part.old_log_prob_N, now.old_log_prob_N).sum())
        count += part.target_N.numel()
    return total / count


@torch.no_grad()
def _token_values(batch: Batch, updated: UpdateResult) -> dict[str, Tensor]:
    """The values of a step's tokens, (N,), by their name in its record; 0 for sequences left out.

    Terms of the loss are divided by the number of updates, so that their sum over all tokens is the
    metric `loss`; ratios, divergences and entropies are means over the updates that a token was in.
    """
    device, count = batch.target_N.device, len(batch.target_N)
    advantage_N = torch.zeros(count, device=device)
    for part in updated.minibatches:
        advantage_N[batch.action_index(part.places)] = part.batch.advantage_N.to(advantage_N)
    sums: dict[str, Tensor] = {}
    times_N = torch.zeros(count, device=device)
    for part, tokens in updated.tokens:
        index_K = batch.action_index(part.places)
        times_N[index_K] += 1
        for name, value_K in tokens.items():
            if name == "log_probs":  # the record has those that were sampled with
                continue
            sums.setdefault(name, torch.zeros(count, device=device))[index_K] += value_K
    updates = len(updated.tokens)
    means = {
        name: sum_N / (updates if name.startswith(LOSS) else times_N.clamp(min=1))
        for name, sum_N in sums.items()
    }
    scored = {
        "old_log_probs": batch.old_log_prob_N,
        "reference_log_probs": batch.reference_log_prob_N,
        "teacher_log_probs": batch.teacher_log_prob_N,
        "values": batch.value_N,
    }
    present = {name: value_N for name, value_N in scored.items() if value_N is not None}
    return {**present, "advantages": advantage_N, **means}
