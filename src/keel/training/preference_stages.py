"""Builds and runs the stages that learn from preference data: reward models and DPO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, TypeVar

from keel.config.judging import (
    DPOStage,
    JudgingStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from keel.config.model import BaseModelChoice, Model
from keel.config.preference_data import PreferenceData
from keel.config.seeds import derive
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
from keel.training import dpo, reward_model
from keel.training import sampled_data as rows_sampled
from keel.training.judged_data import Ready, label_encoder, pair_encoder, ready, step_encoder
from keel.training.reward_evaluation import draw
from keel.training.reward_metrics import Measured, measure_labels, measure_pairs, measure_steps
from keel.training.rollout import Sampler
from keel.training.setup import (
    RunContext,
    load_rewards,
    open_prompts,
    reward_context,
    scorer,
    token_budget,
)
from keel.training.state import Progress, read_reference, restore_modules, restore_optimizers
from keel.types import KeelError

R = TypeVar("R", Preference, Labelled, Stepwise)


def train_reward_model(run: RunContext, stage: RewardModelStage, progress: Progress) -> Progress:
    """An outcome reward model, left in the run folder; the policy stays as it was."""
    model = _new_model(run, stage.base, "outcome", stage.name)
    reader = model.reader(stage.raw)
    rows: Ready[Any]
    learn: Callable[[Sequence[Any], int], Any]
    measure: Callable[[Sequence[Any]], Measured]
    judge = partial(model.judge, token_budget=stage.token_budget)
    if stage.objective == "pairs":
        pairs = _rows(run, stage, preferences.read_pairs, rows_sampled.pairs)
        rows = _ready(run, pairs, pair_encoder(reader), stage, model.context)
        learn = partial(reward_model.learn_pairs, model, stage)
        measure = partial(measure_pairs, judge=judge)
    else:
        labelled = _rows(run, stage, preferences.read_labelled, rows_sampled.labels)
        rows = _ready(run, labelled, label_encoder(reader), stage, model.context)
        learn = partial(reward_model.learn_marks, model)
        measure = partial(measure_labels, judge=judge)
    return _judging(run, stage, model, rows, learn, measure, progress)


def train_process_reward_model(
    run: RunContext, stage: ProcessRewardModelStage, progress: Progress
) -> Progress:
    """A process reward model, left in the run folder; the policy stays as it was."""
    model = _new_model(run, stage.base, "process", stage.name)
    tokenizer = run.policy.tokenizer
    make = rows_sampled.steps(stage.separator, lambda ids: decode(tokenizer, [ids])[0])
    stepwise = _rows(run, stage, preferences.read_steps, make)
    encode = step_encoder(model.reader(stage.raw), stage.separator)
    rows = _ready(run, stepwise, encode, stage, model.context)
    judge = partial(model.judge, token_budget=stage.token_budget)
    learn = partial(reward_model.learn_marks, model)
    measure = partial(measure_steps, judge=judge, threshold=stage.threshold)
    return _judging(run, stage, model, rows, learn, measure, progress)


def train_dpo(run: RunContext, stage: DPOStage, progress: Progress) -> Progress:
    """DPO of the policy."""
    policy, start = run.policy, run.resume_from
    pairs = _rows(run, stage, preferences.read_pairs, rows_sampled.pairs)
    optimizer = AdamW(trainable(policy), stage.optimizer)
    reference = reference_for(policy, None if start is None else read_reference(start))
    sampled = stage.sampled
    template = stage.chat_template if sampled is None else sampled.prompts.chat_template
    reader = Reader(policy.tokenizer, policy.context, template, raw=stage.raw)
    if start is not None:
        restore_optimizers(start, {"optimizer": optimizer})
    parts = dpo.Preferring(
        stage=stage,
        policy=policy,
        reference=reference,
        optimizer=optimizer,
        budget=token_budget(stage, progress, run.writer),
        rows=_ready(run, pairs, pair_encoder(reader), stage, policy.context),
        show=partial(
            draw,
            folder=run.writer.folder.pictures,
            name=stage.name,
            title=f"{run.recipe.name}: {stage.name}",
        ),
        writer=run.writer,
        seed=derive(run.recipe.seed, stage.name, "rows"),
    )
    return dpo.run(parts, progress)


def _judging(
    run: RunContext,
    stage: JudgingStage,
    model: RewardModel,
    rows: Ready[Any],
    learn: Callable[[Sequence[Any], int], Any],
    measure: Callable[[Sequence[Any]], Measured],
    progress: Progress,
) -> Progress:
    optimizer = AdamW(trainable(model), stage.optimizer)
    if run.resume_from is not None:
        restore_modules(run.resume_from, {"reward_model": model})
        restore_optimizers(run.resume_from, {"optimizer": optimizer})
    parts = reward_model.RewardModelTrainer(
        stage=stage,
        policy=run.policy,
        model=model,
        optimizer=optimizer,
        budget=token_budget(stage, progress, run.writer),
        rows=rows,
        learn=learn,
        measure=measure,
        show=partial(
            draw,
            folder=run.writer.folder.pictures,
            name=stage.name,
            title=f"{run.recipe.name}: {stage.name}",
        ),
        writer=run.writer,
        seed=derive(run.recipe.seed, stage.name, "rows"),
    )
    progress = reward_model.run(parts, progress)
    target = run.writer.folder.model(stage.name)
    if progress.step == stage.steps and not target.exists():
        with checkpoint.writing(target) as aside:
            model.save(aside)
    return progress


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
    """Errors of loading name the keys of a base model, which are not those of `model`."""
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
    make: rows_sampled.Make,
) -> Sides[R]:
    """The stage's rows: from its data, or sampled into the run folder and read from there."""
    if stage.data is not None:
        return read(stage.data, run.recipe.seed)
    folder = run.writer.folder
    summary = _sample(run, stage, make)
    if summary:
        run.writer.note(f"{stage.name}: {summary}")
    train, held = folder.rows(stage.name, "train"), folder.rows(stage.name, "heldout")
    made = PreferenceData(name="jsonl", path=str(train), validation_path=str(held), empty="keep")
    return read(made, run.recipe.seed)


def _sample(run: RunContext, stage: JudgingStage, make: rows_sampled.Make) -> str:
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
            choice=choice.sampling.rollout,
            seed=seed,
            less=f"lower {stage.name}.sampled.max_tokens or {stage.name}.sampled.group_size",
        )
        held = source.heldout(choice.heldout)
        judge.check(held)
        parts = rows_sampled.SampledDataSource(sampler, judge, held, choice, seed)
        return rows_sampled.write_rows(parts, folder, stage.name, make)


def _ready(
    run: RunContext,
    sides: Sides[R],
    encode: Callable[[R], Any],
    stage: JudgingStage,
    context: int | None,
) -> Ready[Any]:
    """The rows in tokens; what was left out on the way is noted where the stage begins."""
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
    # Rows sampled into the run folder are named from there, wherever it lies.
    write_quarantine(target, left if stage.data is not None else named_from(folder.path, left))
    return f"quarantine/{target.name}"
