"""Each kind of stage: its parts put together from the recipe, then its loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keel.config.entry import load_entry
from keel.config.objective import explain_stage
from keel.config.schema import Recipe, RLStage, SFTStage, Stage
from keel.config.seeds import derive
from keel.engines.native import NativeEngine
from keel.insight.plots import reward_curve
from keel.learn.optimizer import AdamW, trainable
from keel.models.policy import Policy
from keel.rewards import load_reward
from keel.rewards.score import Scorer
from keel.runs.read import load
from keel.runs.record import update_run_json
from keel.runs.session import Session
from keel.tasks import PromptStream, build_tasks, heldout
from keel.tasks.encode import Encoder
from keel.train import rl, sft
from keel.train.build import build_learner
from keel.train.evaluate import Evaluator
from keel.train.evaluate import metrics as evaluation_metrics
from keel.train.rollout import Sampler
from keel.train.state import Progress, restore_optimizers
from keel.types import KeelError, Prompt, Task


@dataclass(frozen=True, eq=False)
class Work:
    """What a stage gets: the recipe, the hand that writes, the policy, and where to resume from."""

    recipe: Recipe
    session: Session
    policy: Policy
    resume_from: Path | None


@dataclass(frozen=True, eq=False)
class Source:
    """A stage's tasks, and the streams of encoded prompts over them."""

    tasks: dict[str, Task]
    weights: list[float]
    encoder: Encoder
    stream: PromptStream

    def heldout(self, n: int) -> list[Prompt]:
        return heldout(list(self.tasks.values()), self.weights, n, self.encoder)


def imitate(work: Work, stage: SFTStage, progress: Progress) -> Progress:
    """Supervised fine-tuning."""
    seed = derive(work.recipe.seed, stage.name)
    optimizer = AdamW(trainable(work.policy), stage.optimizer)
    if work.resume_from is not None:
        restore_optimizers(work.resume_from, {"optimizer": optimizer})
    source = open_source(work, stage, seed, progress, room=1)
    parts = sft.Imitation(
        stage=stage,
        policy=work.policy,
        optimizer=optimizer,
        stream=source.stream,
        tasks=source.tasks,
        demonstrate=load_entry(stage.demonstration, "demonstration"),
        session=work.session,
        seed=seed,
    )
    return sft.run(parts, progress)


def reinforce(work: Work, stage: RLStage, progress: Progress) -> Progress:
    """Reinforcement learning; leaves the reward curve as a picture."""
    recipe, session = work.recipe, work.session
    seed = derive(recipe.seed, stage.name)
    learner = build_learner(stage, recipe.model, work.policy, seed, work.resume_from)
    if work.resume_from is None and stage.algorithm.divergence is not None:
        progress = replace(progress, beta=stage.algorithm.divergence.beta)
    objective = explain_stage(stage, lora=recipe.model.lora is not None)
    update_run_json(session.folder, {"objective": objective.unicode()})
    loop = make_loop(work, stage, learner, progress, seed)
    progress = rl.run(loop, progress)
    draw(session, stage, progress, title=recipe.name)
    return progress


def draw(session: Session, stage: RLStage, progress: Progress, title: str) -> None:
    """The reward over the steps, and held-out accuracy from before the first, as a picture."""
    rows = load(session.folder.path).metrics(stage.name)
    if rows:
        before = progress.before
        first = {} if before is None else evaluation_metrics(dict(before))
        subtitle = stage.algorithm.preset
        reward_curve(
            session.folder.curve, [{"step": 0, **first}, *rows], title=title, subtitle=subtitle
        )


def make_loop(
    work: Work, stage: RLStage, learner: rl.Learner, progress: Progress, seed: int
) -> rl.Loop:
    """Tasks, rewards and engine of a stage, round its learner."""
    policy, rollout = work.policy, stage.rollout
    source = open_source(work, stage, seed, progress, room=rollout.max_tokens)
    rewards = [load_reward(reward) for reward in stage.rewards.functions]
    options: dict[str, Any] = {
        "timeout": stage.rewards.timeout,
        "on_error": stage.rewards.on_error,
        "max_tokens": rollout.max_tokens,
    }
    sampler = Sampler(
        engine=NativeEngine(
            policy.model, policy.tokenizer, max_rows=rollout.max_rows, autocast=policy.autocast
        ),
        tokenizer=policy.tokenizer,
        tasks=source.tasks,
        stream=source.stream,
        scorer=Scorer(rewards, source.tasks, soft_overlong=rollout.soft_overlong, **options),
        choice=rollout,
        seed=seed,
    )
    judge = Scorer(rewards, source.tasks, soft_overlong=0, **options)
    prompts = source.heldout(stage.evaluation.prompts)
    judge.check(prompts)
    evaluator = Evaluator(sampler, judge, prompts, stage.evaluation) if prompts else None
    return rl.Loop(stage, learner, sampler, evaluator, work.session, seed)


def open_source(work: Work, stage: Stage, seed: int, progress: Progress, room: int) -> Source:
    """The stage's prompts, encoded, those left out that leave no room for an answer."""
    tasks = {task.name: task for task in build_tasks(stage.tasks, work.recipe.seed)}
    weights = [source.weight for source in stage.tasks]
    encoder = Encoder(
        work.policy.tokenizer,
        longest_prompt(stage.prompts.max_tokens, work.policy.context, room),
        stage.prompts.chat_template,
    )
    stream = PromptStream(list(tasks.values()), weights, derive(seed, "prompts"), encoder)
    if progress.stream:
        stream.restore(progress.stream)
    return Source(tasks, weights, encoder, stream)


def longest_prompt(wanted: int | None, context: int | None, room: int) -> int | None:
    """How long a prompt may be, so that an answer of `room` tokens still fits the context."""
    if context is None:
        return wanted
    if context <= room:
        raise KeelError(
            f"rollout.max_tokens = {room} leaves no room for a prompt in the model's context of "
            f"{context} tokens: lower it"
        )
    if wanted is not None and wanted + room > context:
        raise KeelError(
            f"prompts.max_tokens = {wanted} and rollout.max_tokens = {room} are more than the "
            f"model's context of {context} tokens: lower one of them"
        )
    return context - room if wanted is None else wanted
