"""`keel eval`: a run's checkpoint or any model, on the held-out side of a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.config.load import load_recipe
from keel.config.schema import (
    Evaluation,
    Model,
    Prompts,
    Recipe,
    RewardSource,
    Rollout,
    TaskSource,
)
from keel.engines.native import NativeEngine
from keel.models.policy import Policy, load_policy
from keel.rewards import load_reward
from keel.rewards.score import Scorer
from keel.runs.layout import RunFolder
from keel.tasks import PromptStream, build_tasks, heldout
from keel.tasks.encode import Encoder
from keel.train.evaluate import Evaluator
from keel.train.export import pick_checkpoint
from keel.train.rollout import Sampler
from keel.train.stages import longest_prompt
from keel.train.state import POLICY
from keel.types import KeelError


def evaluate(
    model: Path | str,
    *,
    task: str | None = None,
    path: str | None = None,
    task_keys: Sequence[str] = (),
    rewards: Sequence[str] = (),
    checkpoint: str = "last",
    seed: int | None = None,
    max_tokens: int | None = None,
    **choices: Any,
) -> dict[str, Any]:
    """Greedy pass@1 and, with `samples`, sampled accuracy and pass@k, with 95 % intervals.

    `model` is a run folder (its recipe says the task, the rewards and the budget unless given), a
    model folder or a hub name (which needs a `task`). `choices` are keys of the recipe's
    `evaluation` table.
    """
    recipe, weights = _what(model, checkpoint)
    stage = _stage(recipe, task, path, task_keys, rewards, max_tokens, choices)
    policy = load_policy(weights, recipe.seed if recipe else 0)
    return _run(stage, policy, seed if seed is not None else recipe.seed if recipe else 0)


def _what(model: Path | str, checkpoint: str) -> tuple[Recipe | None, Model]:
    """The run's recipe, if it is a run, and the model to load."""
    if not (Path(model) / "recipe.toml").is_file():
        return None, Model(name=str(model))
    folder = RunFolder.open(model)
    recipe = load_recipe(folder.recipe)
    weights = pick_checkpoint(folder, checkpoint) / POLICY
    loaded = recipe.model.model_copy(
        update={"name": str(weights), "build": None, "lora": None, "revision": None}
    )
    return recipe, loaded


def _stage(
    recipe: Recipe | None,
    task: str | None,
    path: str | None,
    task_keys: Sequence[str],
    rewards: Sequence[str],
    max_tokens: int | None,
    choices: dict[str, Any],
) -> Any:
    """The last stage of the recipe with what was given on top; a stage of its own without one."""
    base = recipe.stages[-1].model_dump() if recipe else {"stage": "rl"}
    if base["stage"] == "sft":
        base = {"stage": "rl", "tasks": base["tasks"], "prompts": base["prompts"]}
    if task is not None:
        base["tasks"] = [{"name": task, **({"path": path} if path else {})}]
        base.pop("rewards", None)
    elif "tasks" not in base:
        raise KeelError("which task? name it with --task (keel tasks lists them)")
    if rewards:
        base["rewards"] = {"functions": [{"function": name} for name in rewards]}
    overrides = [f"evaluation.{k}={v}" for k, v in choices.items()]
    if max_tokens is not None:
        overrides.append(f"rollout.max_tokens={max_tokens}")
    data = {"model": {"name": "unused"}, "stages": [base]}
    if task_keys:
        source = load_recipe({"model": {"name": "unused"}, "stages": [base]}, []).stages[0].tasks[0]
        base["tasks"] = [_with_keys(source, task_keys)]
    return load_recipe(data, overrides).stages[0]


def _with_keys(source: TaskSource, keys: Sequence[str]) -> dict[str, Any]:
    from keel.config.load import parse_override
    from keel.config.presets import merge

    data = source.model_dump()
    for key in keys:
        data = merge(data, parse_override(key))
    return data


def _run(stage: Any, policy: Policy, seed: int) -> dict[str, Any]:
    rollout: Rollout = stage.rollout
    choice: Evaluation = stage.evaluation
    prompts: Prompts = stage.prompts
    tasks = {task.name: task for task in build_tasks(stage.tasks, seed)}
    weights = [source.weight for source in stage.tasks]
    encoder = Encoder(
        policy.tokenizer,
        longest_prompt(prompts.max_tokens, policy.context, rollout.max_tokens),
        prompts.chat_template,
    )
    sources: tuple[RewardSource, ...] = stage.rewards.functions
    scorer = Scorer(
        [load_reward(source) for source in sources],
        tasks,
        timeout=stage.rewards.timeout,
        on_error=stage.rewards.on_error,
        max_tokens=rollout.max_tokens,
    )
    ordered = list(tasks.values())
    chosen = heldout(ordered, weights, choice.prompts, encoder)
    scorer.check(chosen)
    sampler = Sampler(
        engine=NativeEngine(policy.model, policy.tokenizer, max_rows=rollout.max_rows),
        tokenizer=policy.tokenizer,
        tasks=tasks,
        stream=PromptStream(ordered, weights, seed, encoder),
        scorer=scorer,
        choice=rollout,
        seed=seed,
    )
    return Evaluator(sampler, scorer, chosen, choice)(0)
