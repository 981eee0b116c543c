"""Each kind of stage: its parts put together from the recipe, then its loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel

from keel.analysis.overoptimisation import optimisation_of
from keel.analysis.plots import reward_curve
from keel.analysis.reward_plots import over_optimisation_picture
from keel.config.entry import load_entry
from keel.config.judging import DPOStage, ProcessRewardModelStage, RewardModelStage
from keel.config.objective import LEARNED, explain_stage
from keel.config.schema import RLStage, SFTStage, Stage
from keel.config.seeds import derive
from keel.engines.native import NativeEngine
from keel.learn.optimizer import AdamW, trainable
from keel.models.loading import DTYPES
from keel.models.policy import frozen_copy
from keel.rewards.judge.reward import Judge
from keel.runs.files import make_folder
from keel.runs.reader import load
from keel.runs.records import update_run_json
from keel.runs.writer import Session
from keel.training import rl, sft
from keel.training.build import build_learner
from keel.training.evaluate import Evaluator
from keel.training.evaluate import metrics as evaluation_metrics
from keel.training.judging import judge_answers, judge_steps, prefer
from keel.training.prefetch import Drawing, read_pending
from keel.training.rewarding import load_rewards, scorer, surroundings
from keel.training.rollout import Sampler, collect
from keel.training.state import Progress, restore_optimizers
from keel.training.work import Work, budget_of, open_source


def run_stage(work: Work, stage: Stage, progress: Progress) -> Progress:
    """A stage of whatever kind, from `progress` on."""
    if isinstance(stage, SFTStage):
        return imitate(work, stage, progress)
    if isinstance(stage, RewardModelStage):
        return judge_answers(work, stage, progress)
    if isinstance(stage, ProcessRewardModelStage):
        return judge_steps(work, stage, progress)
    if isinstance(stage, DPOStage):
        return prefer(work, stage, progress)
    return reinforce(work, stage, progress)


def imitate(work: Work, stage: SFTStage, progress: Progress) -> Progress:
    """Supervised fine-tuning."""
    seed = derive(work.recipe.seed, stage.name)
    optimizer = AdamW(trainable(work.policy), stage.optimizer)
    if work.resume_from is not None:
        restore_optimizers(work.resume_from, {"optimizer": optimizer})
    source = open_source(
        work, stage.name, stage.tasks, stage.prompts, seed, room=1, state=progress.stream
    )
    parts = sft.Imitation(
        stage=stage,
        policy=work.policy,
        optimizer=optimizer,
        budget=budget_of(stage, progress, work.session),
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
    # While the policy learns, what draws the next step's rollouts has weights of its own; made
    # before the learner puts an adapter of the reference's beside the policy's.
    drawn_by = frozen_copy(work.policy.model) if stage.rollout.ahead else work.policy.model
    learner = build_learner(
        stage,
        recipe.model,
        work.policy,
        seed,
        budget_of(stage, progress, session),
        work.resume_from,
    )
    if work.resume_from is None and stage.algorithm.divergence is not None:
        progress = replace(progress, beta=stage.algorithm.divergence.beta)
    objective = explain_stage(stage, lora=recipe.model.lora is not None)
    update_run_json(session.folder, {"objective": objective.unicode()})
    if stage.ratio_stays_one and work.resume_from is None:
        session.note(
            f"{stage.name}: with one optimizer step a batch (epochs = 1, minibatches = 1) the "
            "importance ratio stays 1, so neither its bounds nor a divergence to the old policy "
            "act: set minibatches or epochs higher"
        )
    loop = make_loop(work, stage, learner, drawn_by, progress, seed)
    with closing(loop.sampler.scorer):
        progress = rl.run(loop, progress)
        for function in loop.sampler.scorer.functions:
            if isinstance(function.function, Judge):
                session.note(f"{stage.name}: {paid(function.function)}")
    draw(session, stage, progress, title=recipe.name)
    names = [function.name for function in loop.sampler.scorer.functions]
    draw_optimisation(session, stage, names, title=recipe.name)
    return progress


def paid(judge: Judge) -> str:
    """What a judge has cost, evaluations and earlier runs with the same cache among it."""
    account = judge.account()
    lost = f", {account.lost_cost} on requests without an answer" if account.lost else ""
    return f"judge {judge.options.label!r}: {account.answers} answers for {account.spent}{lost}"


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


def draw_optimisation(session: Session, stage: RLStage, names: Sequence[str], title: str) -> None:
    """Learned rewards and one that watched (weight 0) against KL, where a stage has both."""
    sources = list(zip(names, stage.rewards.functions, strict=False))
    proxies = {n: s.weight for n, s in sources if s.function in LEARNED and s.weight}
    watching = [n for n, s in sources if not s.weight]
    if not proxies or not watching:
        return
    divergence = stage.algorithm.divergence
    held = "" if divergence is None else f", β = {divergence.beta:g}"
    label = f"{stage.algorithm.preset}{held}"
    rows = load(session.folder.path).metrics(stage.name)
    found = optimisation_of(rows, proxies, watching[0], label)
    if found is not None:
        target = session.folder.pictures / f"{stage.name}-over-optimisation.png"
        make_folder(target.parent)
        subtitle = f"learned from: {', '.join(proxies)}; watching: {watching[0]}"
        over_optimisation_picture([found], target, title, subtitle)


def make_loop(
    work: Work,
    stage: RLStage,
    learner: rl.Learner,
    model: PreTrainedModel,
    progress: Progress,
    seed: int,
) -> rl.Loop:
    """Tasks, rewards and engine of a stage, round its learner; `model` is what the engine draws
    with."""
    policy, rollout = work.policy, stage.rollout
    source = open_source(
        work,
        stage.name,
        stage.tasks,
        stage.prompts,
        seed,
        room=rollout.max_tokens,
        state=progress.stream,
    )
    functions = load_rewards(stage.rewards, surroundings(work.recipe, work.session.folder, policy))
    scored = partial(scorer, stage.rewards, functions, source.tasks, max_tokens=rollout.max_tokens)
    engine = partial(
        NativeEngine,
        tokenizer=policy.tokenizer,
        max_rows=rollout.max_rows,
        autocast=policy.autocast,
    )
    sampler = Sampler(
        engine=engine(model, dtype=DTYPES.get(rollout.dtype)),
        tokenizer=policy.tokenizer,
        tasks=source.tasks,
        stream=source.stream,
        scorer=scored(soft_overlong=rollout.soft_overlong),
        choice=rollout,
        seed=seed,
    )
    judge = scored()
    prompts = source.heldout(stage.evaluation.prompts)
    judge.check(prompts)
    # Evaluated is the policy that is kept, not what its rounded or earlier copy would say.
    exact = replace(sampler, engine=engine(policy.model))
    evaluator = Evaluator(exact, judge, prompts, stage.evaluation) if prompts else None
    drawing = Drawing(
        partial(collect, sampler, stage.algorithm),
        ahead=rollout.ahead > 0,
        pending=read_pending(work.resume_from),
    )
    return rl.Loop(stage, learner, sampler, drawing, evaluator, work.session, seed)
