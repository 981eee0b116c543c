"""Builds the parts of a stage from its recipe: prompts, rewards, models, optimizers, settings.

Loops and parts take what is built here; they do not read the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from keel.cluster.parts import PlacedReward
from keel.config.fields import derive
from keel.config.model import Autocast, Model
from keel.config.rl import RolloutStage
from keel.config.sampling import Rollout
from keel.config.schema import Recipe
from keel.config.sources import Prompts, Rewards, TaskSource
from keel.config.stage import StageConfig
from keel.data.tasks import PromptStream, build_tasks, stored, validation_prompts
from keel.engines.endpoint.programs import ProgramConfig, load_program
from keel.engines.registry import build_engine
from keel.learn.advantages import check_entries
from keel.learn.learner import Learner
from keel.learn.optimizer import AdamW, trainable
from keel.learn.ranks import Ranks
from keel.learn.token_budget import TokenBudget
from keel.models.chat import Encoder
from keel.models.families import uses_autocast
from keel.models.policy import Policy
from keel.models.reference import reference_for
from keel.models.sharded import mesh_of, shard
from keel.models.teacher import load_teacher
from keel.models.value import Critic, ValueHead, critic_from_policy, load_critic, value_head_for
from keel.platform.loop_thread import LoopThread
from keel.rewards import load_reward
from keel.rewards.registry import NamedReward, RewardContext
from keel.rewards.scorer import Scorer
from keel.runs.layout import RunFolder
from keel.runs.quarantine import LeftOut, counted, write_quarantine
from keel.runs.writer import RunWriter
from keel.training import supervised
from keel.training.labelling import PairLabeller
from keel.training.loop import EvaluationResult, Loop
from keel.training.recipe_checks import longest_sequence
from keel.training.rl import LossConfig, Schedule
from keel.training.rollout import Sampler
from keel.training.state import (
    Progress,
    read_reference,
    restore_modules,
    restore_optimizers,
)
from keel.training.template_time import time_read_by
from keel.types import Engine, KeelError, Prompt, Task

ENCODED_BEFORE = 10_000
"""Stored examples of a stage that are encoded before the first step, to find the bad ones."""


@dataclass(frozen=True, eq=False)
class RunContext:
    """The recipe of a run, its writer, its policy, and the checkpoint to resume from."""

    recipe: Recipe
    writer: RunWriter
    policy: Policy
    resume_from: Path | None
    labeller: PairLabeller | None = None

    @property
    def folder(self) -> RunFolder:
        return self.writer.folder


@dataclass(frozen=True, eq=False)
class PromptSource:
    """A stage's tasks, and the stream of encoded prompts over them."""

    tasks: dict[str, Task]
    weights: list[float]
    encoder: Encoder
    stream: PromptStream

    def validation(self, n: int) -> list[Prompt]:
        """The first prompts of the validation split."""
        return validation_prompts(list(self.tasks.values()), self.weights, n, self.encoder)


def open_prompts(
    run: RunContext,
    stage: str,
    sources: Sequence[TaskSource],
    prompts: Prompts,
    seed: int,
    *,
    max_tokens: int,
    key: str = "rollout.max_tokens",
    state: Mapping[str, Any] | None = None,
) -> PromptSource:
    """The prompts of tasks, encoded, without those that leave no room for `max_tokens` of answer.

    `key` is that of `max_tokens` in the recipe, `state` that of the stream to resume. Stored
    examples that give no prompt are in the run folder's quarantine when this returns.
    """
    tasks = {task.name: task for task in build_tasks(sources, run.recipe.seed)}
    lenient = {name for name, s in zip(tasks, sources, strict=True) if s.bad_rows == "quarantine"}
    weights = [source.weight for source in sources]
    encoder = Encoder(
        run.policy.tokenizer,
        longest_prompt(prompts.max_tokens, run.policy.context, max_tokens, key),
        prompts.chat_template,
        forgiven=lenient,
        note=run.writer.note,
        raw=raw_tasks(tasks, sources),
        served=run.policy.served,
    )
    _quarantine_prompts(run, stage, tasks, encoder)
    stream = PromptStream(list(tasks.values()), weights, derive(seed, "prompts"), encoder)
    if state:
        stream.restore(state)
    return PromptSource(tasks, weights, encoder, stream)


def raw_tasks(tasks: Mapping[str, Task], sources: Sequence[TaskSource]) -> set[str]:
    """The names of the tasks whose plain prompts are not put through the chat template."""
    return {name for name, source in zip(tasks, sources, strict=True) if source.raw}


def _quarantine_prompts(
    run: RunContext, stage: str, tasks: Mapping[str, Task], encoder: Encoder
) -> None:
    """Write the stored examples that give no prompt to the quarantine, and note how many.

    Tasks are encoded for that in order, as long as they have at most `ENCODED_BEFORE` examples in
    total; examples of other tasks that cannot be encoded are found when they are reached.
    """
    left: list[LeftOut] = []
    room = ENCODED_BEFORE
    for name, task in tasks.items():
        data = stored(task)
        if data is None:
            continue
        left += data.left_out
        examples = data.size("train") + data.size("validation")
        if examples <= room:
            room -= examples
            left += data.refused(encoder.wrong, forgiven=name in encoder.forgiven)
            encoder.known.add(name)
    target = run.folder.quarantine / f"{stage}-prompts.jsonl"
    write_quarantine(target, left)
    if left and run.resume_from is None:
        run.writer.note(f"{stage}: rows left out: {counted(left)} (quarantine/{target.name})")


def loss_config(stage: RolloutStage) -> LossConfig:
    """What the loss of a stage reads of its recipe."""
    algorithm, trainer = stage.algorithm, stage.rollout.old_log_probs == "trainer"
    several_updates = stage.epochs * stage.minibatches > 1
    adaptive = algorithm.divergence is not None and algorithm.divergence.adaptive is not None
    penalised = algorithm.reward_divergence is not None
    return LossConfig(
        max_tokens=stage.rollout.max_tokens,
        mask_truncated=stage.rollout.mask_truncated,
        old_log_probs=stage.rollout.old_log_probs,
        score_old=trainer
        and (
            several_updates
            or adaptive
            or penalised
            or stage.reference.measured
            or algorithm.needs_teacher
        ),
        score_reference=stage.keeps_reference,
    )


def schedule(stage: RolloutStage) -> Schedule:
    """The updates of a stage."""
    return Schedule(
        steps=stage.steps,
        epochs=stage.epochs,
        minibatches=stage.minibatches,
        optimizer=stage.optimizer,
        value_optimizer=stage.value.optimizer or stage.optimizer,
        value_warmup_steps=0 if stage.algorithm.value is None else stage.value.warmup_steps,
        reference_reset_every=stage.reference.reset_every,
    )


def supervised_loop(
    run: RunContext,
    stage: StageConfig,
    progress: Progress,
    evaluate: Callable[[int], EvaluationResult] | None = None,
    **own: Any,
) -> Loop:
    """The loop of a stage that learns from examples; `own` are the parts of its kind."""
    parts = supervised.ExampleParts(
        steps=stage.steps,
        policy=run.policy,
        schedule=stage.optimizer,
        on_nonfinite=stage.on_nonfinite,
        writer=run.writer,
        **{"budget": token_budget(stage, progress, run.writer), **own},
    )
    return Loop(
        steps=stage.steps,
        checkpoints=stage.checkpoints,
        on_nonfinite=stage.on_nonfinite,
        budget=parts.budget,
        writer=run.writer,
        take_step=partial(supervised.take_step, parts),
        state=partial(supervised.state_of, parts),
        evaluate=evaluate,
        evaluate_every=stage.evaluation_interval or 0,
    )


def token_budget(stage: StageConfig, progress: Progress, writer: RunWriter) -> TokenBudget:
    """The stage's token budget, or what has fitted into memory since, where that is less."""
    budget = TokenBudget(stage.token_budget, writer.note)
    budget.tokens = min(progress.token_budget or budget.asked, budget.asked)
    return budget


def longest_prompt(
    wanted: int | None, context: int | None, max_tokens: int, key: str = "rollout.max_tokens"
) -> int | None:
    """The longest prompt with which an answer of `max_tokens` tokens still fits the context.

    `key` is that of `max_tokens` in the recipe.
    """
    if context is None:
        return wanted
    if context <= max_tokens:
        raise KeelError(
            f"{key} = {max_tokens} leaves no room for a prompt in the model's "
            f"context of {context} tokens: lower it"
        )
    if wanted is not None and wanted + max_tokens > context:
        raise KeelError(
            f"prompts.max_tokens = {wanted} and {key} = {max_tokens} are more than "
            f"the model's context of {context} tokens: lower one of them"
        )
    return context - max_tokens if wanted is None else wanted


def reward_context(
    recipe: Recipe | None, folder: RunFolder | None, policy: Policy
) -> RewardContext:
    """The parts of a run that rewards may use; without a folder they keep no files."""
    stages = () if recipe is None else recipe.stages
    names = [stage.name for stage in stages if stage.reward_model is not None]
    return RewardContext(
        tokenizer=policy.tokenizer,
        models={} if folder is None else {name: folder.model(name) for name in names},
        folder=None if folder is None else folder.rewards,
        device=str(policy.device),
        seed=0 if recipe is None else recipe.seed,
        template_time=time_read_by(policy.tokenizer.chat_template),
    )


def load_rewards(
    rewards: Rewards, around: RewardContext, remote: Mapping[int, PlacedReward] | None = None
) -> list[NamedReward]:
    """The reward functions, in order; those of some places may be `remote`."""
    elsewhere = remote or {}
    return [
        elsewhere[place].named() if place in elsewhere else load_reward(source, around)
        for place, source in enumerate(rewards.functions)
    ]


def scorer(
    rewards: Rewards,
    functions: Sequence[NamedReward],
    tasks: Mapping[str, Task],
    *,
    max_tokens: int,
    overlong_buffer: int = 0,
    needed: bool = True,
    loop: LoopThread | None = None,
    stop: Sequence[str] = (),
) -> Scorer:
    """The scorer of a stage's rewards; `needed`: the stage learns from them."""
    return Scorer(
        functions,
        tasks,
        timeout=rewards.timeout,
        on_error=rewards.on_error,
        max_tokens=max_tokens,
        overlong_buffer=overlong_buffer,
        needed=needed,
        loop=loop,
        stop=stop,
    )


def rollout_engine(
    policy: Policy,
    rollout: Rollout,
    *,
    model: PreTrainedModel | None = None,
    log: Path | None = None,
    note: Callable[[str], None] | None = None,
) -> Engine:
    """The engine of a recipe, with the weights of `model` in the recipe's `rollout.dtype`.

    Without `model`, with the policy's own weights in their own dtype. A server that it starts
    writes to `log`, and `note` gets a line for each restart of it.
    """
    return build_engine(
        rollout,
        model=policy.model if model is None else model,
        tokenizer=policy.tokenizer,
        autocast=policy.autocast,
        dtype="model" if model is None else rollout.dtype,
        log=log,
        note=note,
    )


def build_sampler(
    policy: Policy,
    source: PromptSource,
    scorer: Scorer,
    rollout: Rollout,
    seed: int,
    *,
    model: PreTrainedModel | None = None,
    less: str = "",
    step: int = 0,
    engine: Engine | None = None,
    log: Path | None = None,
    note: Callable[[str], None] | None = None,
) -> Sampler:
    """What samples completions, by an `engine` or by a new one (see `rollout_engine`).

    The engine's count of syncs begins at `step`, the steps that the stage has taken.
    """
    engine = engine or rollout_engine(policy, rollout, model=model, log=log, note=note)
    engine.weight_version = step
    program = None
    if rollout.program is not None:
        program = ProgramConfig(
            name=rollout.program,
            function=load_program(rollout.program),
            limit=rollout.max_programs,
            timeout=rollout.timeout,
            skips=rollout.on_error == "skip",
        )
    return Sampler(
        engine=engine,
        chat=source.encoder.chat,
        tasks=source.tasks,
        stream=source.stream,
        scorer=scorer,
        config=rollout,
        seed=seed,
        less=less,
        program=program,
    )


def build_learner(
    policy: Policy,
    budget: TokenBudget,
    ranks: Ranks,
    *,
    stage: RolloutStage,
    model: Model,
    seed: int,
    resume_from: Path | None = None,
    offload: bool = False,
) -> Learner:
    """The policy and the models that the algorithm needs, each with its optimizer.

    New ones, or as the checkpoint `resume_from` of this stage holds them; with several `ranks` each
    of them, the policy too, is sharded, with `offload` (see `shard`), before the next one is made.
    """
    algorithm = stage.algorithm
    check_entries(algorithm)
    spread = partial(_spread, ranks, offload)
    value_head: ValueHead | None = None
    critic: Critic | None = None
    if algorithm.value is not None and stage.value.kind == "head":
        value_head = value_head_for(policy)
    elif algorithm.value is not None and stage.value.name is not None:
        critic = load_critic(stage.value.name, policy, model, seed)
    elif algorithm.value is not None:
        critic = critic_from_policy(policy)
    if critic is not None:
        spread(critic.backbone, critic.autocast)
        spread(critic.head)
    value_model: ValueHead | Critic | None = critic if value_head is None else value_head
    state = None if resume_from is None else read_reference(resume_from)
    reference = reference_for(policy, state) if stage.keeps_reference else None
    if reference is not None and reference.model is not policy.model:
        spread(reference.model, reference.autocast)
    teacher = None
    if stage.teacher is not None:
        longest = longest_sequence(stage.sampling, policy)
        teacher = load_teacher(stage.teacher, policy, model, longest)
        spread(teacher.model, teacher.autocast)
    spread(policy.model, policy.autocast)
    if value_head is not None:
        spread(value_head)
    modules = {"value_head": value_head, "critic": critic}
    if resume_from is not None:
        restore_modules(resume_from, {n: m for n, m in modules.items() if m is not None})
    learner = Learner(
        policy=policy,
        optimizer=AdamW(trainable(policy), stage.optimizer),
        budget=budget,
        reference=reference,
        teacher=teacher,
        value_head=value_head,
        critic=critic,
        value_optimizer=None
        if value_model is None
        else AdamW(trainable(value_model), stage.value.optimizer or stage.optimizer),
        temperature=stage.rollout.temperature,
        ranks=ranks,
    )
    if resume_from is not None:
        restore_optimizers(resume_from, learner.optimizers)
    return learner


def _spread(
    ranks: Ranks, offload: bool, model: PreTrainedModel | ValueHead, autocast: Autocast = False
) -> None:
    """Shard a model over several ranks; `autocast` is that of its layers."""
    if ranks.count == 1:
        return
    rounded = isinstance(model, PreTrainedModel) and uses_autocast(model, autocast)
    mesh = mesh_of(next(model.parameters()).device, ranks.count)
    shard(model, mesh, torch.bfloat16 if rounded else None, offload)
