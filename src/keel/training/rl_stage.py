"""A stage of reinforcement learning: its parts, on one process or several, and its plots."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from keel.analysis.overoptimisation import optimisation_of
from keel.analysis.plots import stage_curve
from keel.analysis.reward_plots import over_optimisation_picture
from keel.cluster.parts import PlacedStage
from keel.config.fields import derive
from keel.config.rl import RolloutStage
from keel.config.schema import Recipe
from keel.config.sources import LEARNED
from keel.engines.requests import check_requests
from keel.models.loading import describe_model
from keel.platform.files import make_folder
from keel.rewards.judge.reward import Judge
from keel.runs.reader import load
from keel.runs.writer import RunWriter, update_run_json
from keel.training import rl
from keel.training.evaluator import Evaluator
from keel.training.evaluator import metrics as evaluation_metrics
from keel.training.loop import Loop
from keel.training.placed import placement, stage_parts
from keel.training.prefetch import (
    RolloutPrefetcher,
    begin_alone,
    begin_pinned,
    read_pending,
)
from keel.training.rollout import Sampler
from keel.training.setup import (
    RunContext,
    build_sampler,
    load_rewards,
    loss_config,
    open_prompts,
    reward_context,
    schedule,
    scorer,
)
from keel.training.state import Progress


def placed(
    run: RunContext, stage: RolloutStage, progress: Progress
) -> AbstractContextManager[PlacedStage]:
    """The parts of a stage where `cluster` puts them, new or restored, while the block runs."""
    return placement(run.recipe).place(stage_parts(run, stage, progress))


def begin(run: RunContext, stage: RolloutStage, progress: Progress) -> Progress:
    """Record what the stage optimises; a new stage shows it, and has the first β."""
    writer = run.writer
    objective = stage.explain(lora=run.recipe.model.lora is not None)
    update_run_json(writer.folder, {"objective": objective.unicode()})
    if run.resume_from is not None:
        return progress
    formula = "; ".join(line.unicode for line in objective.objective)
    writer.callbacks.note(f"{stage.name} optimises {formula}")
    if stage.ratio_stays_one:
        writer.note(
            f"{stage.name}: with one optimizer step a batch (epochs = 1, minibatches = 1) the "
            "importance ratio stays 1, so neither its bounds nor a divergence to the old policy "
            "act: set minibatches or epochs higher"
        )
    divergence = stage.algorithm.divergence
    return progress if divergence is None else replace(progress, beta=divergence.beta)


def loop_of(stage: RolloutStage, parts: rl.RLParts) -> Loop:
    """The loop over the steps of a stage."""
    return Loop(
        steps=stage.steps,
        checkpoints=stage.checkpoints,
        on_nonfinite=stage.on_nonfinite,
        budget=parts.learner.budget,
        writer=parts.writer,
        take_step=partial(rl.take_step, parts),
        state=partial(rl.state_of, parts),
        evaluate=parts.evaluator,
        evaluate_every=stage.evaluation.every,
        rollouts_every=stage.rollouts_every,
    )


def show(run: RunContext, stage: RolloutStage, parts: rl.RLParts, progress: Progress) -> None:
    """Plot the rewards of a stage that has ended, and learned rewards against those watched."""
    title, subtitle = titles(run.recipe, stage, run.policy.model)
    plot_rewards(run.writer, stage, progress, title, subtitle)
    names = [function.name for function in parts.sampler.scorer.functions]
    plot_over_optimisation(run.writer, stage, names, title)


def note_costs(stage: RolloutStage, parts: rl.RLParts) -> None:
    """A line for each judge of the stage, with its cost."""
    for function in parts.sampler.scorer.functions:
        if isinstance(function.function, Judge):
            parts.writer.note(f"{stage.name}: {paid(function.function)}")


def paid(judge: Judge) -> str:
    """The cost of a judge, with evaluations and earlier runs that share its cache."""
    account = judge.account()
    return f"judge {judge.options.label!r}: {account.answers} answers for {account.spent}"


def build_parts(
    run: RunContext, stage: RolloutStage, models: PlacedStage, progress: Progress
) -> rl.RLParts:
    """The parts of a stage, with its tasks, rewards and engines."""
    seed = derive(run.recipe.seed, stage.name)
    policy, rollout = run.policy, stage.rollout
    source = open_prompts(
        run,
        stage.name,
        stage.tasks,
        stage.prompts,
        seed,
        max_tokens=rollout.max_tokens,
        state=progress.stream,
    )
    functions = load_rewards(
        stage.rewards, reward_context(run.recipe, run.folder, policy), models.rewards
    )
    scored = partial(
        scorer,
        stage.rewards,
        functions,
        source.tasks,
        max_tokens=rollout.max_tokens,
        needed=stage.algorithm.needs_reward,
        stop=rollout.stop,
    )
    shaped = scored(overlong_buffer=rollout.overlong_buffer)
    sampler = build_sampler(
        policy,
        source,
        shaped,
        rollout,
        seed,
        step=progress.step,
        engine=models.engine,
    )
    check_requests(stage.sampling, sampler.engine.capabilities)
    evaluated = scored(loop=shaped.loop)
    prompts = source.validation(stage.evaluation.prompts)
    evaluated.check(prompts)
    # Evaluation is of the policy itself, not of a rounded copy; but one server is enough.
    exact = sampler
    if rollout.dtype != "model" and sampler.engine.capabilities.in_process:
        exact = build_sampler(policy, source, shaped, rollout, seed, step=progress.step)
    evaluator = Evaluator(exact, evaluated, prompts, stage.evaluation) if prompts else None
    return rl.RLParts(
        algorithm=stage.algorithm,
        loss=loss_config(stage),
        schedule=schedule(stage),
        on_nonfinite=stage.on_nonfinite,
        learner=models.learner,
        sampler=sampler,
        prefetcher=build_prefetcher(stage, sampler, run.resume_from),
        evaluator=evaluator,
        writer=run.writer,
        seed=seed,
    )


def build_prefetcher(
    stage: RolloutStage, sampler: Sampler, resume_from: Path | None
) -> RolloutPrefetcher:
    """What samples a stage's rollouts ahead; several steps at once where the engine can."""
    level = stage.rollout.async_level
    # With dynamic sampling a step decides which prompts are left for the next.
    in_order = stage.rollout.dynamic_sampling or level == 0
    at_once = sampler.engine.capabilities.pins and not in_order
    begin = partial(begin_pinned if at_once else begin_alone, sampler, stage.algorithm)
    return RolloutPrefetcher(begin, level, at_once, read_pending(resume_from))


def titles(recipe: Recipe, stage: RolloutStage, model: PreTrainedModel) -> tuple[str, str]:
    """A plot's title (recipe and tasks) and subtitle (algorithm, model with its size, seed)."""
    tasks = ", ".join(Path(task.path).name if task.path else task.name for task in stage.tasks)
    algorithm = stage.algorithm.preset or "an algorithm of its own"
    return (
        f"{recipe.name}: {tasks}",
        f"{algorithm}, {describe_model(recipe.model, model)}, seed {recipe.seed}",
    )


def plot_rewards(
    writer: RunWriter, stage: RolloutStage, progress: Progress, title: str, subtitle: str
) -> None:
    """The reward over the steps, and validation accuracy, also that before the first step."""
    rows = load(writer.folder.path).metrics(stage.name)
    if rows:
        before = progress.before
        first = {} if before is None else evaluation_metrics(dict(before))
        rows = [{"step": 0, **first}, *rows]
        stage_curve(writer.folder.curve, stage.stage, rows, title, subtitle)


def plot_over_optimisation(
    writer: RunWriter, stage: RolloutStage, names: Sequence[str], title: str
) -> None:
    """Learned rewards, and one of weight 0, against KL, where a stage has both and KL grew."""
    sources = list(zip(names, stage.rewards.functions, strict=False))
    proxies = {n: s.weight for n, s in sources if s.function in LEARNED and s.weight}
    watching = [n for n, s in sources if not s.weight]
    if not proxies or not watching:
        return
    divergence = stage.algorithm.divergence
    held = "" if divergence is None else f", β = {divergence.beta:g}"
    label = f"{stage.algorithm.preset or 'an algorithm of its own'}{held}"
    rows = load(writer.folder.path).metrics(stage.name)
    found = optimisation_of(rows, proxies, watching[0], label)
    if found is not None and found.moved:
        target = writer.folder.pictures / f"{stage.name}-over-optimisation.png"
        make_folder(target.parent)
        subtitle = f"learned from: {', '.join(proxies)}; watching: {watching[0]}"
        over_optimisation_picture([found], target, title, subtitle)
