"""The loop of reinforcement learning, readable in one sitting.

task.prompts → engine.sample → rewards.score → score (old policy, reference, values) → estimate
  (advantages) → update (epochs, mini-batches, micro-batches) → engine.sync → record
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from keel.config.schema import RLStage
from keel.config.seeds import derive
from keel.learn.advantages import estimate, outcome
from keel.learn.batch import Batch, Estimates, TrainBatch, from_groups
from keel.learn.finite import NotFinite
from keel.learn.learner import Learner, cause_of, update
from keel.learn.loss import prepare
from keel.learn.optimizer import learning_rate
from keel.learn.token_budget import LESS, oom_context
from keel.objective import divergences
from keel.objective.value import explained_variance
from keel.runs.writer import RunWriter, due
from keel.training import non_finite as faults
from keel.training.evaluate import Evaluator
from keel.training.evaluate import metrics as evaluation_metrics
from keel.training.prefetch import RolloutPrefetcher
from keel.training.rollout import Rollouts, Sampler
from keel.training.rollout_records import rollout_rows
from keel.training.state import Progress, State


@dataclass(frozen=True, eq=False)
class Loop:
    """The parts of a stage; none of them is replaced while it runs."""

    stage: RLStage
    learner: Learner
    sampler: Sampler
    prefetcher: RolloutPrefetcher
    evaluator: Evaluator | None
    writer: RunWriter
    seed: int


@dataclass(frozen=True, eq=False)
class StepResult:
    """A step's rollouts, the batch and the advantages it was trained on, and its metrics."""

    rollouts: Rollouts
    batch: Batch | None
    advantage_N: Tensor | None
    metrics: dict[str, float]
    beta: float
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class Minibatch:
    """The sequences of a batch that one optimizer step is on, by their places in it."""

    places: Sequence[int]
    batch: TrainBatch[Batch]


@dataclass(frozen=True, eq=False)
class UpdateResult:
    """The mini-batches of a step and the metrics of the updates on them.

    `skipped` counts the optimizer steps that were not taken because they were not finite.
    """

    minibatches: Sequence[Minibatch]
    metrics: dict[str, float]
    skipped: int = 0


def run(loop: Loop, progress: Progress) -> Progress:
    """From `progress` to the last step of the stage, or until the run is asked to stop."""
    stage, writer = loop.stage, loop.writer
    if progress.before is None and loop.evaluator is not None and not writer.interrupted:
        result = loop.evaluator(progress.step)
        writer.evaluated(progress, result, when="before")
        progress = replace(progress, before=result)
    while progress.step < stage.steps and not writer.interrupted:
        start = time.perf_counter()
        number = progress.step + 1
        made = take_step(loop, progress, number)
        progress = replace(
            progress,
            step=number,
            beta=made.beta,
            stream=loop.sampler.stream.state(),
            tokens=progress.tokens + int(made.metrics["step/tokens"]),
            token_budget=loop.learner.budget.found,
            skipped=progress.skipped + made.skipped,
        )
        if stage.on_nonfinite == "skip":
            made.metrics["steps_skipped"] = float(progress.skipped)
        made.metrics["num_tokens"] = float(progress.tokens)
        progress = _evaluate(loop, progress, made)
        seconds = time.perf_counter() - start
        with writer.clock("record"):
            wanted = due(stage.rollouts_every, number)
            rows = rollout_rows(made.rollouts, made.batch, made.advantage_N) if wanted else []
        writer.recorded(progress, made.metrics, rows, seconds)
        if writer.checkpoint_due(progress, stage.steps, stage.checkpoints):
            save(loop, progress)
    if writer.interrupted and progress.step == 0:
        save(loop, progress)
    return progress


def take_step(loop: Loop, progress: Progress, number: int) -> StepResult:
    """One step: rollouts with their rewards, the updates on them, and the engines' new weights."""
    stage, learner, clock, beta = loop.stage, loop.learner, loop.writer.clock, progress.beta
    with clock("rollout"):
        rollouts = loop.prefetcher(number)
    metrics = {**rollouts.metrics, "step/tokens": 0.0}
    with loop.prefetcher.prefetch(number + 1, stage.steps):
        if not rollouts.groups:
            loop.writer.note(f"step {number}: no group had anything to learn from")
            return StepResult(rollouts, None, None, metrics, beta)
        with clock("score"):
            batch = score(loop, rollouts)
            rewards = outcome(rollouts.groups, rollouts.verdicts, rollouts.greedy)
            estimates = estimate(stage.algorithm, batch, rewards, beta)
        with clock("update"):
            updated = update_models(loop, batch, estimates, rollouts, progress, number)
        metrics |= updated.metrics
        metrics["step/tokens"] = float(sum(batch.input_lengths))
        if number > value_warm_up(stage):  # before, the policy did not move
            beta = adapted(loop, updated.minibatches, metrics, beta)
        every = stage.reference.reset_every
        if learner.reference is not None and every is not None and number % every == 0:
            learner.reference.refresh(learner.policy)
    with clock("sync"):
        sync(loop)
    advantage_N = _trained_advantages(batch, updated.minibatches)
    return StepResult(rollouts, batch, advantage_N, metrics, beta, updated.skipped)


@oom_context("the engine took the weights over", LESS)
def sync(loop: Loop) -> None:
    """Give the engines of rollouts and of evaluation the current weights."""
    named = loop.learner.policy.model.named_parameters()
    weights = {name: weight for name, weight in named if weight.requires_grad}
    loop.sampler.engine.sync(weights)
    if loop.evaluator is not None:
        loop.evaluator.sampler.engine.sync(weights)


def score(loop: Loop, rollouts: Rollouts) -> Batch:
    """The rollouts as a batch, with the scores that the algorithm needs before the first update."""
    stage, learner, algorithm = loop.stage, loop.learner, loop.stage.algorithm
    batch = from_groups(rollouts.groups, learner.policy.device)
    if stage.rollout.old_log_probs == "engine":
        batch = replace(batch, old_log_prob_N=batch.engine_log_prob_N)
        return learner.score(batch, old=False, reference=stage.keeps_reference)
    many = stage.epochs * stage.minibatches > 1
    adaptive = algorithm.divergence is not None and algorithm.divergence.adaptive is not None
    penalised = algorithm.reward_divergence is not None
    old = many or adaptive or penalised or stage.reference.measured
    return learner.score(batch, old=old, reference=stage.keeps_reference)


def update_models(
    loop: Loop,
    batch: Batch,
    estimates: Estimates,
    rollouts: Rollouts,
    progress: Progress,
    number: int,
) -> UpdateResult:
    """The optimizer steps on a batch: its mini-batches, once in every epoch."""
    stage, algorithm = loop.stage, loop.stage.algorithm
    keep = _learnable(stage, rollouts)
    if not keep:
        return UpdateResult([], {})
    parts = minibatches(stage, batch, estimates, keep, derive(loop.seed, "minibatches", number))
    warm_up = value_warm_up(stage)
    # The policy's schedule begins where the value model's warm-up ends.
    rate = learning_rate(stage.optimizer, number - 1 - warm_up, stage.steps - warm_up)
    rates = (
        None if number <= warm_up else rate,
        learning_rate(stage.value.optimizer or stage.optimizer, number - 1, stage.steps),
    )
    taken: list[dict[str, float]] = []
    skipped = 0
    for at, part in enumerate([*parts] * stage.epochs):
        try:
            taken.append(update(loop.learner, algorithm, part.batch, progress.beta, rates))
        except NotFinite as error:
            met = faults.NonFiniteStep(
                loop.writer.folder.stages[progress.stage],
                number,
                at,
                error.names,
                progress.skipped + skipped,
                loop.learner.optimizer.began,
            )
            _not_taken(loop, rollouts, part, met, progress.beta, error)
            skipped += 1
    metrics = {name: float(np.mean([m[name] for m in taken])) for name in taken[0]} if taken else {}
    kept = estimates.select(batch.action_index(keep))
    watched = {
        **_before_update(batch.select(keep), kept),
        **metrics,
        "learning_rate": rates[0] or 0.0,
        **({} if loop.learner.value_optimizer is None else {"value/learning_rate": rates[1]}),
        "beta": progress.beta,
    }
    return UpdateResult(parts, watched, skipped)


def minibatches(
    stage: RLStage, batch: Batch, estimates: Estimates, keep: Sequence[int], seed: int
) -> list[Minibatch]:
    """A batch cut at random into mini-batches, of whose sequences only those of `keep` are in the
    loss; one without any is left out."""
    every = range(batch.sequences)
    rng = np.random.default_rng(seed)
    order = rng.permutation(every).tolist() if stage.minibatches > 1 else every
    # In order again, so that answers to one prompt are neighbours: it is then computed once.
    chunks = [sorted(chunk.tolist()) for chunk in np.array_split(order, stage.minibatches)]
    inside = frozenset(keep)
    return [
        minibatch_of(stage, batch, estimates, chunk, inside)
        for chunk in chunks
        if inside & set(chunk)
    ]


def value_warm_up(stage: RLStage) -> int:
    """The steps in which only the value model learns; 0 where there is none."""
    return 0 if stage.algorithm.value is None else stage.value.warmup_steps


def adapted(
    loop: Loop,
    parts: Sequence[Minibatch],
    metrics: dict[str, float],
    beta: float,
) -> float:
    """β for the next step: fixed, or by PPO's or Ziegler's rule."""
    divergence = loop.stage.algorithm.divergence
    if divergence is None or divergence.adaptive is None or not parts:
        return beta
    rule = divergence.adaptive
    if rule.rule == "ziegler":
        sequences = sum(part.batch.sequences for part in parts)
        if not math.isfinite(metrics["kl/sequence"]):
            return beta
        return divergences.adapt_ziegler(
            beta,
            kl=metrics["kl/sequence"],
            target=rule.target,
            horizon=rule.horizon,
            sequences=sequences,
        )
    kl = metrics["kl/after"] = _divergence_now(loop, [part.batch.actions for part in parts])
    if not math.isfinite(kl):
        return beta
    return divergences.adapt_ppo(beta, kl=kl, target=rule.target)


@oom_context("a checkpoint was written", LESS)
def save(loop: Loop, progress: Progress) -> None:
    """Leave a checkpoint."""
    stage, state = loop.stage, state_of(loop, progress)
    loop.writer.checkpoint(progress, state.save, stage.checkpoints, stage.steps)


def state_of(loop: Loop, progress: Progress) -> State:
    """Everything that later steps depend on."""
    learner = loop.learner
    return State(
        progress,
        learner.policy,
        learner.optimizers,
        learner.modules,
        learner.reference,
        loop.prefetcher.pending,
    )


# ---------------------------------------------------------------- details


def _not_taken(
    loop: Loop,
    rollouts: Rollouts,
    part: Minibatch,
    met: faults.NonFiniteStep,
    beta: float,
    error: NotFinite,
) -> None:
    """Report an optimizer step that was not taken: its cause, and its batch in the run folder."""
    choice, optimizers = loop.stage.on_nonfinite, loop.learner.optimizers.values()
    parameters = [pair for optimizer in optimizers for pair in optimizer.parameters]
    if not faults.searched(loop.writer, met, choice, parameters):
        return
    cause = cause_of(loop.learner, loop.stage.algorithm, part.batch, beta)
    where = ""
    if cause.sequence is not None:
        prompts = [group.prompt.id for group in rollouts.groups for _ in group.completions]
        place = part.places[cause.sequence]
        where = f"sequence {place} (prompt {prompts[place]!r})"
    faults.kept(
        loop.writer,
        met.fault(cause, where),
        choice,
        lambda folder: faults.write_batch(folder, part.batch),
        error,
    )


def minibatch_of(
    stage: RLStage, batch: Batch, estimates: Estimates, chunk: list[int], keep: frozenset[int]
) -> Minibatch:
    """The sequences `chunk` of a batch, of which those of `keep` are in the loss."""
    inside = [i for i, place in enumerate(chunk) if place in keep]
    part = prepare(
        stage.algorithm,
        batch.select(chunk),
        estimates.select(batch.action_index(chunk)),
        stage.rollout.max_tokens,
        inside,
    )
    return Minibatch([chunk[i] for i in inside], part)


def _learnable(stage: RLStage, rollouts: Rollouts) -> list[int]:
    """The sequences that are in the loss.

    Truncated ones are not where the recipe masks them, nor those without a reward where the
    advantage does not compare a group (which gives them 0).
    """
    verdicts = [v for judged in rollouts.verdicts for v in judged]
    completions = [c for group in rollouts.groups for c in group.completions]
    keep = []
    for i, (completion, verdict) in enumerate(zip(completions, verdicts, strict=True)):
        cut = stage.rollout.mask_truncated and completion.finish == "length"
        unrewarded = verdict.reward is None and not stage.algorithm.needs_groups
        if not cut and not unrewarded and completion.written.any():
            keep.append(i)
    return keep


@torch.no_grad()
def _before_update(batch: Batch, estimates: Estimates) -> dict[str, float]:
    """Metrics of the policy and the value model as they were before the update."""
    metrics: dict[str, float] = {}
    old_N, reference_N = batch.old_log_prob_N, batch.reference_log_prob_N
    if old_N is not None and reference_N is not None:
        k1_N = divergences.k1(old_N, reference_N)
        metrics["kl/reference"] = metrics["kl"] = float(k1_N.mean())
        metrics["kl/sequence"] = float(k1_N.sum()) / batch.sequences
    if old_N is not None:
        gap_N = (old_N - batch.engine_log_prob_N.to(old_N)).abs()
        metrics["sampling/sampling_logp_difference/mean"] = float(gap_N.mean())
        metrics["sampling/sampling_logp_difference/max"] = float(gap_N.max())
    value_N, return_N = batch.value_N, estimates.return_N
    if value_N is not None and return_N is not None:
        metrics["value/mean"] = float(value_N.mean())
        metrics["value/explained_variance"] = explained_variance(value_N, return_N)
    return metrics


def _divergence_now(loop: Loop, parts: Sequence[Batch]) -> float:
    """KL(old‖π), token mean, of the updated policy (arXiv:1707.06347 §4)."""
    total, count = 0.0, 0
    for part in parts:
        now = loop.learner.score(part, old=True, reference=False, values=False)
        assert part.old_log_prob_N is not None
        assert now.old_log_prob_N is not None
        total += float(divergences.k3(part.old_log_prob_N, now.old_log_prob_N).sum())
        count += part.target_N.numel()
    return total / count


def _trained_advantages(batch: Batch, parts: Sequence[Minibatch]) -> Tensor:
    """The advantages in the loss, whitened where it is so; 0 where a sequence was left out."""
    advantage_N = torch.zeros(
        len(batch.target_N), dtype=torch.float64, device=batch.target_N.device
    )
    for part in parts:
        advantage_N[batch.action_index(part.places)] = part.batch.advantage_N
    return advantage_N


def _evaluate(loop: Loop, progress: Progress, made: StepResult) -> Progress:
    every, last = loop.stage.evaluation.every, progress.step == loop.stage.steps
    if loop.evaluator is None or not (last or due(every, progress.step)):
        return progress
    result = loop.evaluator(progress.step)
    made.metrics.update(evaluation_metrics(result))
    loop.writer.evaluated(progress, result, when="after" if last else "during")
    mean = result["mean"]  # None where no reward gave a value
    if mean is not None and (progress.best is None or mean >= progress.best):
        progress = replace(progress, best=result["mean"], best_step=progress.step)
    return progress
