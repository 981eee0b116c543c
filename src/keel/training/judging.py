"""What the stages share that learn from preference data: rows, loop, and reward models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from keel.analysis.plots import forgetting_picture
from keel.config.fields import derive
from keel.config.judging import (
    JudgingStage,
    SampledData,
)
from keel.config.model import BaseModelChoice, Model
from keel.config.schema import Recipe
from keel.config.sources import PreferenceData
from keel.data.preferences import READERS
from keel.data.splits import Splits
from keel.learn.memory import LESS, oom_context
from keel.learn.optimizer import WeightOptimizer, trainable
from keel.models.loading import naming_keys
from keel.models.policy import Policy, load_policy
from keel.models.reward import (
    Kind,
    RewardModel,
    continued_reward_model,
    load_reward_model,
    reward_model_from,
)
from keel.platform.files import make_folder
from keel.runs import checkpoint
from keel.runs.layout import RunFolder
from keel.runs.reader import read_run_json
from keel.runs.rows import LeftOut, named_from, write_quarantine
from keel.runs.writer import update_run_json
from keel.training.judged_data import (
    Make,
    Ready,
    cluster_of,
    encoder,
    of_step,
    ready,
    sizes_of,
    some_rows,
    write_rows,
)
from keel.training.judged_losses import Measured, plot_calibration, reward_model_metrics
from keel.training.loop import EvaluationResult
from keel.training.setup import (
    RunContext,
    build_sampler,
    build_scorer,
    load_rewards,
    open_prompts,
    reward_context,
    rollout_engine,
)
from keel.training.state import Progress
from keel.training.supervised import Examples, train_on_examples
from keel.types import KeelError

Backward = Callable[[Sequence[Any], int], dict[str, float]]
Measure = Callable[[Sequence[Any]], Measured]


def train_reward_model(
    run: RunContext,
    stage: JudgingStage,
    progress: Progress,
    model: RewardModel,
    make: Make,
    backward: Backward,
) -> Progress:
    """Train a reward model, and save it in the run folder."""
    source = stage.judged
    encode = encoder(source.records, model.reader(source.raw), source.separator)
    rows = examples(run, stage, make, encode, model.context, model)
    stage = run.resolved(stage, len(rows.train), stage.batch_size)
    progress = train_on_rows(
        run,
        stage,
        progress,
        rows,
        WeightOptimizer(trainable(model), stage.optimizer),
        backward,
        _measure_of(model, stage),
        model.device,
        modules={"reward_model": model},
    )
    if progress.is_over(stage.steps):
        # Also if there is one: another's would be learned from.
        with checkpoint.writing(run.folder.model(stage.name)) as aside:
            model.save(aside)
        _measure_versions(run, stage, encode, model.context)
    return progress


def train_on_rows(
    run: RunContext,
    stage: JudgingStage,
    progress: Progress,
    rows: Ready[Any],
    optimizer: WeightOptimizer,
    backward: Backward,
    measure: Measure,
    device: torch.device,
    **parts: Any,
) -> Progress:
    """Train on judged rows, measured on those of the validation split.

    `parts` are others of `train_on_examples`.
    """
    seed = derive(run.recipe.seed, stage.name, "rows")
    stage = run.resolved(stage, len(rows.train), stage.batch_size)
    read = Examples(
        batch=lambda number: of_step(rows.train, stage.batch_size, number, seed),
        backward=backward,
        sizes=lambda batch: sizes_of(batch, device),
        split=lambda batch: [[row] for row in batch],
        write=_write_rows,
    )
    plot = partial(
        plot_calibration,
        folder=run.folder.pictures,
        name=stage.name,
        title=f"{run.recipe.name}: {stage.name}",
    )
    evaluate = partial(_evaluation, partial(measure, rows.validation), plot)
    return train_on_examples(
        run, stage, progress, read, optimizer, evaluate=evaluate if rows.validation else None,
        **parts,
    )  # fmt: skip


def _write_rows(folder: Path, rows: Sequence[Any]) -> None:
    """The rows of a step that was not taken, as plain values."""
    checkpoint.save_json(folder / "rows.json", {"rows": [asdict(row) for row in rows]})


@oom_context("the validation rows were measured", f"lower token_budget, {LESS}")
def _evaluation(
    measure: Callable[[], Measured], plot: Callable[[Measured], None], step: int
) -> EvaluationResult:
    """The evaluation of a model on the validation rows."""
    found = measure()
    headline = found.headline()
    return EvaluationResult(
        found.as_dict(),
        {f"eval/{name}": value for name, value in headline.items()},
        kind="measured",
        before=headline,
        plot=partial(plot, found),
    )


def _measure_of(model: RewardModel, stage: JudgingStage) -> Measure:
    """The metrics of a reward model on rows of a stage."""
    source, judge = stage.judged, partial(model.judge, token_budget=stage.initial_token_budget)
    return partial(reward_model_metrics, source.records, judge=judge, threshold=source.threshold)


def _measure_versions(
    run: RunContext, stage: JudgingStage, encode: Callable[[Any], Any], context: int | None
) -> None:
    """What the newest version of a reward model has forgotten of those before it.

    `accuracy[v][h]` is that of version v on the validation rows of the stage that made version h,
    at most `evaluation.rows` of each; kept in run.json under the name of the stage, and plotted.
    """
    recipe, folder = run.recipe, run.folder
    chain, limit = versions(recipe, stage), longest_row(stage, context)
    if len(chain) == 1 or not is_newest(recipe, stage) or not stage.evaluation.rows:
        return
    held = []
    for one in chain:
        rows = some_rows(_read(folder, recipe, one).validation, stage.evaluation.rows)
        encoded = []
        for row in rows:
            with suppress(KeelError):  # a row of another stage may not be encodable
                encoded.append(encode(row))
        held.append([row for row in encoded if limit is None or row.longest <= limit])
    names, accuracy = [one.name for one in chain], []
    for name in names:
        kind = cast(Kind, stage.reward_model)
        measure = _measure_of(
            load_reward_model(other_model(recipe, str(folder.model(name))), kind), stage
        )
        accuracy.append([measure(rows).report.accuracy for rows in held])
        del measure  # the next version is loaded without this one in memory
    figures = [[interval.as_dict() for interval in row] for row in accuracy]
    kept = read_run_json(folder).get("forgetting", {})
    found = {"versions": names, "accuracy": figures}
    update_run_json(folder, {"forgetting": {**kept, stage.name: found}})
    target = folder.pictures / f"{stage.name}-forgetting.png"
    make_folder(target.parent)
    title = f"{recipe.name}: accuracy of each version of the reward model"
    forgetting_picture(names, accuracy, target, title)


def longest_row(stage: JudgingStage, context: int | None) -> int | None:
    """The most tokens that a row may have."""
    return min((n for n in (stage.max_tokens, context) if n is not None), default=None)


def new_model(
    run: RunContext, stage: JudgingStage, base: BaseModelChoice, kind: Kind
) -> RewardModel:
    """The reward model that a stage starts from."""
    seed = derive(run.recipe.seed, stage.name, "model")
    with keys_of_base(f"{stage.name}.base"):
        if base.stage is None:
            return reward_model_from(
                base_policy(run.recipe, run.policy, base), kind, seed, base.lora
            )
        made = run.writer.folder.model(base.stage)
        checkpoint.check_model(made)
        before = other_model(run.recipe, str(made))
        return continued_reward_model(before, kind, run.policy, seed, base.lora)


def keys_of_base(base: str) -> AbstractContextManager[None]:
    """Errors of loading name the keys of a base model instead of those of `model`."""
    return naming_keys(name=f"{base}.name", lora=f"{base}.lora")


def base_policy(recipe: Recipe, policy: Policy, base: BaseModelChoice) -> Policy:
    """The language model that a reward model starts from: the policy, or one that is named."""
    if base.name is None:
        return policy
    named = load_policy(other_model(recipe, base.name), recipe.seed)
    if named.tokenizer.chat_template is None:
        named.tokenizer.chat_template = recipe.model.chat_template
    return named


def other_model(recipe: Recipe, name: str) -> Model:
    """The recipe's model settings with another model in them, which has a chat template itself."""
    none = ("build", "revision", "lora", "quantisation", "chat_template")
    return recipe.model.model_copy(update={"name": name, **dict.fromkeys(none)})


def _sampled_files(
    run: RunContext, stage: JudgingStage, choice: SampledData, make: Make
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
    judge = build_scorer(choice.sampling, functions, source.tasks)
    with closing(judge):
        less = f"lower {stage.name}.sampled.max_tokens or {stage.name}.sampled.group_size"
        rollout = choice.sampling.rollout
        engine = rollout_engine(policy, rollout)
        sampler = build_sampler(engine, source, judge, rollout, seed, less=less)
        prompts = source.validation(choice.validation)
        judge.check(prompts)
        counts = write_rows(sampler, choice, folder, stage.name, make, validation=prompts)
    if counts:
        run.writer.note(f"{stage.name}: {counts}")
    return made


def examples(
    run: RunContext,
    stage: JudgingStage,
    make: Make,
    encode: Callable[[Any], Any],
    context: int | None,
    model: RewardModel | None = None,
) -> Ready[Any]:
    """The stage's examples, in tokens; a new stage notes those left out.

    People label the pairs that `model` is least sure of.
    """
    limit = longest_row(stage, context)
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


# ---------------------------------------------------------------- versions of a reward model


def versions(recipe: Recipe, stage: JudgingStage) -> tuple[JudgingStage, ...]:
    """The stages whose model this one trains further, the first one first, and itself."""
    stages = {one.name: one for one in recipe.stages}
    found = [stage]
    while (base := found[0].base_model) is not None and base.stage is not None:
        found.insert(0, cast(JudgingStage, stages[base.stage]))
    return tuple(found)


def is_newest(recipe: Recipe, stage: JudgingStage) -> bool:
    """Whether no stage trains its model further."""
    bases = [one.base_model for one in recipe.stages]
    return all(base is None or base.stage != stage.name for base in bases)


def rows_of(folder: RunFolder, stage: JudgingStage) -> PreferenceData:
    """The rows of a stage: its data, or what it sampled into the run folder."""
    if stage.data is not None:
        return stage.data
    train, held = (folder.rows(stage.name, split) for split in ("train", "validation"))
    return PreferenceData(name="jsonl", path=str(train), validation_path=str(held), empty="keep")


def with_replay(
    folder: RunFolder, recipe: Recipe, stage: JudgingStage, splits: Splits[Any]
) -> Splits[Any]:
    """The rows of a stage, and the share `base.replay` of the train rows of earlier versions.

    Rows whose prompt or group is in the stage's validation split are not replayed.
    """
    base = stage.base_model
    if base is None or not base.replay:
        return splits
    held = {cluster_of(row) for row in splits.validation}
    rows = [
        row
        for before in versions(recipe, stage)[:-1]
        for row in _read(folder, recipe, before).train
        if cluster_of(row) not in held
    ]
    rng = np.random.default_rng(derive(recipe.seed, stage.name, "replay"))
    chosen = np.sort(rng.permutation(len(rows))[: round(base.replay * len(rows))])
    return Splits((*splits.train, *(rows[at] for at in chosen)), splits.validation, splits.left_out)


def _read(folder: RunFolder, recipe: Recipe, stage: JudgingStage) -> Splits[Any]:
    return READERS[stage.records](rows_of(folder, stage), recipe.seed)
