"""The kinds of stages: for each, the function that builds its parts and runs its loop.

A new kind takes its configuration (a `keel.config.stage.StageConfig`, in the union
`keel.config.schema.Stage`) and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from keel.analysis.overoptimisation import optimisation_of
from keel.analysis.plots import stage_curve
from keel.analysis.reward_plots import over_optimisation_picture
from keel.cluster.ray_token import before_import
from keel.config.entry import load_entry
from keel.config.fields import derive
from keel.config.objective import explain_stage
from keel.config.schema import Recipe, RLStage, SFTStage
from keel.config.sources import LEARNED
from keel.engines.requests import check_requests
from keel.learn.learner import Trainer
from keel.learn.optimizer import AdamW, trainable
from keel.models.loading import describe_model
from keel.models.policy import frozen_copy
from keel.platform.files import make_folder
from keel.rewards.judge.reward import Judge
from keel.runs.reader import load
from keel.runs.writer import RunWriter, update_run_json
from keel.training import rl, supervised
from keel.training.evaluator import Evaluator
from keel.training.evaluator import metrics as evaluation_metrics
from keel.training.preference_stages import (
    train_dpo,
    train_process_reward_model,
    train_reward_model,
)
from keel.training.prefetch import (
    RolloutPrefetcher,
    begin_alone,
    begin_pinned,
    read_pending,
)
from keel.training.rollout import Sampler
from keel.training.setup import (
    RunContext,
    build_learner,
    build_sampler,
    load_rewards,
    loss_config,
    open_prompts,
    reward_context,
    schedule,
    scorer,
    supervised_loop,
    token_budget,
)
from keel.training.sft import Demonstrations
from keel.training.shared import shared_learner
from keel.training.state import Progress, restore_optimizers
from keel.types import Engine

if TYPE_CHECKING:
    from keel.training.remote import RemoteReward


def train_sft(run: RunContext, stage: SFTStage, progress: Progress) -> Progress:
    """Supervised fine-tuning."""
    seed = derive(run.recipe.seed, stage.name)
    optimizer = AdamW(trainable(run.policy), stage.optimizer)
    if run.resume_from is not None:
        restore_optimizers(run.resume_from, {"optimizer": optimizer})
    source = open_prompts(
        run,
        stage.name,
        stage.tasks,
        stage.prompts,
        seed,
        max_tokens=1,
        key="the shortest demonstration",
        state=progress.stream,
    )
    demonstrations = Demonstrations(
        stage=stage.name,
        entry=stage.demonstration,
        demonstrate=load_entry(stage.demonstration, "demonstration"),
        tasks=source.tasks,
        stream=source.stream,
        batch_size=stage.batch_size,
        policy=run.policy,
        seed=seed,
        encoder=source.encoder,
    )
    examples = demonstrations.examples()
    loop = supervised_loop(run, stage, progress, examples=examples, optimizer=optimizer)
    return supervised.run(loop, progress)


def train_rl(run: RunContext, stage: RLStage, progress: Progress) -> Progress:
    """Reinforcement learning; plots the reward curve at its end."""
    recipe, writer = run.recipe, run.writer
    seed = derive(recipe.seed, stage.name)
    if recipe.cluster.ray is not None:
        return _train_with_ray(run, stage, progress, seed)
    # With prefetched rollouts the engine has weights of its own; copied before the learner adds
    # the reference's adapter to the policy.
    sampled_with = frozen_copy(run.policy.model) if stage.rollout.async_level else run.policy.model
    budget = token_budget(stage, progress, writer)
    parts = (recipe.model, run.policy, seed, budget, run.resume_from)
    if recipe.cluster.processes > 1:
        with shared_learner(recipe, stage, *parts[1:]) as (shared, engine):
            return _train_rl(run, stage, progress, shared, sampled_with, seed, engine)
    learner = build_learner(stage, *parts)
    return _train_rl(run, stage, progress, learner, sampled_with, seed)


def _train_with_ray(run: RunContext, stage: RLStage, progress: Progress, seed: int) -> Progress:
    assert run.recipe.cluster.ray is not None
    before_import(run.recipe.cluster.ray)
    from keel.training.remote import remote_stage  # Ray is optional, and takes a second to import

    parts = (run.recipe, stage, run.policy, seed, token_budget(stage, progress, run.writer))
    around = reward_context(run.recipe, run.folder, run.policy)
    rest = (run.resume_from, around, run.writer.note, run.folder.logs)
    with remote_stage(*parts, *rest) as remote:
        model = run.policy.model
        learner, engine = remote.learner, remote.engine
        return _train_rl(run, stage, progress, learner, model, seed, engine, remote.rewards)


def _train_rl(
    run: RunContext,
    stage: RLStage,
    progress: Progress,
    learner: Trainer,
    sampled_with: PreTrainedModel,
    seed: int,
    engine: Engine | None = None,
    rewards: Mapping[int, RemoteReward] | None = None,
) -> Progress:
    recipe, writer = run.recipe, run.writer
    if run.resume_from is None and stage.algorithm.divergence is not None:
        progress = replace(progress, beta=stage.algorithm.divergence.beta)
    objective = explain_stage(stage, lora=recipe.model.lora is not None)
    update_run_json(writer.folder, {"objective": objective.unicode()})
    formula = "; ".join(line.unicode for line in objective.objective)
    if run.resume_from is None:
        writer.callbacks.note(f"{stage.name} optimises {formula}")
    if stage.ratio_stays_one and run.resume_from is None:
        writer.note(
            f"{stage.name}: with one optimizer step a batch (epochs = 1, minibatches = 1) the "
            "importance ratio stays 1, so neither its bounds nor a divergence to the old policy "
            "act: set minibatches or epochs higher"
        )
    loop = build_loop(run, stage, learner, sampled_with, progress, seed, engine, rewards)
    with closing(loop.sampler.scorer), closing(loop.prefetcher):
        progress = rl.run(loop, progress)
        for function in loop.sampler.scorer.functions:
            if isinstance(function.function, Judge):
                writer.note(f"{stage.name}: {paid(function.function)}")
    title, subtitle = titles(recipe, stage, run.policy.model)
    plot_rewards(writer, stage, progress, title, subtitle)
    names = [function.name for function in loop.sampler.scorer.functions]
    plot_over_optimisation(writer, stage, names, title)
    return progress


def paid(judge: Judge) -> str:
    """The cost of a judge, with evaluations and earlier runs that share its cache."""
    account = judge.account()
    return f"judge {judge.options.label!r}: {account.answers} answers for {account.spent}"


def build_loop(
    run: RunContext,
    stage: RLStage,
    learner: Trainer,
    model: PreTrainedModel,
    progress: Progress,
    seed: int,
    engine: Engine | None = None,
    remote: Mapping[int, RemoteReward] | None = None,
) -> rl.Loop:
    """The loop of a stage, with its tasks, rewards and engines; `model` has the weights that
    rollouts are sampled with, unless there is an `engine` for them. The rewards of some places in
    the recipe may be `remote`."""
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
        stage.rewards, reward_context(run.recipe, run.folder, policy), remote or {}
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
        model=model,
        step=progress.step,
        engine=engine,
        log=run.folder.logs / f"{stage.name}-vllm.log",
        note=run.writer.note,
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
    return rl.Loop(
        algorithm=stage.algorithm,
        loss=loss_config(stage),
        schedule=schedule(stage),
        evaluate_every=stage.evaluation.every,
        rollouts_every=stage.rollouts_every,
        checkpoints=stage.checkpoints,
        on_nonfinite=stage.on_nonfinite,
        learner=learner,
        sampler=sampler,
        prefetcher=build_prefetcher(stage, sampler, run.resume_from),
        evaluator=evaluator,
        writer=run.writer,
        seed=seed,
    )


def build_prefetcher(
    stage: RLStage, sampler: Sampler, resume_from: Path | None
) -> RolloutPrefetcher:
    """What samples a stage's rollouts ahead; several steps at once where the engine can."""
    level = stage.rollout.async_level
    # With dynamic sampling a step decides which prompts are left for the next.
    in_order = stage.rollout.dynamic_sampling or level == 0
    at_once = sampler.engine.capabilities.pins and not in_order
    begin = partial(begin_pinned if at_once else begin_alone, sampler, stage.algorithm)
    return RolloutPrefetcher(begin, level, at_once, read_pending(resume_from))


def titles(recipe: Recipe, stage: RLStage, model: PreTrainedModel) -> tuple[str, str]:
    """A plot's title (recipe and tasks) and subtitle (algorithm, model with its size, seed)."""
    tasks = ", ".join(Path(task.path).name if task.path else task.name for task in stage.tasks)
    algorithm = stage.algorithm.preset or "an algorithm of its own"
    return (
        f"{recipe.name}: {tasks}",
        f"{algorithm}, {describe_model(recipe.model, model)}, seed {recipe.seed}",
    )


def plot_rewards(
    writer: RunWriter, stage: RLStage, progress: Progress, title: str, subtitle: str
) -> None:
    """The reward over the steps, and validation accuracy, also that before the first step."""
    rows = load(writer.folder.path).metrics(stage.name)
    if rows:
        before = progress.before
        first = {} if before is None else evaluation_metrics(dict(before))
        rows = [{"step": 0, **first}, *rows]
        stage_curve(writer.folder.curve, stage.stage, rows, title, subtitle)


def plot_over_optimisation(
    writer: RunWriter, stage: RLStage, names: Sequence[str], title: str
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


Run = Callable[[RunContext, Any, Progress], Progress]
"""Runs a stage from `progress` to its end, or until the run is to stop; returns how far it is."""

STAGE_KINDS: Mapping[str, Run] = {
    "sft": train_sft,
    "reward_model": train_reward_model,
    "process_reward_model": train_process_reward_model,
    "dpo": train_dpo,
    "rl": train_rl,
}
"""By the value of `stage` in a recipe."""
