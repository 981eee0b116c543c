"""Builds and runs the stages that learn from preference data: reward models and DPO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from keel.config.fields import derive
from keel.config.judging import (
    DPOStage,
    JudgingStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from keel.config.model import BaseModelChoice, Model
from keel.config.sources import PreferenceData
from keel.data.preferences import dataset as preferences
from keel.data.preferences.dataset import Sides, Sieve
from keel.data.preferences.schema import Labelled, Preference, Stepwise
from keel.engines.registry import build_engine
from keel.learn.optimizer import AdamW, trainable
from keel.models.chat import decode
from keel.models.policy import Policy, load_policy
from keel.models.reference import reference_for
from keel.models.reward import Kind, Reader, RewardModel, continued_reward_model, reward_model_from
from keel.runs import checkpoint
from keel.runs.quarantine import LeftOut, named_from, write_quarantine
from keel.training import sampled_data, supervised
from keel.training.dpo import DPO
from keel.training.judged_data import Ready, label_encoder, pair_encoder, ready, step_encoder
from keel.training.reward_metrics import (
    Measured,
    measure_labels,
    measure_pairs,
    measure_steps,
    plot_calibration,
)
from keel.training.reward_model import labels_backward, pairs_backward
from keel.training.rollout import Sampler
from keel.training.setup import (
    RunContext,
    load_rewards,
    open_prompts,
    reward_context,
    scorer,
    supervised_loop,
    token_budget,
)
from keel.training.state import Progress, read_reference, restore_modules, restore_optimizers
from keel.training.supervised import GradientStep, judged_examples
from keel.types import KeelError

R = TypeVar("R", Preference, Labelled, Stepwise)


def train_reward_model(run: RunContext, stage: RewardModelStage, progress: Progress) -> Progress:
    """An outcome reward model, left in the run folder; the policy stays as it was."""
    model = _new_model(run, stage.base, "outcome", stage.name)
    reader = model.reader(stage.raw)
    rows: Ready[Any]
    backward: Callable[[Sequence[Any], int], GradientStep]
    measure: Callable[[Sequence[Any]], Measured]
    judge = partial(model.judge, token_budget=stage.token_budget)
    if stage.objective == "pairs":
        pairs = _rows(run, stage, preferences.read_pairs, sampled_data.pairs)
        rows = _ready(run, pairs, pair_encoder(reader), stage, model.context)
        backward = partial(pairs_backward, model, stage.centering)
        measure = partial(measure_pairs, judge=judge)
    else:
        labelled = _rows(run, stage, preferences.read_labelled, sampled_data.labels)
        rows = _ready(run, labelled, label_encoder(reader), stage, model.context)
        backward = partial(labels_backward, model)
        measure = partial(measure_labels, judge=judge)
    return _train(run, stage, model, rows, backward, measure, progress)


def train_process_reward_model(
    run: RunContext, stage: ProcessRewardModelStage, progress: Progress
) -> Progress:
    """A process reward model, left in the run folder; the policy stays as it was."""
    model = _new_model(run, stage.base, "process", stage.name)
    tokenizer = run.policy.tokenizer
    make = sampled_data.steps(stage.separator, lambda ids: decode(tokenizer, [ids])[0])
    stepwise = _rows(run, stage, preferences.read_steps, make)
    encode = step_encoder(model.reader(stage.raw), stage.separator)
    rows = _ready(run, stepwise, encode, stage, model.context)
    judge = partial(model.judge, token_budget=stage.token_budget)
    backward = partial(labels_backward, model)
    measure = partial(measure_steps, judge=judge, threshold=stage.threshold)
    return _train(run, stage, model, rows, backward, measure, progress)


def train_dpo(run: RunContext, stage: DPOStage, progress: Progress) -> Progress:
    """DPO of the policy."""
    policy, start = run.policy, run.resume_from
    pairs = _rows(run, stage, preferences.read_pairs, sampled_data.pairs)
    optimizer = AdamW(trainable(policy), stage.optimizer)
    reference = reference_for(policy, None if start is None else read_reference(start))
    sampled = stage.sampled
    template = stage.chat_template if sampled is None else sampled.prompts.chat_template
    reader = Reader(policy.tokenizer, policy.context, template, raw=stage.raw)
    if start is not None:
        restore_optimizers(start, {"optimizer": optimizer})
    rows = _ready(run, pairs, pair_encoder(reader), stage, policy.context)
    budget = token_budget(stage, progress, run.writer)
    trainer = DPO(policy, reference, budget, stage.loss, stage.beta, stage.smoothing)
    loop = _loop(
        run,
        stage,
        progress,
        rows,
        policy.device,
        trainer.backward,
        partial(measure_pairs, judge=trainer.implied_rewards),
        budget=budget,
        optimizer=optimizer,
        reference=reference,
    )
    return supervised.run(loop, progress)


def _train(
    run: RunContext,
    stage: JudgingStage,
    model: RewardModel,
    rows: Ready[Any],
    backward: Callable[[Sequence[Any], int], GradientStep],
    measure: Callable[[Sequence[Any]], Measured],
    progress: Progress,
) -> Progress:
    """Train a reward model, and save it in the run folder."""
    optimizer, modules = AdamW(trainable(model), stage.optimizer), {"reward_model": model}
    if run.resume_from is not None:
        restore_modules(run.resume_from, modules)
        restore_optimizers(run.resume_from, {"optimizer": optimizer})
    loop = _loop(
        run,
        stage,
        progress,
        rows,
        model.device,
        backward,
        measure,
        optimizer=optimizer,
        modules=modules,
    )
    progress = supervised.run(loop, progress)
    target = run.writer.folder.model(stage.name)
    if progress.step == stage.steps and not target.exists():
        with checkpoint.writing(target) as aside:
            model.save(aside)
    return progress


def _loop(
    run: RunContext,
    stage: JudgingStage,
    progress: Progress,
    rows: Ready[Any],
    device: torch.device,
    backward: Callable[[Sequence[Any], int], GradientStep],
    measure: Callable[[Sequence[Any]], Measured],
    **parts: Any,
) -> supervised.SupervisedLoop[Any]:
    """The loop over preference data."""
    seed = derive(run.recipe.seed, stage.name, "rows")
    title = f"{run.recipe.name}: {stage.name}"
    return supervised_loop(
        run,
        stage,
        progress,
        examples=judged_examples(rows.train, stage.batch_size, seed, device, backward),
        evaluate=partial(measure, rows.heldout) if rows.heldout else None,
        evaluate_every=stage.evaluation.every,
        plot=partial(
            plot_calibration, folder=run.writer.folder.pictures, name=stage.name, title=title
        ),
        **parts,
    )


def _new_model(run: RunContext, base: BaseModelChoice, kind: Kind, stage: str) -> RewardModel:
    seed = derive(run.recipe.seed, stage, "model")
    with _keys_of(f"{stage}.base"):
        if base.stage is None:
            return reward_model_from(_base(run, base), kind, seed, base.lora)
        made = run.writer.folder.model(base.stage)
        checkpoint.check_model(made)
        before = _named(run, str(made))
        return continued_reward_model(before, kind, run.policy, seed, base.lora)


@contextmanager
def _keys_of(base: str) -> Iterator[None]:
    """Errors of loading name the keys of a base model instead of those of `model`."""
    try:
        yield
    except KeelError as error:
        message = str(error)
        for key in ("name", "lora"):
            message = message.replace(f"model.{key}", f"{base}.{key}")
        raise KeelError(message) from error


def _base(run: RunContext, base: BaseModelChoice) -> Policy:
    """The language model that a reward model starts from."""
    if base.name is None:
        return run.policy
    policy = load_policy(_named(run, base.name), run.recipe.seed)
    if policy.tokenizer.chat_template is None:
        policy.tokenizer.chat_template = run.recipe.model.chat_template
    return policy


def _named(run: RunContext, name: str) -> Model:
    """The recipe's model settings with another model in them, which has a chat template itself."""
    own = {"name": name, "build": None, "revision": None, "lora": None, "chat_template": None}
    return run.recipe.model.model_copy(update=own)


def _rows(
    run: RunContext,
    stage: JudgingStage,
    read: Callable[[PreferenceData, int], Sides[R]],
    make: sampled_data.Make,
) -> Sides[R]:
    """The stage's rows: from its data, or sampled into the run folder and read from there."""
    if stage.data is not None:
        return read(stage.data, run.recipe.seed)
    folder = run.writer.folder
    counts = _sample(run, stage, make)
    if counts:
        run.writer.note(f"{stage.name}: {counts}")
    train, held = folder.rows(stage.name, "train"), folder.rows(stage.name, "heldout")
    made = PreferenceData(name="jsonl", path=str(train), validation_path=str(held), empty="keep")
    return read(made, run.recipe.seed)


def _sample(run: RunContext, stage: JudgingStage, make: sampled_data.Make) -> str:
    choice, policy = stage.sampled, run.policy
    assert choice is not None
    folder = run.writer.folder
    if folder.rows(stage.name, "train").exists() and folder.rows(stage.name, "heldout").exists():
        return ""
    seed = derive(run.recipe.seed, stage.name, "sampled")
    source = open_prompts(
        run, stage.name, choice.tasks, choice.prompts, seed, max_tokens=choice.max_tokens
    )
    functions = load_rewards(choice.rewards, reward_context(run.recipe, folder, policy))
    judge = scorer(choice.rewards, functions, source.tasks, max_tokens=choice.max_tokens)
    with closing(judge):
        sampler = Sampler(
            engine=build_engine(
                "native",
                model=policy.model,
                tokenizer=policy.tokenizer,
                autocast=policy.autocast,
            ),
            tokenizer=policy.tokenizer,
            tasks=source.tasks,
            stream=source.stream,
            scorer=judge,
            config=choice.sampling.rollout,
            seed=seed,
            less=f"lower {stage.name}.sampled.max_tokens or {stage.name}.sampled.group_size",
        )
        held = source.heldout(choice.heldout)
        judge.check(held)
        parts = sampled_data.SampledDataSource(sampler, judge, held, choice, seed)
        return sampled_data.write_rows(parts, folder, stage.name, make)


def _ready(
    run: RunContext,
    sides: Sides[R],
    encode: Callable[[R], Any],
    stage: JudgingStage,
    context: int | None,
) -> Ready[Any]:
    """The rows in tokens; a new stage notes what was left out."""
    limits = [limit for limit in (stage.max_tokens, context) if limit is not None]
    limit = min(limits) if limits else None
    sieve: Sieve[R, Any] = Sieve(encode, limit)
    if stage.data is not None and stage.data.bad_rows == "quarantine":
        sides = sieve.without_bad(sides)
    rows = ready(sides, sieve, limit, stage.evaluation.rows, stage.name)
    kept = _quarantined(run, stage, (*sides.left_out, *sieve.left_out))
    left = (
        (rows.long, f"longer than {limit} tokens"),
        (rows.long_heldout, f"held out and longer than {limit} tokens"),
        (sides.overlap, "with a prompt or group that is also held out"),
        (sides.dropped, "with an empty answer"),
        (sum(row.why == "bad" for row in sides.left_out), "that cannot be read"),
    )
    reasons = [f"{n} {why}" for n, why in left if n]
    if reasons and run.resume_from is None:
        run.writer.note(f"{stage.name}: rows left out: {', '.join(reasons)} ({kept})")
    return rows


def _quarantined(run: RunContext, stage: JudgingStage, left: Sequence[LeftOut]) -> str:
    """Put the rows left out into the quarantine; the file, as a note names it."""
    folder = run.writer.folder
    target = folder.quarantine / f"{stage.name}-rows.jsonl"
    # Rows sampled into the run folder are named relative to it.
    write_quarantine(target, left if stage.data is not None else named_from(folder.path, left))
    return f"quarantine/{target.name}"
