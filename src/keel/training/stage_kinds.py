"""The kinds of stages: for each, the function that builds its parts and runs its loop.

A new kind takes its configuration (a `keel.config.stage.StageConfig`, in the union
`keel.config.schema.Stage`) and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from keel.config.entry import load_entry
from keel.config.objective import explain_stage
from keel.config.schema import RLStage, SFTStage
from keel.config.seeds import derive
from keel.engines.registry import build_engine
from keel.learn.optimizer import AdamW, trainable
from keel.models.policy import frozen_copy
from keel.rewards.judge.reward import Judge
from keel.runs.records import update_run_json
from keel.training import rl, sft
from keel.training.evaluate import Evaluator
from keel.training.plots import plot_over_optimisation, plot_rewards, titles
from keel.training.preference_stages import (
    train_dpo,
    train_process_reward_model,
    train_reward_model,
)
from keel.training.prefetch import RolloutPrefetcher, read_pending
from keel.training.rollout import Sampler, collect
from keel.training.setup import (
    RunContext,
    build_learner,
    load_rewards,
    open_prompts,
    reward_context,
    scorer,
    token_budget,
)
from keel.training.state import Progress, restore_optimizers


def train_sft(run: RunContext, stage: SFTStage, progress: Progress) -> Progress:
    """Supervised fine-tuning."""
    seed = derive(run.recipe.seed, stage.name)
    optimizer = AdamW(trainable(run.policy), stage.optimizer)
    if run.resume_from is not None:
        restore_optimizers(run.resume_from, {"optimizer": optimizer})
    source = open_prompts(
        run, stage.name, stage.tasks, stage.prompts, seed, max_tokens=1, state=progress.stream
    )
    parts = sft.Imitation(
        stage=stage,
        policy=run.policy,
        optimizer=optimizer,
        budget=token_budget(stage, progress, run.writer),
        stream=source.stream,
        tasks=source.tasks,
        demonstrate=load_entry(stage.demonstration, "demonstration"),
        writer=run.writer,
        seed=seed,
    )
    return sft.run(parts, progress)


def train_rl(run: RunContext, stage: RLStage, progress: Progress) -> Progress:
    """Reinforcement learning; plots the reward curve at its end."""
    recipe, writer = run.recipe, run.writer
    seed = derive(recipe.seed, stage.name)
    # With prefetched rollouts the engine has weights of its own; copied before the learner adds
    # the reference's adapter to the policy.
    sampled_with = frozen_copy(run.policy.model) if stage.rollout.async_level else run.policy.model
    learner = build_learner(
        stage,
        recipe.model,
        run.policy,
        seed,
        token_budget(stage, progress, writer),
        run.resume_from,
    )
    if run.resume_from is None and stage.algorithm.divergence is not None:
        progress = replace(progress, beta=stage.algorithm.divergence.beta)
    objective = explain_stage(stage, lora=recipe.model.lora is not None)
    update_run_json(writer.folder, {"objective": objective.unicode()})
    if stage.ratio_stays_one and run.resume_from is None:
        writer.note(
            f"{stage.name}: with one optimizer step a batch (epochs = 1, minibatches = 1) the "
            "importance ratio stays 1, so neither its bounds nor a divergence to the old policy "
            "act: set minibatches or epochs higher"
        )
    loop = build_loop(run, stage, learner, sampled_with, progress, seed)
    with closing(loop.sampler.scorer):
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
    """What a judge has cost, evaluations and earlier runs with the same cache among it."""
    account = judge.account()
    lost = f", {account.lost_cost} on requests without an answer" if account.lost else ""
    return f"judge {judge.options.label!r}: {account.answers} answers for {account.spent}{lost}"


def build_loop(
    run: RunContext,
    stage: RLStage,
    learner: rl.Learner,
    model: PreTrainedModel,
    progress: Progress,
    seed: int,
) -> rl.Loop:
    """The loop of a stage, with its tasks, rewards and engines; `model` has the weights that
    rollouts are sampled with."""
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
    functions = load_rewards(stage.rewards, reward_context(run.recipe, run.folder, policy))
    scored = partial(scorer, stage.rewards, functions, source.tasks, max_tokens=rollout.max_tokens)
    engine = partial(
        build_engine,
        rollout.engine,
        tokenizer=policy.tokenizer,
        max_rows=rollout.max_rows,
        autocast=policy.autocast,
    )
    sampler = Sampler(
        engine=engine(model=model, dtype=rollout.dtype),
        tokenizer=policy.tokenizer,
        tasks=source.tasks,
        stream=source.stream,
        scorer=scored(overlong_buffer=rollout.overlong_buffer),
        choice=rollout,
        seed=seed,
    )
    judge = scored()
    prompts = source.heldout(stage.evaluation.prompts)
    judge.check(prompts)
    # Evaluation is of the policy itself, not of a rounded or an earlier copy.
    exact = replace(sampler, engine=engine(model=policy.model))
    evaluator = Evaluator(exact, judge, prompts, stage.evaluation) if prompts else None
    prefetcher = RolloutPrefetcher(
        partial(collect, sampler, stage.algorithm),
        ahead=rollout.async_level > 0,
        pending=read_pending(run.resume_from),
    )
    return rl.Loop(stage, learner, sampler, prefetcher, evaluator, run.writer, seed)


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
