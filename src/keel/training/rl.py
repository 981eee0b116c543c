"""THE loop of reinforcement learning, readable in one sitting.

task.prompts → engine.sample → rewards.score → measure (reference, values) → estimate
  (advantages, weights) → update (epochs, mini-batches, micro-batches) → engine.sync → record
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from keel.config.schema import RLStage
from keel.config.seeds import derive
from keel.learn.advantages import estimate, outcome
from keel.learn.batch import Batch, from_groups
from keel.learn.finite import NotFinite
from keel.learn.learner import Learner, cause_of, update
from keel.learn.loss import weighed, whitened
from keel.learn.optimizer import learning_rate
from keel.learn.token_budget import LESS, needing_memory
from keel.objective import divergences
from keel.runs.writer import Session, due
from keel.training import non_finite as faults
from keel.training.evaluate import Evaluator
from keel.training.evaluate import metrics as evaluation_metrics
from keel.training.prefetch import RolloutPrefetcher
from keel.training.rollout import Rollouts, Sampler
from keel.training.rollout_records import rollout_rows
from keel.training.state import Progress, State


@dataclass(frozen=True, eq=False)
class Loop:
    """What the loop works with; nothing in it is replaced while it runs."""

    stage: RLStage
    learner: Learner
    sampler: Sampler
    drawing: RolloutPrefetcher
    evaluator: Evaluator | None
    session: Session
    seed: int


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one step made: its rollouts, the batch it learned from and its metrics."""

    rollouts: Rollouts
    batch: Batch | None
    metrics: dict[str, float]
    beta: float
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class Improved:
    """The mini-batches of a step with their places in its batch, and what was learned from them.

    `skipped` counts the optimizer steps that were not taken because they were not finite.
    """

    parts: Sequence[tuple[Sequence[int], Batch]]
    metrics: dict[str, float]
    skipped: int = 0


def run(loop: Loop, progress: Progress) -> Progress:
    """From `progress` to the last step of the stage, or until the run is asked to stop."""
    stage, session = loop.stage, loop.session
    if progress.before is None and loop.evaluator is not None and not session.interrupted:
        result = loop.evaluator(progress.step)
        session.evaluated(progress, result, when="before")
        progress = replace(progress, before=result)
    while progress.step < stage.steps and not session.interrupted:
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
        with session.clock("record"):
            wanted = due(stage.rollouts_every, number)
            rows = rollout_rows(made.rollouts, made.batch) if wanted else []
        session.recorded(progress, made.metrics, rows, seconds)
        if session.checkpoint_due(progress, stage.steps, stage.checkpoints):
            save(loop, progress)
    if session.interrupted and progress.step == 0:
        save(loop, progress)
    return progress


def take_step(loop: Loop, progress: Progress, number: int) -> StepResult:
    """One step: rollouts, judgement, learning, and the engine brought up to date."""
    stage, clock = loop.stage, loop.session.clock
    with clock("rollout"):
        rollouts = loop.drawing(number)
    with loop.drawing.beside(number + 1, stage.steps):
        made = learn(loop, rollouts, progress, number)
    if made.batch is not None:
        with clock("sync"):
            sync(loop)
    return made


def learn(loop: Loop, rollouts: Rollouts, progress: Progress, number: int) -> StepResult:
    """The optimizer steps on a step's rollouts, and what they say of it."""
    stage, learner, clock = loop.stage, loop.learner, loop.session.clock
    metrics = {**rollouts.metrics, "step/tokens": 0.0}
    if not rollouts.groups:
        loop.session.note(f"step {number}: no group had anything to learn from")
        return StepResult(rollouts, None, metrics, progress.beta)
    with clock("measure"):
        batch = measure(loop, rollouts, progress.beta)
    with clock("update"):
        learned = improve(loop, batch, rollouts, progress, number)
    metrics |= learned.metrics
    metrics["step/tokens"] = float(sum(batch.input_lengths))
    beta = progress.beta
    if number > value_warm_up(stage):  # before, the policy did not move
        beta = adapted(loop, learned.parts, metrics, beta)
    every = stage.reference.reset_every
    if learner.reference is not None and every is not None and number % every == 0:
        learner.reference.refresh(learner.policy)
    return StepResult(rollouts, _recorded(batch, learned.parts), metrics, beta, learned.skipped)


@needing_memory("the engine took the weights over", LESS)
def sync(loop: Loop) -> None:
    """Give the engines of rollouts and of evaluation the weights as they are now."""
    named = loop.learner.policy.model.named_parameters()
    weights = {name: weight for name, weight in named if weight.requires_grad}
    loop.sampler.engine.sync(weights)
    if loop.evaluator is not None:
        loop.evaluator.sampler.engine.sync(weights)


def measure(loop: Loop, rollouts: Rollouts, beta: float) -> Batch:
    """The rollouts as a batch, with what the row needs to know before the first update."""
    stage, learner, row = loop.stage, loop.learner, loop.stage.algorithm
    batch = from_groups(rollouts.groups, learner.policy.device)
    on_engine = stage.rollout.old_log_probs == "engine"
    if on_engine:
        batch = replace(batch, old_log_prob_N=batch.engine_log_prob_N)
    many = stage.epochs * stage.minibatches > 1
    adaptive = row.divergence is not None and row.divergence.adaptive is not None
    batch = learner.measure(
        batch,
        old=not on_engine
        and (many or adaptive or row.reward_divergence is not None or stage.reference.measured),
        reference=stage.keeps_reference,
    )
    judged = outcome(rollouts.groups, rollouts.verdicts, rollouts.greedy)
    return estimate(row, batch, judged, beta)


def improve(
    loop: Loop, batch: Batch, rollouts: Rollouts, progress: Progress, number: int
) -> Improved:
    """The optimizer steps on a batch.

    Mini-batches are drawn once a step and walked through in every epoch.
    """
    stage, row = loop.stage, loop.stage.algorithm
    keep = _learnable(stage, rollouts)
    if not keep:
        return Improved([], {})
    rng = np.random.default_rng(derive(loop.seed, "minibatches", number))
    every = range(batch.sequences)
    order = rng.permutation(every).tolist() if stage.minibatches > 1 else every
    # In order again, so that answers to one prompt are neighbours: it is then computed once.
    chunks = [sorted(chunk.tolist()) for chunk in np.array_split(order, stage.minibatches)]
    inside = frozenset(keep)
    parts = [part_of(stage, batch, chunk, inside) for chunk in chunks if inside & set(chunk)]
    warm_up = value_warm_up(stage)
    # The policy's schedule begins where the value model's warm-up ends.
    rate = learning_rate(stage.optimizer, number - 1 - warm_up, stage.steps - warm_up)
    rates = (
        None if number <= warm_up else rate,
        learning_rate(stage.value.optimizer or stage.optimizer, number - 1, stage.steps),
    )
    taken: list[dict[str, float]] = []
    skipped = 0
    for at, (chosen, part) in enumerate(parts * stage.epochs):
        try:
            taken.append(update(loop.learner, row, part, progress.beta, rates))
        except NotFinite as error:
            met = faults.NonFiniteStep(
                loop.session.folder.stages[progress.stage],
                number,
                at,
                error.names,
                progress.skipped + skipped,
                loop.learner.optimizer.began,
            )
            _not_taken(loop, rollouts, part, chosen, met, progress.beta, error)
            skipped += 1
    metrics = {name: float(np.mean([m[name] for m in taken])) for name in taken[0]} if taken else {}
    watched = {
        **_state_of(batch.select(keep)),
        **metrics,
        "learning_rate": rates[0] or 0.0,
        **({} if loop.learner.value_optimizer is None else {"value/learning_rate": rates[1]}),
        "beta": progress.beta,
    }
    return Improved(parts, watched, skipped)


def value_warm_up(stage: RLStage) -> int:
    """The steps in which only the value model learns; 0 where there is none."""
    return 0 if stage.algorithm.value is None else stage.value.warmup_steps


def adapted(
    loop: Loop,
    parts: Sequence[tuple[Sequence[int], Batch]],
    metrics: dict[str, float],
    beta: float,
) -> float:
    """β for the next step: fixed, or after PPO's or Ziegler's rule."""
    divergence = loop.stage.algorithm.divergence
    if divergence is None or divergence.adaptive is None or not parts:
        return beta
    rule = divergence.adaptive
    if rule.rule == "ziegler":
        sequences = sum(part.sequences for _, part in parts)
        if not math.isfinite(metrics["kl/sequence"]):
            return beta
        return divergences.adapt_ziegler(
            beta,
            kl=metrics["kl/sequence"],
            target=rule.target,
            horizon=rule.horizon,
            sequences=sequences,
        )
    kl = metrics["kl/after"] = _divergence_now(loop, [part for _, part in parts])
    if not math.isfinite(kl):
        return beta
    return divergences.adapt_ppo(beta, kl=kl, target=rule.target)


@needing_memory("a checkpoint was written", LESS)
def save(loop: Loop, progress: Progress) -> None:
    """Leave a checkpoint."""
    stage, state = loop.stage, state_of(loop, progress)
    loop.session.checkpoint(progress, state.save, stage.checkpoints, stage.steps)


def state_of(loop: Loop, progress: Progress) -> State:
    """All that decides what comes next."""
    learner = loop.learner
    return State(
        progress,
        learner.policy,
        learner.optimizers,
        learner.modules,
        learner.reference,
        loop.drawing.pending,
    )


# ---------------------------------------------------------------- details


def _not_taken(
    loop: Loop,
    rollouts: Rollouts,
    part: Batch,
    places: Sequence[int],
    met: faults.NonFiniteStep,
    beta: float,
    error: NotFinite,
) -> None:
    """An optimizer step that was not: why, and its batch into the run folder, or a note."""
    choice, optimizers = loop.stage.on_nonfinite, loop.learner.optimizers.values()
    parameters = [pair for optimizer in optimizers for pair in optimizer.parameters]
    if not faults.searched(loop.session, met, choice, parameters):
        return
    cause = cause_of(loop.learner, loop.stage.algorithm, part, beta)
    where = ""
    if cause.sequence is not None:
        prompts = [group.prompt.id for group in rollouts.groups for _ in group.completions]
        place = places[cause.sequence]
        where = f"sequence {place} (prompt {prompts[place]!r})"
    faults.kept(
        loop.session,
        met.fault(cause, where),
        choice,
        lambda folder: faults.write_batch(folder, part),
        error,
    )


def part_of(
    stage: RLStage, batch: Batch, chunk: list[int], keep: frozenset[int]
) -> tuple[Sequence[int], Batch]:
    """A mini-batch: the places of its sequences that enter the loss, and these.

    The others have their place in the normaliser: weights are set before they are left out.
    """
    row = stage.algorithm
    whole = weighed(row, batch.select(chunk), stage.rollout.max_tokens)
    inside = [i for i, place in enumerate(chunk) if place in keep]
    if len(inside) < len(chunk):
        whole = whole.select(inside)
    return [chunk[i] for i in inside], whitened(row, whole)


def _learnable(stage: RLStage, rollouts: Rollouts) -> list[int]:
    """The sequences that enter the loss.

    Out stay truncated ones where the recipe says so and, where the advantage does not compare a
    group (which gives them 0), those that no reward spoke of.
    """
    verdicts = [v for judged in rollouts.verdicts for v in judged]
    completions = [c for group in rollouts.groups for c in group.completions]
    keep = []
    for i, (completion, verdict) in enumerate(zip(completions, verdicts, strict=True)):
        cut = stage.rollout.mask_truncated and completion.finish == "length"
        silent = verdict.reward is None and not stage.algorithm.needs_groups
        if not cut and not silent and completion.written.any():
            keep.append(i)
    return keep


@torch.no_grad()
def _state_of(batch: Batch) -> dict[str, float]:
    """What the batch says of the policy before the update."""
    out: dict[str, float] = {}
    old_N, reference_N = batch.old_log_prob_N, batch.reference_log_prob_N
    if old_N is not None and reference_N is not None:
        k1_N = divergences.k1(old_N, reference_N)
        out["kl/reference"] = out["kl"] = float(k1_N.mean())
        out["kl/sequence"] = float(k1_N.sum()) / batch.sequences
    if old_N is not None:
        gap_N = (old_N - batch.engine_log_prob_N.to(old_N)).abs()
        out["sampling/sampling_logp_difference/mean"] = float(gap_N.mean())
        out["sampling/sampling_logp_difference/max"] = float(gap_N.max())
    if batch.value_N is not None and batch.return_N is not None:
        left = (batch.return_N - batch.value_N).var()
        spread = batch.return_N.var()
        out["value/mean"] = float(batch.value_N.mean())
        out["value/explained_variance"] = float(1 - left / spread) if spread > 0 else 0.0
    return out


def _divergence_now(loop: Loop, parts: Sequence[Batch]) -> float:
    """KL(old‖π), token mean, of the policy as it has become (arXiv:1707.06347 §4)."""
    total, count = 0.0, 0
    for part in parts:
        now = loop.learner.measure(part, old=True, reference=False, values=False)
        assert part.old_log_prob_N is not None
        assert now.old_log_prob_N is not None
        total += float(divergences.k3(part.old_log_prob_N, now.old_log_prob_N).sum())
        count += part.target_N.numel()
    return total / count


def _recorded(batch: Batch, parts: Sequence[tuple[Sequence[int], Batch]]) -> Batch:
    """The batch with the advantages that the loss saw; 0 where a sequence was left out."""
    assert batch.advantage_N is not None
    advantage_N = torch.zeros_like(batch.advantage_N)
    ends = np.cumsum(batch.lengths).tolist()
    for places, part in parts:
        assert part.advantage_N is not None
        pieces = torch.split(part.advantage_N, list(part.lengths))
        for i, piece in zip(places, pieces, strict=True):
            advantage_N[ends[i] - batch.lengths[i] : ends[i]] = piece
    return replace(batch, advantage_N=advantage_N)


def _evaluate(loop: Loop, progress: Progress, made: StepResult) -> Progress:
    every, last = loop.stage.evaluation.every, progress.step == loop.stage.steps
    if loop.evaluator is None or not (last or due(every, progress.step)):
        return progress
    result = loop.evaluator(progress.step)
    made.metrics.update(evaluation_metrics(result))
    loop.session.evaluated(progress, result, when="after" if last else "during")
    mean = result["mean"]  # None where no reward spoke
    if mean is not None and (progress.best is None or mean >= progress.best):
        progress = replace(progress, best=result["mean"], best_step=progress.step)
    return progress
