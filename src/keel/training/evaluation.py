"""Evaluation on the validation split, and `keel eval`: of a checkpoint or any model on a task, of a
reward model on judged answers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from keel.analysis.statistics import mean_interval, wilson_interval
from keel.config.fields import derive
from keel.config.layers import merge
from keel.config.load import load_recipe, parse_override
from keel.config.model import Model
from keel.config.schema import Recipe
from keel.config.sources import Evaluation, PreferenceData, SamplingSource
from keel.config.stage import JudgedSource, Records
from keel.data.columns import shown_gold
from keel.data.mixture import build_tasks, stored
from keel.data.preferences import READERS
from keel.models.policy import Policy
from keel.models.reward import load_reward_model
from keel.rewards.registry import NamedReward, RewardContext
from keel.rewards.rules import exact_match
from keel.rewards.scorer import Scorer
from keel.runs.layout import RunFolder
from keel.runs.rows import RolloutRow
from keel.training.export import policy_of, reward_model_of, run_or_model
from keel.training.judged_data import encoder
from keel.training.judged_losses import Measured, plot_calibration, reward_model_metrics
from keel.training.loop import EvaluationResult
from keel.training.rollout import Results, Sampler
from keel.training.setup import (
    build_sampler,
    build_scorer,
    check_component,
    load_rewards,
    prompt_source,
    reward_context,
    rollout_engine,
    templates_at,
)
from keel.training.state import completion_rows
from keel.types import Group, KeelError, Prompt, RewardResult, Sampling, Task

EXAMPLES = 4
"""How many completions an evaluation shows."""


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates the policy on validation prompts."""

    sampler: Sampler
    scorer: Scorer
    prompts: Sequence[Prompt]
    config: Evaluation

    def __post_init__(self) -> None:
        check_component(self.config, [f.name for f in self.scorer.functions])

    @property
    def judging(self) -> NamedReward | None:
        """The reward that is declared as correctness, if any."""
        return self.scorer.judging(self.config.component)

    def __call__(self, step: int) -> EvaluationResult:
        """The report: `mean`, `low`, `high` (95 %), `n` of greedy pass@1; with k > 0 also `sampled`
        and `pass@k`.

        Prompts without a verdict (no gold answer) are left out of `n`, and `unjudged` counts them.
        If no reward that is declared as correctness gives a verdict, `measure` is "reward", the
        figures are of the reward (of `evaluation.component`, else the whole), and there is no
        pass@k. Every evaluation samples with the same random
        numbers. `spent` is what paid rewards cost, if there are any.
        """
        greedy = replace(self.sampler.sampling, temperature=0.0, ignore_eos=False)
        spent: dict[str, float] = {}
        groups, results, verdicts = self._judge(1, greedy, step, spent)
        rows = self._rows(groups, results, verdicts, "greedy")
        lengths = [int(group.completions[0].written.sum()) for group in groups]
        report: dict[str, Any] = {
            **self._greedy(results, verdicts),
            "mean_length": sum(lengths) / len(lengths),
        }
        if self.config.samples > 0:
            figures, sampled = self._sampled(greedy, step, spent)
            report |= figures
            rows += sampled
        if spent:
            report["spent"] = spent
        report["examples"] = [
            {**_example(group, judged), "passed": row.passed}
            for group, judged, row in zip(groups, results, rows, strict=False)
        ][:EXAMPLES]
        return EvaluationResult(
            report, metrics(report), score=report["mean"], rows=rows, before=report
        )

    def _judge(
        self, n: int, sampling: Sampling, step: int, spent: dict[str, float]
    ) -> tuple[list[Group], Sequence[Results], list[list[bool | None]] | None]:
        """Groups of `n`, their results, and whether each completion is right, None if no reward
        that is declared as correctness gives a verdict; what they cost is added to `spent`."""
        seed = derive(self.sampler.seed, "evaluation")
        groups, scored = self.sampler.sample_and_score(
            self.prompts, n, sampling, seed, self.scorer, step
        )
        for name in self.scorer.spending:
            spent[name] = spent.get(name, 0.0) + float(scored.metrics.get(name, 0.0))
        verdicts = [
            [self._passed(group.prompt, result) for result in judged]
            for group, judged in zip(groups, scored.results, strict=True)
        ]
        given: list[object] = [verdict for each in verdicts for verdict in each]
        if self.judging is not None and not self.scorer.needed:  # not that it failed everywhere
            name = self.judging.name
            given = [one.components.get(name) for each in scored.results for one in each]
        known = any(one is not None for one in given)
        return groups, scored.results, verdicts if known else None

    def _greedy(
        self, results: Sequence[Results], verdicts: list[list[bool | None]] | None
    ) -> dict[str, Any]:
        if verdicts is None:
            return {**_mean_reward([self._rewards(one) for one in results]), "measure": "reward"}
        passed = [verdict for one in verdicts for verdict in one if verdict is not None]
        report = {**wilson_interval(sum(passed), len(passed)).as_dict(), "measure": "pass@1"}
        unjudged = len(verdicts) - len(passed)
        return {**report, "unjudged": unjudged} if unjudged else report

    def _sampled(
        self, greedy: Sampling, step: int, spent: dict[str, float]
    ) -> tuple[dict[str, Any], list[RolloutRow]]:
        c, k = self.config, self.config.samples
        sampling = replace(
            greedy, temperature=c.temperature, top_k=c.top_k, top_p=c.top_p, min_p=c.min_p
        )
        groups, results, verdicts = self._judge(k, sampling, step, spent)
        rows = self._rows(groups, results, verdicts, "sampled")
        if verdicts is None:
            return {"sampled": _mean_reward([self._rewards(judged) for judged in results])}, rows
        known = ([verdict for verdict in one if verdict is not None] for one in verdicts)
        right = [one for one in known if one]
        figures = {
            "sampled": _rate_interval([mean(one) for one in right]),
            f"pass@{k}": wilson_interval(sum(map(any, right)), len(right)).as_dict(),
        }
        return figures, rows

    def _rows(
        self,
        groups: Sequence[Group],
        results: Sequence[Results],
        verdicts: list[list[bool | None]] | None,
        mode: Literal["greedy", "sampled"],
    ) -> list[RolloutRow]:
        """The completions as records."""
        rows = completion_rows(groups, results, self.sampler.chat.tokenizer)
        passed = [verdict for one in verdicts or () for verdict in one] or [None] * len(rows)
        return [replace(row, mode=mode, passed=one) for row, one in zip(rows, passed, strict=True)]

    def _passed(self, prompt: Prompt, result: RewardResult) -> bool | None:
        """None if the prompt's gold answer is empty. An answer whose reward fails is wrong: to make
        a reward fail must not raise the accuracy."""
        if self.judging is None:
            return None
        value = result.components.get(self.judging.name)
        if value is None:
            columns = prompt.columns
            return None if "answer" in columns and shown_gold(columns["answer"]) is None else False
        return value >= self.config.threshold

    def _rewards(self, results: Sequence[RewardResult]) -> list[float]:
        """The rewards of the completions that have one."""
        name = self.config.component
        rewards = [v.reward if name is None else v.components.get(name) for v in results]
        return [reward for reward in rewards if reward is not None]


def metrics(report: dict[str, Any]) -> dict[str, float]:
    """An evaluation as metrics of its step."""
    found = {report.get("measure", "pass@1"): report}
    found |= {k: v for k, v in report.items() if k.startswith("pass@")}
    if "sampled" in report:
        found["sampled"] = report["sampled"]
    out = {"eval/mean_length": report["mean_length"]}
    out |= {f"eval/{name}": value for name, value in report.get("spent", {}).items()}
    for name, interval in found.items():
        ends = {"": interval["mean"], "/low": interval["low"], "/high": interval["high"]}
        out |= {f"eval/{name}{end}": value for end, value in ends.items() if value is not None}
    return out


def _mean_reward(rewards: Sequence[Sequence[float]]) -> dict[str, float | int | None]:
    """The mean over prompts of each one's mean reward; None if there are too few rewards."""
    interval = mean_interval([mean(one) for one in rewards if one]).as_dict()
    return {name: value if math.isfinite(value) else None for name, value in interval.items()}


def _rate_interval(rates: Sequence[float]) -> dict[str, float | int]:
    """The mean of rates by prompt; Wilson's interval if all are 0, or all 1."""
    if len(set(rates)) == 1 and rates[0] in (0.0, 1.0):
        return wilson_interval(round(sum(rates)), len(rates)).as_dict()
    return mean_interval(rates).as_dict()


def _example(group: Group, results: Sequence[RewardResult]) -> dict[str, Any]:
    content = group.prompt.content
    return {
        "prompt": content if isinstance(content, str) else [dict(m) for m in content],
        "completion": group.completions[0].transcript,
        "reward": results[0].reward,
    }


# ---------------------------------------------------------------- keel eval


SPLITS = {"validation_path", "validation_fraction"}
"""Keys of a task that set its validation split."""
ALONE = "evaluated"
"""The stage that stands for one that samples nothing."""
SEPARATOR, THRESHOLD = "\n", 0.5
"""How steps are read if no stage sets it."""


def evaluate(
    model: Path | str,
    *,
    task: str | None = None,
    task_keys: Sequence[str] = (),
    rewards: Sequence[str | Mapping[str, Any]] = (),
    checkpoint: str = "last",
    seed: int | None = None,
    max_tokens: int | None = None,
    **choices: Any,
) -> dict[str, Any]:
    """Greedy pass@1 and, with `samples`, sampled accuracy and pass@k, with 95 % intervals.

    If no reward is declared as correctness, the mean reward instead; `measure` says which, and
    `reward` is the name of the reward that decided. `warning` is set if it is an exact match with
    worked solutions.

    `model` is a run folder (its recipe says the task, the rewards and the budget unless given), a
    model folder or a hub name (which needs a `task`). `task_keys` are `key=value` of the task's
    table, `choices` keys of the recipe's `evaluation` table. Rows named for this evaluation
    (a `task`, or the key `path`) are scored wholly, unless validation_path or validation_fraction
    is set.
    With `checkpoint="best"` of a run, on its own validation prompts, `selected` is true: the
    checkpoint was chosen by these prompts.
    """
    recipe, folder = run_or_model(model)
    if recipe is None and task is None:
        raise KeelError(
            f"{model} is not a run folder, so it does not say which task: name one with --task "
            "(keel tasks lists them)"
        )
    data = _stage_data(recipe, task, task_keys, rewards)
    keys = {name for key in task_keys for name in parse_override(key)}
    whole_files = (task is not None or "path" in keys) and not keys & SPLITS
    if whole_files:
        data["tasks"] = [{**source, "validation_path": None} for source in data["tasks"]]
    overrides = [f"evaluation.{key}={value}" for key, value in choices.items()]
    if max_tokens is not None:
        overrides.append(f"rollout.max_tokens={max_tokens}")
    # The stages before it, since rewards may be theirs.
    before = [] if recipe is None else [stage.model_dump() for stage in recipe.stages[:-1]]
    made = {"model": {"name": str(model)}, "stages": [*before, data]}
    overrides = [f"{data['name']}.{word}" if before else word for word in overrides]
    stage = load_recipe(made, overrides).stages[-1].sampling
    assert stage is not None
    own_seed = recipe.seed if recipe else 0
    policy = policy_of(model, checkpoint)
    if data["name"] == ALONE and max_tokens is None and policy.context is not None:
        # No limit was given: at most half of the context.
        budget = min(stage.rollout.max_tokens, policy.context // 2)
        rollout = stage.rollout.model_copy(update={"max_tokens": budget})
        stage = replace(stage, rollout=rollout)
    around = reward_context(recipe, folder, policy)
    seed = own_seed if seed is None else seed
    tasks = {one.name: one for one in build_tasks(stage.tasks, seed)}
    if whole_files:
        stage = _scored_whole(stage, tasks, "prompts" in choices)
    with templates_at(run=folder):
        result = _run(stage, tasks, policy, seed, around)
    own = recipe is not None and task is None and not task_keys
    return {**result, "selected": True} if own and checkpoint == "best" else result


def _scored_whole(
    stage: SamplingSource, tasks: Mapping[str, Task], bounded: bool
) -> SamplingSource:
    """The stage, evaluated on all rows of its stored tasks; `bounded`: on as many as it says."""
    rows = [data for task in tasks.values() if (data := stored(task)) is not None]
    for data in rows:
        data.validate_on_all()
    if bounded or len(rows) < len(tasks):
        return stage
    every = {"prompts": sum(data.size("validation") for data in rows)}
    assert stage.evaluation is not None
    return replace(stage, evaluation=stage.evaluation.model_copy(update=every))


def _stage_data(
    recipe: Recipe | None, task: str | None, task_keys: Sequence[str], rewards: Sequence[Any]
) -> dict[str, Any]:
    """The recipe's last stage with what was given on top; of another kind than rl, the tasks of the
    last stage that has some."""
    stages = [] if recipe is None else [stage.model_dump() for stage in recipe.stages]
    data: dict[str, Any] = stages[-1] if stages else {"stage": "none"}
    if data["stage"] != "rl":
        given = [stage for stage in stages if stage.get("tasks")][-1:]
        own = {key: one[key] for one in given for key in ("tasks", "prompts")}
        data = {"stage": "rl", "name": ALONE, **own}
    if task is not None:
        data |= {"tasks": [{"name": task}], "rewards": {}}
        data["evaluation"] = {**data.get("evaluation", {}), "component": "none"}
    for key in task_keys:
        change = parse_override(key)
        data["tasks"] = [merge(dict(source), change) for source in data["tasks"]]
    if not data.get("tasks"):
        raise KeelError("no stage of the run has a task: name one with --task")
    if rewards:
        data["rewards"] = {
            "functions": [one if isinstance(one, Mapping) else {"function": one} for one in rewards]
        }
        data["evaluation"] = {**data.get("evaluation", {}), "component": "none"}
    return data


def _run(
    stage: SamplingSource,
    tasks: dict[str, Task],
    policy: Policy,
    seed: int,
    around: RewardContext,
) -> dict[str, Any]:
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
    sampler = build_sampler(
        rollout_engine(policy, rollout), source, judge, rollout, seed, less=less
    )
    with closing(judge):
        evaluator = Evaluator(sampler, judge, chosen, choice)
        result = dict(evaluator(0).report)
    read_by = [evaluator.judging] if evaluator.judging else judge.functions
    result["reward"] = " + ".join(function.name for function in read_by)
    if (warning := _whole_answers(read_by, [(tasks[p.task], p) for p in chosen])) is not None:
        result["warning"] = warning
    return {**result, "left_out": len(left_out) + sum(map(_unreadable, tasks.values()))}


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
