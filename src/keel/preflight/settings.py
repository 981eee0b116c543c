"""Settings that are allowed and do not do what they seem to, and keys that have no effect.

The first follow from the recipe's values alone. The condition of a key stands with its field in the
recipe's schema (`UnusedIf`); a key without one always has an effect. Only keys that the user wrote
are reported, in the recipe itself or as an override: what a preset or an extended recipe sets is
not, nor is a key set to its default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel

from keel.algorithms.presets import PRESETS
from keel.algorithms.terms import KeyUse, UnusedIf
from keel.analysis.metrics import look_up
from keel.config.evaluation import SamplingSource
from keel.config.fields import unknown
from keel.config.layers import layer
from keel.config.load import Source, parse_override, read_own
from keel.config.model import Model
from keel.config.schema import Recipe
from keel.config.sources import Rewards
from keel.config.stage import Optimizer
from keel.data.gym import PREFIX
from keel.data.tasks import GENERATORS
from keel.engines.registry import capabilities_of
from keel.preflight.context import Finding, StageContext, found, percent
from keel.types import shorten

KeyPath = tuple[str | int, ...]
ADAPTER_RATE = 2e-6
"""An adapter's second factor starts at 0 and has to grow by the learning rate alone; rates in use
are 1e-5 and more. Up to twice the default of a whole model (1e-6) was hardly meant for one."""


def of_optimizer(optimizer: Optimizer, steps: int, key: str) -> Iterator[Finding]:
    """A warm-up as long as the stage, or longer."""
    warmup, rate = optimizer.warm_up(steps), optimizer.learning_rate
    if steps and (warmup > steps or warmup == steps > 1):
        name, fix = "warmup_steps", f"set it under {steps}, a tenth of the steps for example"
        if optimizer.warmup_ratio is not None:
            name, fix = "warmup_ratio", "set it to 0.1, for example"
        yield found(
            "warm-up-never-ends", f"{key}.{name}",
            warmup=warmup, steps=steps, rate=rate, fix=fix,
            reached=rate * steps / warmup, share=percent(steps / warmup),
        )  # fmt: skip


def of_adapter(model: Model, optimizer: Optimizer, key: str) -> Iterator[Finding]:
    """A whole model's learning rate on an adapter."""
    rate = optimizer.learning_rate
    if model.lora is not None and rate <= ADAPTER_RATE:
        yield found("adapter-hardly-moves", f"{key}.learning_rate", rate=rate)


def of_rewards(rewards: Rewards, key: str) -> Iterator[Finding]:
    """Timeouts that cut a reward off, and code that shares the interpreter of its tests."""
    for at, source in enumerate(rewards.functions):
        name, own = source.name or source.function, source.options.get("timeout")
        built_in = ":" not in source.function
        if built_in and isinstance(own, int | float) and own > rewards.timeout:
            facts = {"name": name, "at": at, "own": own, "timeout": rewards.timeout}
            yield found("timeout-cut", f"{key}.timeout", **facts)
        if source.function == "code" and source.options.get("isolation") == "shared":
            option = f"{key}.functions.{at}.options.isolation"
            yield found("shared-interpreter", option, name=name)


def of_objective(sampling: SamplingSource, model: Model, prefix: str) -> Iterator[Finding]:
    """Length penalties, reuse of a batch that the surrogate does not account for, and a ratio that
    dropout moves."""
    rollout, algorithm = sampling.rollout, sampling.algorithm
    if algorithm is None:
        return
    over, budget = rollout.overlong_buffer, rollout.max_tokens
    if over > budget:
        key = f"{prefix}rollout.overlong_buffer"
        yield found("overlong-covers-all", key, over=over, budget=budget)
    dropout = 0.0 if model.lora is None else model.lora.dropout
    if dropout and not sampling.own_ratio:
        yield found("noisy-ratio", "model.lora.dropout", dropout=dropout)
    surrogate = algorithm.surrogate.kind
    if algorithm.ratio == "none" and surrogate == "log_prob" and sampling.epochs > 1:
        yield found("reuse-without-ratio", f"{prefix}epochs", epochs=sampling.epochs)
    if sampling.ratio_stays_one:
        preset = PRESETS[algorithm.preset]
        usual = f" ({preset.name} has {preset.minibatches})" if preset.minibatches > 1 else ""
        yield found("ratio-stays-1", f"{prefix}minibatches", surrogate=surrogate, usual=usual)
    if algorithm.advantage.reads_turns and rollout.max_turns == 1 and rollout.program is None:
        kind = algorithm.advantage.kind
        yield found("one-turn", f"{prefix}rollout.max_turns", kind=kind)
    if not capabilities_of(rollout.engine).exact:
        yield found("resume-not-exact", f"{prefix}rollout.engine", engine=rollout.engine)


def of_stop_rules(context: StageContext, ran: bool) -> Iterator[Finding]:
    """Rules whose metric the stage does not record; `ran`: the trial recorded its metrics.

    Of rewards that were not called, and a stage that was not run, the glossary has the names.
    """
    stage, known = context.stage, context.metrics
    rewards = () if stage.sampling is None else stage.sampling.rewards.functions
    called = all(f"rewards/{one.name or one.function}/mean" in known for one in rewards)
    evaluated = [name for name in stage.evaluation_metrics if "*" not in name]
    for at, rule in enumerate(stage.stop_when):
        name = rule.metric
        described = look_up(name) is not None
        of_reward = f"{name.rpartition('/')[0]}/mean" in known
        if name.startswith("eval/"):
            occurs = any(fnmatchcase(name, one) for one in stage.evaluation_metrics)
        else:
            occurs = name in known or (described and (of_reward or not (ran and called)))
        if not occurs:
            evidence = shorten(unknown("metric", name, {*known, *evaluated}), 160)
            key = f"{context.prefix}stop_when.{at}.metric"
            yield found("never-stops", key, name=name, evidence=evidence)


# ---------------------------------------------------------------- keys without effect


@dataclass(frozen=True, slots=True)
class Facts:
    """What the loaded model, tokenizer and tasks add to the recipe.

    `cpu`: the model is on a CPU; `local`: model.name is a folder; `kv_heads`: the model family has
    separate key-value heads; `template`: the tokenizer has a chat template; `conversations`:
    whether any prompt is one, None if unknown; `replies`: by stage, whether one of its tasks
    can reply; `unread`: by stage, the keywords that the chat template does not read.
    """

    cpu: bool
    local: bool
    kv_heads: bool = True
    template: bool | None = None
    conversations: bool | None = None
    replies: Mapping[str, bool] = field(default_factory=dict)
    unread: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @staticmethod
    def generates(task: str) -> bool:
        """Whether a task makes its prompts instead of reading them."""
        return task in GENERATORS or task.startswith(PREFIX)


def unused_keys(
    source: Source, overrides: Sequence[str], recipe: Recipe, facts: Facts
) -> list[Finding]:
    """A finding for each key of a recipe and its overrides that has no effect."""
    findings = []
    for at, path in written_keys(source, overrides, recipe):
        reason = _why_unused(path, at, recipe, facts)
        if reason is None:
            continue
        value, why = reason
        stage = [] if at is None or len(recipe.stages) == 1 else [recipe.stages[at].name]
        name = ".".join(map(str, (*stage, *path)))
        findings.append(found("no-effect", name, name=name, value=value, why=why))
    return findings


def written_keys(
    source: Source, overrides: Sequence[str], recipe: Recipe
) -> Iterator[tuple[int | None, KeyPath]]:
    """Every key that the user wrote, with the number of its stage; None for the shared keys."""
    data: dict[str, Any] = {"stages": [{"name": stage.name} for stage in recipe.stages]}
    own, _ = read_own(source)
    for keys in ({k: v for k, v in own.items() if k != "extends"}, *map(parse_override, overrides)):
        data = layer(data, keys)
    stages = data.pop("stages")
    yield from ((None, path) for path in _leaves(data))
    for at, stage in enumerate(stages):
        yield from ((at, path) for path in _leaves(stage))


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        for at, inner in enumerate(value):
            yield from _leaves(inner, (*path, at))
    else:
        yield path


def _why_unused(
    path: KeyPath, at: int | None, recipe: Recipe, facts: Facts
) -> tuple[str, str] | None:
    """The value of a key without effect, and why; None if it has one, is set to its default or has
    been replaced."""
    stage = None if at is None else recipe.stages[at]
    value: Any = recipe if stage is None else stage
    default: Any = None
    siblings = 1
    marks: list[tuple[UnusedIf, KeyUse]] = []
    for part, inner in zip(path, (*path[1:], None), strict=True):
        table = value
        if isinstance(table, BaseModel) and isinstance(part, str):
            info = type(table).model_fields.get(part)
            if info is None:
                return None
            default, value = _default(table, default, part), getattr(table, part)
            use = KeyUse(str(path[-1]), value, table, siblings, stage, recipe, facts)
            marks += [
                (mark, use)
                for mark in info.metadata
                if isinstance(mark, UnusedIf) and inner not in mark.but
            ]
        elif isinstance(table, Mapping) and part in table:
            default = default.get(part) if isinstance(default, Mapping) else None
            value = table[str(part)]
        elif isinstance(table, tuple) and str(part).isdecimal() and int(part) < len(table):
            siblings = len(table)
            default, value = None, table[int(part)]
        else:
            return None
    chosen = path[-1] == "kind" and isinstance(path[len(path) - 2], int)  # an entry of a list
    if value == default and not chosen:
        return None
    shown = "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    reasons = (mark.why.format(key=use) for mark, use in marks if mark.condition(use))
    return next(((shown[:60], why) for why in reasons), None)


def _default(table: BaseModel, default: Any, part: str) -> Any:
    """The default of a field: its preset's, else that of the field that holds the table, else that
    of its class."""
    if part == "algorithm":
        return PRESETS[table.algorithm.preset].algorithm  # type: ignore[attr-defined]
    if isinstance(default, BaseModel) and isinstance(table, type(default)):
        return getattr(default, part, None)
    return type(table).model_fields[part].get_default(call_default_factory=True)
