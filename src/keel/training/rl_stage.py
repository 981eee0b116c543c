"""A stage of reinforcement learning: its parts, on one process or several, and its plots."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from keel.analysis.metrics import stage_columns
from keel.analysis.plots import optimisation_of, over_optimisation_picture, stage_curve
from keel.cluster.parts import PlacedStage, StageFactory, StageParts
from keel.cluster.placement import placement_of
from keel.config.entry import PYTHON
from keel.config.fields import derive
from keel.config.load import to_toml
from keel.config.model import Autocast, Model
from keel.config.rl import RolloutStage
from keel.config.schema import Recipe
from keel.config.sources import LEARNED, Rewards
from keel.config.stage import Optimizer
from keel.data.curriculum import CurriculumStream
from keel.data.mixture import build_tasks
from keel.engines.registry import capabilities_of, check_requests, evaluating
from keel.learn.advantages import asks_for, check_entries
from keel.learn.learner import Learner
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import WeightOptimizer, trainable
from keel.learn.ranks import Ranks
from keel.learn.teacher_server import served_teacher
from keel.models.families import uses_autocast
from keel.models.head import ValueHead
from keel.models.loading import describe_model
from keel.models.policy import Policy, load_policy
from keel.models.reference import (
    Critic,
    FrozenPolicy,
    critic_from_policy,
    load_critic,
    load_teachers,
    reference_for,
    value_head_for,
)
from keel.models.sharded import mesh_of, shard
from keel.platform.files import make_folder
from keel.rewards.scorer import Scorer
from keel.runs.reader import load
from keel.runs.writer import RunWriter, update_run_json
from keel.training import rl
from keel.training.evaluator import Evaluator, Evaluators
from keel.training.rollout import RolloutPrefetcher, Sampler, begin_alone, begin_pinned
from keel.training.setup import (
    RunContext,
    benchmark_stops,
    build_sampler,
    build_scorer,
    check_taught,
    dropout_of,
    load_rewards,
    longest_sequence,
    of_benchmark,
    open_prompts,
    prompt_source,
    reward_context,
    rollout_engine,
    templates_at,
    token_budget,
)
from keel.training.state import (
    Progress,
    read_pending,
    read_reference,
    restore_modules,
    restore_optimizers,
)
from keel.training.supervised import mixed_in
from keel.types import KeelError, Prompt


def place(
    run: RunContext, stage: RolloutStage, progress: Progress
) -> AbstractContextManager[PlacedStage]:
    """The parts of a stage where `cluster` puts them, new or restored, while the block runs."""
    recipe, seed = run.recipe, derive(run.recipe.seed, stage.name)
    if recipe.cluster.ray is not None and f'"{PYTHON}:' in to_toml(recipe):
        raise KeelError(
            "cluster.ray: other processes cannot call functions that were passed to keel.train: "
            "name them by module:function"
        )
    around = reward_context(recipe, run.folder, run.policy)
    budget = token_budget(run, stage, progress)
    factory = StageFactory(
        load=partial(load_policy, recipe.model, recipe.seed),
        learner=partial(
            build_learner,
            stage=stage,
            model=recipe.model,
            seed=seed,
            resume_from=run.resume_from,
            offload=recipe.cluster.offload == "cpu",
        ),
        engine=partial(rollout_engine, rollout=stage.rollout),
        tokens=budget.tokens,
        log=run.folder.logs / f"{stage.name}-vllm.log",
        rewards=dict(enumerate(stage.rewards.functions)),
        reward_context=around,
        reward_time=partial(templates_at, around.template_time),
    )
    parts = StageParts(
        factory,
        policy=run.policy,
        budget=budget,
        engine_kind=capabilities_of(stage.rollout.engine),
        ahead=stage.rollout.async_level > 0,
        note=run.writer.note,
    )
    return placement_of(recipe.cluster, recipe.threads).place(parts)


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
    if stage.samples_only:
        spread(policy.model, policy.autocast)
        unused = WeightOptimizer(trainable(policy), Optimizer())  # holds nothing before it steps
        return Learner(policy, unused, budget, ranks=ranks)
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
    teachers: list[FrozenPolicy] = [] if reference is None else [reference]
    if stage.teacher is None or stage.teacher.url is not None:
        teachers = []
    elif stage.teacher.name is not None:
        longest = longest_sequence(stage.sampling, policy)
        teachers = load_teachers(stage.teacher, policy, model, longest)
        for one in teachers:
            spread(one.model, one.autocast)
    elif stage.teacher.weights == "live":
        teachers = [FrozenPolicy(policy.model, policy.autocast, policy.tokens)]
    elif stage.teacher.averaged and policy.has_lora and state is None and reference is not None:
        reference.refresh(policy)  # an average begins as a second adapter
    spread(policy.model, policy.autocast)
    if value_head is not None:
        spread(value_head)
    modules = {"value_head": value_head, "critic": critic}
    if resume_from is not None:
        restore_modules(resume_from, {n: m for n, m in modules.items() if m is not None})
    learner = Learner(
        policy=policy,
        optimizer=WeightOptimizer(trainable(policy), stage.optimizer),
        budget=budget,
        reference=reference,
        teachers=teachers,
        value_head=value_head,
        critic=critic,
        value_optimizer=None
        if value_model is None
        else WeightOptimizer(trainable(value_model), stage.value.optimizer or stage.optimizer),
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


def begin(run: RunContext, stage: RolloutStage, progress: Progress) -> Progress:
    """Record what the stage optimises; a new stage shows it, and has the first β."""
    writer = run.writer
    objective = stage.explain(lora=run.recipe.model.lora is not None)
    update_run_json(writer.folder, {"objective": objective.unicode()})
    if run.resume_from is not None:
        return progress
    if stage.samples_only:
        writer.callbacks.note(f"{stage.name}: steps = 0: one batch is sampled, nothing is trained")
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


def show(run: RunContext, stage: RolloutStage, loop: rl.RLLoop, progress: Progress) -> None:
    """Plot the rewards of a stage that has ended, and learned rewards against those watched."""
    title, subtitle = titles(run.recipe, stage, run.policy.model)
    columns = stage_columns(load(run.writer.folder.path), stage.name)
    stage_curve(run.writer.folder.curve, stage.stage, columns, title, subtitle)
    names = [function.name for function in loop.sampler.scorer.functions]
    plot_over_optimisation(run.writer, stage, names, title)


def note_costs(stage: RolloutStage, loop: rl.RLLoop) -> None:
    """A line for each judge of the stage: its cost, with that of evaluations and of earlier runs
    that share its cache."""
    for line in loop.sampler.scorer.paid():
        loop.writer.note(f"{stage.name}: {line}")


def build_loop(
    run: RunContext, stage: RolloutStage, models: PlacedStage, progress: Progress
) -> rl.RLLoop:
    """The loop of a stage, with its tasks, rewards and engines."""
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
    check_taught(stage.sampling, source.tasks)
    if stage.unresolved:
        stage = run.resolved(stage, source.size(), rollout.prompts_per_step)
    functions = load_rewards(
        stage.rewards, reward_context(run.recipe, run.folder, policy), models.rewards
    )
    scored = partial(
        build_scorer,
        stage.sampling,
        functions,
        source.tasks,
        needed=stage.algorithm.needs_reward,
    )
    shaped = scored(shaped=True)
    sampler = build_sampler(models.engine, source, shaped, rollout, seed, step=progress.step)
    if rollout.curriculum is not None and rollout.replayed is None:
        chosen = CurriculumStream(sampler.stream, rollout.curriculum, progress.stream)
        sampler = replace(sampler, stream=chosen, curriculum=chosen)
    check_requests(stage.sampling, sampler.engine.capabilities)
    evaluated = scored(loop=shaped.loop)
    prompts = source.validation(0 if stage.samples_only else stage.evaluation.prompts)
    evaluated.check(prompts)
    # Evaluation is of the policy itself, not of a rounded copy; but one server is enough, and on
    # CUDA autocast samples from such a copy anyway.
    exact = sampler
    rounds = policy.device.type == "cuda" and uses_autocast(policy.model, policy.autocast)
    can = sampler.engine.capabilities
    if (rollout.dtype != "model" and not rounds and can.in_process) or can.replays:
        exact = replace(sampler, engine=rollout_engine(policy, evaluating(rollout)))
        exact.engine.weight_version = progress.step
    return rl.RLLoop(
        steps=stage.steps,
        checkpoints=stage.checkpoints,
        on_nonfinite=stage.on_nonfinite,
        budget=models.learner.budget,
        writer=run.writer,
        evaluators=build_evaluators(run, stage, exact, evaluated, prompts) if prompts else None,
        rollouts_every=stage.rollouts_every,
        stop_when=stage.stop_when,
        dropout=dropout_of(run.recipe, stage),
        algorithm=stage.algorithm,
        loss=loss_config(stage, run.recipe.model),
        schedule=schedule(stage),
        demonstrations=mixed_in(run, stage.imitated, stage.name, seed),
        learner=models.learner,
        sampler=sampler,
        prefetcher=build_prefetcher(stage, sampler, run.resume_from),
        taught_by=stage.teacher,
        teacher=None if stage.samples_only else served_teacher(stage.teacher, policy),
        seed=seed,
    )


def build_evaluators(
    run: RunContext,
    stage: RolloutStage,
    sampler: Sampler,
    scorer: Scorer,
    prompts: Sequence[Prompt],
) -> Evaluators:
    """The evaluation on the stage's own validation prompts, and on those of further sets.

    `scorer` is the stage's; sets of the same reward functions share them.
    """
    choice, policy = stage.evaluation, run.policy
    chat = policy.tokenizer.chat_template is not None
    around = reward_context(run.recipe, run.folder, policy)
    scorers: list[tuple[Rewards, Scorer]] = [(stage.rewards, scorer)]
    sets = []
    settled = benchmark_stops(stage.tasks, policy.tokenizer)  # which are of the stage's own tasks
    stop = () if stage.rollout.stop == settled else stage.rollout.stop
    for at, one in enumerate(choice.sets):
        longest = one.max_tokens or stage.rollout.max_tokens
        rollout = stage.rollout.model_copy(update={"max_tokens": longest, "stop": stop})
        rewards = one.rewards or stage.rewards
        sampling = of_benchmark(
            replace(stage.sampling, tasks=(one.task,), rewards=rewards, rollout=rollout),
            policy,
            one.max_tokens,
        )
        built = build_tasks((one.task,), run.recipe.seed, chat=chat, whole=True)
        tasks = {task.name: task for task in built}
        source = prompt_source(
            policy, tasks, sampling.tasks, sampling.prompts, sampler.seed,
            max_tokens=sampling.rollout.max_tokens, key=f"evaluation.sets.{at}.max_tokens",
            note=run.writer.note,
        )  # fmt: skip
        same = next((s for known, s in scorers if known.functions == rewards.functions), None)
        functions = load_rewards(rewards, around) if same is None else same.given
        own = build_scorer(sampling, functions, tasks, loop=None if same is None else same.loop)
        scorers.append((rewards, own))
        chosen = source.validation(one.prompts)
        own.check(chosen)
        of_set = replace(
            sampler, chat=source.encoder.chat, tasks=tasks, stream=source.stream, scorer=own,
            config=sampling.rollout,
        )  # fmt: skip
        every = choice.every if one.every is None else one.every
        sets.append((Evaluator(of_set, own, chosen, one, one.name), every))
    main = Evaluator(sampler, scorer, prompts, choice)
    return Evaluators(main, choice.every, sets, choice.best)


def loss_config(stage: RolloutStage, model: Model) -> rl.LossConfig:
    """What the loss of a stage reads of its recipe."""
    algorithm, trainer = stage.algorithm, stage.rollout.old_log_probs == "trainer"
    if stage.rollout.old_log_probs == "log_linear" and asks_for(algorithm, "old_log_prob_N"):
        raise KeelError(
            "algorithm.advantage.function asks for old_log_prob_N before the update, and "
            'rollout.old_log_probs = "log_linear" computes none: set it to "trainer"'
        )
    several_updates = stage.epochs * stage.minibatches > 1
    adaptive = algorithm.divergence is not None and algorithm.divergence.adaptive is not None
    penalised = algorithm.reward_divergence is not None
    drops = model.lora is not None and model.lora.dropout > 0
    return rl.LossConfig(
        max_tokens=stage.rollout.max_tokens,
        mask_truncated=stage.rollout.mask_truncated,
        old_log_probs=stage.rollout.old_log_probs,
        score_old=trainer
        and (
            several_updates
            or adaptive
            or penalised
            or stage.reference.measured
            or algorithm.scores_teacher
            or drops
            or algorithm.whole_batch
            or bool(algorithm.corrections)
            or algorithm.advantage.reads_squares
            or asks_for(algorithm, "old_log_prob_N")
        ),
        score_entropy=algorithm.reads_entropy,
        score_squares=algorithm.advantage.reads_squares,
        ratio_to_itself=drops and stage.own_ratio,
        score_reference=stage.scores_reference,
        score_teacher=algorithm.scores_teacher,
    )


def schedule(stage: RolloutStage) -> rl.Schedule:
    """The updates of a stage."""
    averaged = stage.teacher is not None and stage.teacher.averaged
    return rl.Schedule(
        steps=stage.steps,
        epochs=stage.epochs,
        minibatches=stage.minibatches,
        optimizer=stage.optimizer,
        value_optimizer=stage.value.optimizer or stage.optimizer,
        value_warmup_steps=0 if stage.algorithm.value is None else stage.value.warmup_steps,
        reference_reset_every=1 if averaged else stage.reference.reset_every,
        reference_rate=stage.teacher.rate if averaged and stage.teacher else 1.0,
    )


def build_prefetcher(
    stage: RolloutStage, sampler: Sampler, resume_from: Path | None
) -> RolloutPrefetcher:
    """What samples a stage's rollouts ahead; several steps at once if the engine can."""
    level = stage.rollout.async_level
    in_order = stage.rollout.in_order or level == 0
    at_once = sampler.engine.capabilities.pins and not in_order
    begin = partial(begin_pinned if at_once else begin_alone, sampler, stage.algorithm)
    shown = () if stage.teacher is None else stage.teacher.columns
    return RolloutPrefetcher(begin, level, at_once, read_pending(resume_from), shown)


def titles(recipe: Recipe, stage: RolloutStage, model: PreTrainedModel) -> tuple[str, str]:
    """A plot's title (recipe and tasks) and subtitle (algorithm, model with its size, seed)."""
    tasks = ", ".join(Path(task.path).name if task.path else task.name for task in stage.tasks)
    algorithm = stage.algorithm.preset or "an algorithm of its own"
    return (
        f"{recipe.name}: {tasks}",
        f"{algorithm}, {describe_model(recipe.model, model)}, seed {recipe.seed}",
    )


def plot_over_optimisation(
    writer: RunWriter, stage: RolloutStage, names: Sequence[str], title: str
) -> None:
    """Learned rewards, and one of weight 0, against KL, if a stage has both and KL grew."""
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
