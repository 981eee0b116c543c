"""What the stages share that learn from preference data: rows, loop, and reward models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, cast

import torch

from keel.analysis.statistics import Interval
from keel.config.fields import derive
from keel.config.judging import (
    JudgingStage,
    SampledData,
)
from keel.config.model import BaseModelChoice, Model
from keel.config.schema import Recipe
from keel.config.sources import PreferenceData
from keel.data.preferences.dataset import READERS, readable
from keel.learn.optimizer import AdamW, trainable
from keel.models.policy import Policy, load_policy
from keel.models.reward import (
    Kind,
    RewardModel,
    continued_reward_model,
    load_reward_model,
    reward_model_from,
)
from keel.runs import checkpoint
from keel.runs.quarantine import LeftOut, named_from, write_quarantine
from keel.training import loop, supervised
from keel.training.judging import sampled
from keel.training.judging.data import Ready, encoder, ready
from keel.training.judging.metrics import (
    Measured,
    plot_calibration,
    reward_model_metrics,
)
from keel.training.judging.versions import (
    is_newest,
    measure_forgetting,
    rows_of,
    versions,
    with_replay,
)
from keel.training.setup import (
    RunContext,
    build_sampler,
    load_rewards,
    open_prompts,
    reward_context,
    scorer,
    supervised_loop,
)
from keel.training.state import Progress, restore_modules, restore_optimizers
from keel.training.supervised import GradientStep, judged_examples
from keel.types import KeelError

Backward = Callable[[Sequence[Any], int], GradientStep]


def train_reward_model(
    run: RunContext,
    stage: JudgingStage,
    model: RewardModel,
    make: sampled.Make,
    backward: Backward,
    progress: Progress,
    separator: str = "\n",
    threshold: float = 0.5,
) -> Progress:
    """Train a reward model, and save it in the run folder."""
    records = stage.records
    encode = encoder(records, model.reader(stage.raw), separator)
    rows = examples(run, stage, make, encode, model.context, model)
    judge = partial(model.judge, token_budget=stage.token_budget)
    optimizer, modules = AdamW(trainable(model), stage.optimizer), {"reward_model": model}
    if run.resume_from is not None:
        restore_modules(run.resume_from, modules)
        restore_optimizers(run.resume_from, {"optimizer": optimizer})
    made = preference_loop(
        run, stage, progress, rows, model.device, backward,
        partial(reward_model_metrics, records, judge=judge, threshold=threshold),
        optimizer=optimizer, modules=modules,
    )  # fmt: skip
    progress = loop.run(made, progress)
    if progress.step == stage.steps:
        _keep(run, stage, model, encode, threshold)
    return progress


def _keep(
    run: RunContext,
    stage: JudgingStage,
    model: RewardModel,
    encode: Callable[[Any], Any],
    threshold: float,
) -> None:
    """Save a trained reward model in the run folder; of its newest version measure what it has
    forgotten."""
    folder, recipe = run.writer.folder, run.recipe
    # Also where there is one: another's would be learned from.
    with checkpoint.writing(folder.model(stage.name)) as aside:
        model.save(aside)
    if len(versions(recipe, stage)) == 1 or not is_newest(recipe, stage):
        return
    kind, records = cast(Kind, stage.reward_model), stage.records

    limits = [limit for limit in (stage.max_tokens, model.context) if limit is not None]

    def accuracies(version: str, held: Sequence[Sequence[Any]]) -> list[Interval]:
        loaded = load_reward_model(_other_model(recipe, str(folder.model(version))), kind)
        judge = partial(loaded.judge, token_budget=stage.token_budget)
        found = []
        for rows in held:
            encoded = [one for row in rows if (one := readable(row, encode)) is not None]
            fitting = [row for row in encoded if all(row.longest <= limit for limit in limits)]
            found.append(reward_model_metrics(records, fitting, judge, threshold).report.accuracy)
        return found

    if stage.evaluation.rows:
        measure_forgetting(folder, recipe, stage, accuracies)


def preference_loop(
    run: RunContext,
    stage: JudgingStage,
    progress: Progress,
    rows: Ready[Any],
    device: torch.device,
    backward: Backward,
    measure: Callable[[Sequence[Any]], Measured],
    **parts: Any,
) -> loop.Loop:
    """The loop over preference data."""
    seed = derive(run.recipe.seed, stage.name, "rows")
    plot = partial(
        plot_calibration,
        folder=run.writer.folder.pictures,
        name=stage.name,
        title=f"{run.recipe.name}: {stage.name}",
    )
    return supervised_loop(
        run,
        stage,
        progress,
        examples=judged_examples(rows.train, stage.batch_size, seed, device, backward),
        evaluate=partial(supervised.evaluate, partial(measure, rows.validation), plot)
        if rows.validation
        else None,
        **parts,
    )


def new_model(run: RunContext, base: BaseModelChoice, kind: Kind, stage: str) -> RewardModel:
    """The reward model that a stage starts from."""
    seed = derive(run.recipe.seed, stage, "model")
    with _keys_of(f"{stage}.base"):
        if base.stage is None:
            return reward_model_from(
                base_policy(run.recipe, run.policy, base), kind, seed, base.lora
            )
        made = run.writer.folder.model(base.stage)
        checkpoint.check_model(made)
        before = _other_model(run.recipe, str(made))
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


def base_policy(recipe: Recipe, policy: Policy, base: BaseModelChoice) -> Policy:
    """The language model that a reward model starts from: the policy, or one that is named."""
    if base.name is None:
        return policy
    named = load_policy(_other_model(recipe, base.name), recipe.seed)
    if named.tokenizer.chat_template is None:
        named.tokenizer.chat_template = recipe.model.chat_template
    return named


def _other_model(recipe: Recipe, name: str) -> Model:
    """The recipe's model settings with another model in them, which has a chat template itself."""
    own = {"name": name, "build": None, "revision": None, "lora": None, "chat_template": None}
    return recipe.model.model_copy(update=own)


def _sampled_files(
    run: RunContext, stage: JudgingStage, choice: SampledData, make: sampled.Make
) -> PreferenceData:
    """The stage's data as files of the run folder, sampled unless they are there."""
    folder, policy = run.writer.folder, run.policy
    made = rows_of(folder, stage)
    train = folder.rows(stage.name, "train")
    rows = train if choice.people is None else folder.pool(stage.name)
    if rows.exists() and folder.rows(stage.name, "validation").exists():
        return made
    seed = derive(run.recipe.seed, stage.name, "sampled")
    source = open_prompts(
        run,
        stage.name,
        choice.tasks,
        choice.prompts,
        seed,
        max_tokens=choice.max_tokens,
        key="sampled.max_tokens",
    )
    functions = load_rewards(choice.rewards, reward_context(run.recipe, folder, policy))
    judge = scorer(choice.rewards, functions, source.tasks, max_tokens=choice.max_tokens)
    with closing(judge):
        less = f"lower {stage.name}.sampled.max_tokens or {stage.name}.sampled.group_size"
        sampler = build_sampler(policy, source, judge, choice.sampling.rollout, seed, less=less)
        prompts = source.validation(choice.validation)
        judge.check(prompts)
        parts = sampled.SampledDataSource(sampler, judge, prompts, choice, seed)
        counts = sampled.write_rows(parts, folder, stage.name, make)
    if counts:
        run.writer.note(f"{stage.name}: {counts}")
    return made


def examples(
    run: RunContext,
    stage: JudgingStage,
    make: sampled.Make,
    encode: Callable[[Any], Any],
    context: int | None,
    model: RewardModel | None = None,
) -> Ready[Any]:
    """The stage's examples, in tokens; a new stage notes those left out.

    People label the pairs that `model` is least sure of.
    """
    limits = [limit for limit in (stage.max_tokens, context) if limit is not None]
    limit = min(limits) if limits else None
    if stage.sampled is None:
        data = cast(PreferenceData, stage.data)
    else:
        data = _sampled_files(run, stage, stage.sampled, make)
        if stage.sampled.people is not None and model is not None:
            _ask_people(run, stage, model, encode, limit)
    splits = READERS[stage.records](data, run.recipe.seed)
    splits = with_replay(run.writer.folder, run.recipe, stage, splits)
    quarantine = data.bad_rows == "quarantine"
    rows = ready(splits, encode, limit, stage.evaluation.rows, stage.name, quarantine=quarantine)
    kept = _quarantined(run, stage, rows.left_out)
    left = (
        (rows.long, f"longer than {limit} tokens"),
        (rows.long_validation, f"held out and longer than {limit} tokens"),
        (splits.overlap, "with a prompt or group that is also in the validation split"),
        (splits.dropped, "with an empty answer"),
        (sum(row.why == "bad" for row in rows.left_out), "that cannot be read"),
    )
    reasons = [f"{n} {why}" for n, why in left if n]
    if reasons and run.resume_from is None:
        run.writer.note(f"{stage.name}: rows left out: {', '.join(reasons)} ({kept})")
    return rows


def _ask_people(
    run: RunContext,
    stage: JudgingStage,
    model: RewardModel,
    encode: Callable[[Any], Any],
    limit: int | None,
) -> None:
    """Have people label some of the sampled pairs, unless they have."""
    folder = run.writer.folder
    if folder.rows(stage.name, "train").exists():
        return
    if run.labeller is None:
        raise KeelError(f"stage {stage.name!r}: people label its pairs: give train a labeller")
    seed = derive(run.recipe.seed, stage.name, "people")
    line = run.labeller.label(folder, stage, model=model, encode=encode, limit=limit, seed=seed)
    run.writer.note(f"{stage.name}: {line}")


def _quarantined(run: RunContext, stage: JudgingStage, left: Sequence[LeftOut]) -> str:
    """Put the rows left out into the quarantine; the file, as a note names it."""
    folder = run.writer.folder
    target = folder.quarantine / f"{stage.name}-rows.jsonl"
    # Rows sampled into the run folder are named relative to it.
    write_quarantine(target, left if stage.data is not None else named_from(folder.path, left))
    return f"quarantine/{target.name}"
