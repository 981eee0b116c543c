"""A recipe from start, or from its newest checkpoint, to its end."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import keel
from keel.algorithms.explain import explain_stage
from keel.config.load import load_recipe, to_toml
from keel.config.schema import Recipe, RLStage, SFTStage
from keel.engines.native import NativeEngine
from keel.models.loading import load_policy
from keel.models.policy import Policy
from keel.rewards import load_reward
from keel.rewards.score import Scorer
from keel.runs import checkpoint
from keel.runs.layout import RunFolder, next_free
from keel.runs.lock import locked
from keel.runs.record import Recorder, truncate_after, update_run_json
from keel.runs.trackers import open_trackers
from keel.tasks.feed import Feed, heldout
from keel.train import rl, sft
from keel.train.build import build_learner, build_tasks
from keel.train.entry import load_demonstration
from keel.train.evaluate import Evaluator
from keel.train.interrupt import Interrupted, catching
from keel.train.rollout import Sampler
from keel.train.seeds import derive
from keel.train.session import Session
from keel.train.state import Progress, read_progress, restore_learner, restore_optimizers, restore_policy
from keel.train.watch import Silent, Watcher
from keel.types import KeelError


@dataclass(frozen=True, eq=False)
class Run:
    """A run in the making: its recipe, its folder and the policy that goes from stage to stage."""

    recipe: Recipe
    session: Session
    policy: Policy
    resume_from: Path | None = None


def train(
    recipe: Recipe,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> RunFolder:
    """Run a recipe into a run folder (the next free one under runs/ unless named).

    With `resume` the folder's newest whole checkpoint is where it goes on, under the folder's own
    recipe. Raises Interrupted, a checkpoint left, when Ctrl-C or SIGTERM came.
    """
    watcher = watcher or Silent()
    with ExitStack() as stack:
        interrupt = stack.enter_context(catching())
        if resume:
            place, recipe = _reopen(folder)
        else:
            path = Path(folder) if folder is not None else next_free("runs", recipe.name)
            place = RunFolder.create(path, to_toml(recipe))
        stack.enter_context(locked(place))
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        start, progress = _start(place, watcher) if resume else (None, Progress(stage=0))
        if resume:
            truncate_after(place, progress.stage, progress.step if start else -1)
        recorder = stack.enter_context(Recorder(place))
        recorder.event("resumed" if resume else "started", step=progress.step)
        policy = load_policy(recipe.model, recipe.seed)
        if start is not None:
            restore_policy(start, policy)
        update_run_json(place, _facts(recipe, policy))
        session = Session(place, recorder, watcher, interrupt)
        run = Run(recipe, session, policy, start)
        _stages(run, progress)
        return place


def _stages(run: Run, progress: Progress) -> None:
    """Every stage from `progress` on, each from the model before it."""
    recipe, session = run.recipe, run.session
    place = session.folder
    for number in range(progress.stage, len(recipe.stages)):
        stage = recipe.stages[number]
        fresh = number != progress.stage
        if fresh:
            progress = Progress(stage=number, tokens=progress.tokens, seconds=progress.seconds)
        trackers = open_trackers(
            stage.trackers, place, name=place.path.name, recipe=recipe.model_dump(mode="json")
        )
        own = replace(session, trackers=trackers)
        session.watcher.stage(stage.name, stage.stage, stage.steps, progress.step)
        try:
            resume_from = None if fresh else run.resume_from
            if isinstance(stage, SFTStage):
                progress = _imitate(replace(run, session=own), stage, progress, resume_from)
            else:
                progress = _reinforce(replace(run, session=own), stage, progress, resume_from)
        finally:
            for tracker in trackers:
                tracker.close()
        update_run_json(place, {"tokens": progress.tokens, "seconds": round(progress.seconds, 3)})
        if session.interrupt.signum is not None and (
            progress.step < stage.steps or number + 1 < len(recipe.stages)
        ):
            session.recorder.event("interrupted", stage=stage.name, step=progress.step)
            raise Interrupted(session.interrupt.signum)
    update_run_json(place, {"finished": True})
    session.recorder.event("finished")


def _imitate(run: Run, stage: SFTStage, progress: Progress, resume_from: Path | None) -> Progress:
    seed = derive(run.recipe.seed, stage.name)
    tasks = build_tasks(stage.tasks, run.recipe.seed)
    optimizer = AdamW_of(run.policy, stage)
    if resume_from is not None:
        restore_optimizers(resume_from, {"optimizer": optimizer})
    work = sft.Imitation(
        stage=stage,
        policy=run.policy,
        optimizer=optimizer,
        feed=_feed(run, stage, tasks, seed, room=1, progress=progress),
        tasks=tasks,
        demonstrate=load_demonstration(stage.demonstration),
        session=run.session,
        seed=seed,
    )
    return sft.run(work, progress)


def _reinforce(run: Run, stage: RLStage, progress: Progress, resume_from: Path | None) -> Progress:
    recipe, policy, session = run.recipe, run.policy, run.session
    seed = derive(recipe.seed, stage.name)
    tasks = build_tasks(stage.tasks, recipe.seed)
    learner = build_learner(stage, recipe.model, policy, seed)
    if resume_from is not None:
        restore_learner(resume_from, learner)
    elif stage.algorithm.divergence is not None:
        progress = replace(progress, beta=stage.algorithm.divergence.beta)
    feed = _feed(run, stage, tasks, seed, room=stage.rollout.max_tokens, progress=progress)
    rewards = [load_reward(source) for source in stage.rewards.functions]
    common = {"timeout": stage.rewards.timeout, "on_error": stage.rewards.on_error}
    budget = stage.rollout.max_tokens
    scorer = Scorer(
        rewards, tasks, soft_overlong=stage.rollout.soft_overlong, max_tokens=budget, **common
    )
    sampler = Sampler(
        engine=NativeEngine(policy.model, policy.tokenizer, max_rows=stage.rollout.max_rows),
        tokenizer=policy.tokenizer,
        tasks=tasks,
        feed=feed,
        scorer=scorer,
        choice=stage.rollout,
        seed=seed,
    )
    plain = Scorer(rewards, tasks, soft_overlong=0, max_tokens=budget, **common)
    prompts = heldout(feed, stage.evaluation.prompts)
    evaluator = Evaluator(sampler, plain, prompts, stage.evaluation)
    objective = explain_stage(stage, lora=recipe.model.lora is not None).unicode()
    update_run_json(session.folder, {"objective": objective})
    return rl.run(rl.Loop(stage, learner, sampler, evaluator, session, seed), progress)
