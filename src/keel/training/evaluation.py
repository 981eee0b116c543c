"""`keel eval`: of a checkpoint or any model on a task, of a reward model on judged answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from keel.config.benchmarks import Benchmark, benchmarks
from keel.config.entry import PASSED, is_missing
from keel.config.evaluation import SamplingSource
from keel.config.layers import merge
from keel.config.load import load_recipe, parse_override
from keel.config.model import Model
from keel.config.schema import Recipe
from keel.config.sources import ENDINGS, PreferenceData
from keel.config.stage import JudgedSource, Records
from keel.data.mixture import build_tasks, stored
from keel.data.preferences import READERS
from keel.engines.registry import evaluating
from keel.models.policy import Policy
from keel.models.reward import load_reward_model
from keel.rewards.registry import NamedReward, RewardContext
from keel.rewards.rules import exact_match
from keel.runs.layout import RunFolder
from keel.runs.reader import read_run_json
from keel.training.evaluator import Evaluator
from keel.training.export import policy_of, reward_model_of, run_or_model
from keel.training.judged_data import encoder
from keel.training.judged_losses import Measured, plot_calibration, reward_model_metrics
from keel.training.leaks import trained_on
from keel.training.setup import (
    build_sampler,
    build_scorer,
    load_rewards,
    of_benchmark,
    prompt_source,
    reward_context,
    rollout_engine,
    templates_at,
    with_stops,
)
from keel.types import KeelError, Prompt, Task

SPLITS = {"validation_path", "validation_fraction"}
"""Keys of a task that set its validation split."""
OTHER_REWARDS = {"component": None, "threshold": 1.0}
"""Of the table `evaluation`, if it is not the stage's own rewards that are evaluated."""
ALONE = "evaluated"
"""The stage that stands for one that samples nothing."""
SEPARATOR, THRESHOLD = "\n", 0.5
"""How steps are read if no stage sets it."""


def evaluate(
    model: Path | str,
    *,
    task: str | Mapping[str, Any] | None = None,
    task_keys: Sequence[str] = (),
    rows: Mapping[str, Any] | None = None,
    rewards: Sequence[str | Mapping[str, Any]] = (),
    checkpoint: str = "last",
    seed: int | None = None,
    max_tokens: int | None = None,
    **choices: Any,
) -> dict[str, Any]:
    """Greedy pass@1 and, with `samples`, sampled accuracy and pass@k, with 95 % intervals.

    Of a benchmark (`task="gsm8k"`, …) `protocol` says how it is asked, `as_published` how published
    figures are made; its grader, token limit, stop strings and temperature hold unless others are
    given. If no reward is declared as correctness, the mean reward instead; `measure` says which,
    and `reward` is the name of the reward that decided. `warning` is set if it is an exact match
    with worked solutions, `trained_on` if stages of the run trained on prompts that are evaluated.

    `model` is a run folder (its recipe says the task, the rewards and the budget unless given), a
    model folder or a hub name (which needs a `task`). `task` is a name, a file or the task's table,
    `task_keys` are `key=value` of that table, `rows` its keys `name` and `path` of other rows to
    read as it says, `choices` keys of the recipe's `evaluation` table. Rows named for this
    evaluation (a `task`, or the key `path`) are scored wholly, unless validation_path or
    validation_fraction is set.
    With `checkpoint="best"` of a run, on the validation prompts that it was selected by, `selected`
    is true.
    """
    recipe, folder = run_or_model(model)
    task, changes = _named(task, rows)
    changes += [parse_override(key) for key in task_keys]
    benchmark = benchmarks().get(task or "")
    keys = {name for change in changes for name in change}
    if recipe is None and task is None and "path" not in keys:
        raise KeelError(
            f"{model} is not a run folder, so it does not say which task: name one with --task "
            "(keel tasks lists them)"
        )
    data = _stage_data(recipe, task, changes, rewards)
    sets = [one["name"] for one in data["evaluation"].pop("sets", ())]
    if whole_files := (task is not None or "path" in keys) and not keys & SPLITS:
        data["tasks"] = [{**source, "validation_path": None} for source in data["tasks"]]
    overrides = list(_overrides(benchmark, choices))
    if max_tokens is not None:
        overrides.append(f"rollout.max_tokens={max_tokens}")
    # The stages before it, since rewards may be theirs.
    before = [] if recipe is None else [stage.model_dump() for stage in recipe.stages[:-1]]
    made = {"model": {"name": str(model)}, "stages": [*before, data]}
    overrides = [f"{data['name']}.{word}" if before else word for word in overrides]
    stage = load_recipe(made, overrides).stages[-1].sampling
    assert stage is not None
    policy = policy_of(model, checkpoint)
    chat = policy.tokenizer.chat_template is not None
    if benchmark is not None:
        stage = of_benchmark(stage, policy, max_tokens)
    else:
        rollout = with_stops(stage.rollout, stage.tasks, policy.tokenizer)
        if data["name"] == ALONE and max_tokens is None and policy.context is not None:
            # No limit was given: at most half of the context.
            longest = {"max_tokens": min(rollout.max_tokens, policy.context // 2)}
            rollout = rollout.model_copy(update=longest)
        stage = replace(stage, rollout=rollout)
    around = reward_context(recipe, folder, policy)
    seed = (recipe.seed if recipe else 0) if seed is None else seed
    built = build_tasks(stage.tasks, seed, chat=chat, whole=whole_files)
    tasks = {one.name: one for one in built}
    if whole_files and "prompts" not in choices:
        stage = _scored_whole(stage, tasks)
    with templates_at(run=folder):
        result, asked = _run(stage, tasks, policy, seed, around)
    if "protocol" in result:
        result["as_published"] = benchmarks()[stage.tasks[0].name].as_published
    if recipe is not None and (learned := list(trained_on(recipe, asked))):
        result["trained_on"] = learned
    if folder is not None and task is None and not changes and checkpoint == "best":
        by = read_run_json(folder).get("best_metric", {}).get(folder.stages[-1], "")
        if not by.startswith(tuple(f"eval/{name}/" for name in sets)):
            result["selected"] = True
    return result


def _named(
    task: str | Mapping[str, Any] | None, rows: Mapping[str, Any] | None
) -> tuple[str | None, list[Mapping[str, Any]]]:
    """The name of a task, if it has one, and the keys that are set of its table."""
    changes: list[Mapping[str, Any]] = []
    if isinstance(task, Mapping):
        changes = [{key: value for key, value in task.items() if key != "name"}]
        task = task.get("name")
    elif task is not None and task.endswith(tuple(ENDINGS)):
        task, changes = None, [{"path": task}]
    if rows is not None:
        changes = [rows if task is None else {"path": rows["path"]}, *changes]
    return task, changes


def _scored_whole(stage: SamplingSource, tasks: Mapping[str, Task]) -> SamplingSource:
    """The stage, evaluated on all rows of its tasks, if all are stored."""
    rows = [data for task in tasks.values() if (data := stored(task)) is not None]
    if len(rows) < len(tasks):
        return stage
    every = {"prompts": sum(data.size("validation") for data in rows)}
    assert stage.evaluation is not None
    return replace(stage, evaluation=stage.evaluation.model_copy(update=every))


def _overrides(benchmark: Benchmark | None, choices: Mapping[str, Any]) -> Iterator[str]:
    """The keys of the table `evaluation`: a benchmark's own, and what was chosen."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    own = {} if benchmark is None else {**off, **benchmark.sampling}
    chosen: dict[str, Any] = {**own, **choices}
    if chosen.get("k"):
        chosen.setdefault("samples", max(chosen["k"]))
    elif "samples" in chosen:  # the run's values may be greater
        chosen["k"] = []
    for key, value in chosen.items():
        yield f"evaluation.{key}={list(value) if isinstance(value, list | tuple) else value}"


def _stage_data(
    recipe: Recipe | None,
    task: str | None,
    changes: Sequence[Mapping[str, Any]],
    rewards: Sequence[Any],
) -> dict[str, Any]:
    """The recipe's last stage with what was given on top; of another kind than rl, the tasks of the
    last stage that has some."""
    stages = [] if recipe is None else [stage.model_dump() for stage in recipe.stages]
    data: dict[str, Any] = stages[-1] if stages else {"stage": "none"}
    if data["stage"] != "rl":
        given = [stage for stage in stages if stage.get("tasks")][-1:]
        own = {key: one[key] for one in given for key in ("tasks", "prompts")}
        data = {"stage": "rl", "name": ALONE, **own}
    data["evaluation"] = {**data.get("evaluation", {}), "best": None}
    if task is not None:
        data |= {"tasks": [{"name": task}], "rewards": {}}
        data["evaluation"] |= OTHER_REWARDS
    if not data.get("tasks") and not any("path" in change for change in changes):
        raise KeelError("no stage of the run has a task: name one with --task")
    for change in changes:
        # Without a task, what reads the file follows from its ending.
        other: dict[str, Any] = {"options": {}} if {"name", "path"} <= change.keys() else {}
        data["tasks"] = [
            merge(one, {"path": change["path"]})
            if other and one.get("name") in benchmarks()  # whose rows these are
            else merge({**one, **other}, change)
            for one in data.get("tasks") or [{}]
        ]
    if rewards:
        data |= _rewards(data, rewards)
    for one in data.get("rewards", {}).get("functions", ()):
        if is_missing(one["function"]):
            name = one["function"].partition(":")[2]
            raise KeelError(
                f"the reward {name!r} of the run is a function that was passed in Python: name it "
                f"by --reward FILE.py:{name} (in Python: keel.load(RUN, [{name}]).evaluate())"
            )
    return data


def _rewards(data: Mapping[str, Any], given: Sequence[Any]) -> dict[str, Any]:
    """The tables of a stage with other rewards. Those that have the names of functions which were
    passed in Python stand in for these; else they take the place of all."""
    own = data.get("rewards", {})
    names = {str(one).rpartition(":")[2]: one for one in given}
    functions, placed = list[dict[str, Any]](), set[str]()
    for one in own.get("functions", ()):
        name = one["function"].partition(":")[2] if PASSED.fullmatch(one["function"]) else ""
        placed |= {name} & names.keys()
        functions.append({**one, "function": names.get(name, one["function"])})
    if placed == names.keys():
        return {"rewards": {**own, "functions": functions}}
    new = [one if isinstance(one, Mapping) else {"function": one} for one in given]
    return {"rewards": {"functions": new}, "evaluation": {**data["evaluation"], **OTHER_REWARDS}}


def _run(
    stage: SamplingSource,
    tasks: dict[str, Task],
    policy: Policy,
    seed: int,
    around: RewardContext,
) -> tuple[dict[str, Any], list[tuple[Task, Prompt]]]:
    """The report, and what was evaluated."""
    rollout, choice = stage.rollout, stage.evaluation
    assert choice is not None
    if choice.prompts == 0:
        raise KeelError("evaluation.prompts = 0 leaves nothing to evaluate on: set --prompts")
    source = prompt_source(
        policy, tasks, stage.tasks, stage.prompts, seed, max_tokens=rollout.max_tokens
    )
    functions = load_rewards(stage.rewards, around)
    judge = build_scorer(stage, functions, tasks)
    left_out: list[str] = []
    chosen = source.validation(choice.prompts, left_out)
    judge.check(chosen)
    less = "lower --prompts or --max-tokens"
    rollout = evaluating(rollout)
    sampler = build_sampler(
        rollout_engine(policy, rollout), source, judge, rollout, seed, less=less
    )
    with closing(judge):
        evaluator = Evaluator(sampler, judge, chosen, choice)
        result = dict(evaluator(0).report)
    read_by = [evaluator.judging] if evaluator.judging else judge.functions
    result["reward"] = " + ".join(function.name for function in read_by)
    asked = [(tasks[prompt.task], prompt) for prompt in chosen]
    if (warning := _whole_answers(read_by, asked)) is not None:
        result["warning"] = warning
    result["left_out"] = len(left_out) + sum(map(_unreadable, tasks.values()))
    return result, asked


def _whole_answers(
    rewards: Sequence[NamedReward], asked: Sequence[tuple[Task, Prompt]]
) -> str | None:
    """A warning if a reward is an exact match, and gold answers are worked solutions."""
    functions = [reward.function for reward in rewards]
    matched = [
        task.gold(prompt) or ""
        for task, prompt in asked
        if exact_match in functions or (None in functions and stored(task) is not None)
    ]
    worked = sum(re.search(r"####|\\boxed|\n", gold.strip()) is not None for gold in matched)
    if not worked:
        return None
    return (
        f"{worked} of {len(matched)} answers hold ####, \\boxed or several lines, and the reward "
        "is an exact match of the whole text: for their last number give --reward numeric_match"
    )


def _unreadable(task: Task) -> int:
    """How many rows of the file that a task's validation split is read from could not be read."""
    data = stored(task)
    if data is None:
        return 0
    source = data.sources["validation"]
    return sum(row.why == "bad" and row.source == source for row in data.left_out)


# ---------------------------------------------------------------- reward models


def evaluate_reward_model(
    model: Path | str,
    rows: Records,
    path: str,
    *,
    stage: str | None = None,
    separator: str | None = None,
    threshold: float | None = None,
    token_budget: int = 16_384,
    pictures: Path | None = None,
) -> Measured:
    """An outcome model on pairs or labelled answers, or a process model on answers in steps.

    `model` is a folder or hub name, or a run, of which `stage` names the stage that made the model.
    All rows of the file count (JSONL, or Parquet by its ending). Steps are read by the `separator`
    and `threshold` of that stage unless they are given; of another model by a newline and 0.5. With
    `pictures`, a folder, the reliability and the margins are drawn there.

    Raises KeelError if the model, the file or the folder for the pictures will not do.
    """
    name, made_by = reward_model_of(model, stage)
    made = judged_source(model, made_by)
    if pictures is not None:
        _make(pictures)
    kind: Literal["outcome", "process"] = "process" if rows == "steps" else "outcome"
    loaded = load_reward_model(Model(name=name), kind)
    source = PreferenceData(
        name="parquet" if path.endswith(".parquet") else "jsonl", path=path, empty="keep"
    )
    own = SEPARATOR, THRESHOLD
    if rows == "steps" and made is not None and made.records == "steps":
        own = made.separator, made.threshold
    encode = encoder(
        rows,
        loaded.reader(made is not None and made.raw),
        own[0] if separator is None else separator,
    )
    splits = READERS[rows](source, 0)
    with templates_at(run=None if made is None else RunFolder.open(model)):
        examples = [encode(row) for row in (*splits.train, *splits.validation)]
    long = sum(row.longest > (loaded.context or row.longest) for row in examples)
    if long:
        raise KeelError(
            f"{long} of the {len(examples)} rows are longer than the model's context of "
            f"{loaded.context} tokens: leave them out of the file"
        )
    judge = partial(loaded.judge, token_budget=token_budget)
    threshold = own[1] if threshold is None else threshold
    measured = reward_model_metrics(rows, examples, judge, threshold)
    if pictures is not None:
        plot_calibration(measured, pictures, Path(path).stem, Path(name).name)
    return measured


def judged_source(run: Path | str, stage: str | None) -> JudgedSource | None:
    """The stage of a run that made a reward model; None of a model that is not of a run."""
    if stage is None:
        return None
    recipe = load_recipe(RunFolder.open(run).recipe)
    return next(one for one in recipe.stages if one.name == stage).judged


def _make(pictures: Path) -> None:
    """The folder, before the model is loaded: a wrong word should not cost minutes."""
    try:
        pictures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise KeelError(f"cannot make {pictures}: {why}: give another --pictures") from error
