"""Recipe data before it is validated: tables that lie over each other, key by key.

A recipe with one stage may be written flat; a key with a stage's name in front goes to that stage;
any other goes to the last stage, which is the one the recipe is for. An algorithm's preset lies
below what a stage sets, with the loop settings that go with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Preset
from keel.config.entry import DEFAULT_KIND, stage_kind
from keel.config.fields import unknown
from keel.types import KeelError

SHARED = frozenset(
    {"name", "description", "seed", "threads", "model", "cluster", "alerts", "stages", "repeat"}
    | {"expected"}
)
DEFAULT_PRESET = "grpo"
PROMPTS_PER_STEP, GROUP_SIZE = 32, 8
_CHANGES = ("kind", "place", "preset")
"""Where one of these differs, a table is another thing: nothing of the old one stays."""
_ELSEWHERE: Final[dict[str, str]] = {
    "dqn": "Q-learning runs on environments: use keel control dqn --env ID",
    "q_learning": "Q-learning runs on environments: use keel control dqn --env ID",
}
"""What is not a value of `algorithm`, though others call it an algorithm: where it is."""


# ---------------------------------------------------------------- where a key lives


def stage_name(stage: Mapping[str, Any]) -> str:
    """A stage's name: its own, else what kind of stage it is."""
    return str(stage.get("name", stage.get("stage", DEFAULT_KIND)))


def gather(data: Mapping[str, Any]) -> dict[str, Any]:
    """A flat recipe as one with `stages`; others as they are."""
    shared = {k: v for k, v in data.items() if k in SHARED}
    rest = {k: v for k, v in data.items() if k not in SHARED}
    if "stages" not in data:
        return {**shared, "stages": [{"stage": DEFAULT_KIND, **rest}]}
    if isinstance(data["stages"], tuple):  # of a validated recipe
        shared["stages"] = list(data["stages"])
    return layer(shared, rest) if rest else shared


def overlay(data: Mapping[str, Any], keys: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Lay dotted keys over a gathered recipe, in their order, but a table before its own keys."""
    stages = data.get("stages")
    tables = stages if isinstance(stages, list) else []
    names = {stage_name(stage) for stage in tables if isinstance(stage, Mapping)}
    found, pairs = dict(data), list(keys)
    paths = [key.split(".") for key, _ in pairs]
    paths = [path[1:] if path[0] in names else path for path in paths]

    def order(at: int) -> float:
        size = len(paths[at])
        holds = any(len(path) > size and path[:size] == paths[at] for path in paths)
        return size if holds else math.inf

    for at in sorted(range(len(pairs)), key=order):
        found = layer(found, nest(*pairs[at]))
    return found


def nest(key: str, value: Any) -> dict[str, Any]:
    """`a.b` and 1 as {"a": {"b": 1}}. Raises KeelError for an invalid key."""
    parts = key.split(".")
    if not all(parts):
        raise KeelError(f"{key!r} is not a valid key: write it as steps or optimizer.learning_rate")
    for part in reversed(parts):
        value = {part: value}
    return dict(value)


def layer(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `above` over the gathered recipe `below`, each key where it lives."""
    if "stages" in above and not isinstance(above["stages"], Mapping):
        return gather({**below, **above})
    out = dict(below)
    for key, value in above.items():
        if key == "model" and isinstance(value, Mapping) and "name" in value:
            out = merge(_without_build(out), {key: value})
        elif key in SHARED:
            out = merge(out, {key: value})
        else:
            out["stages"] = _into_stage(out["stages"], key, value)
    return out


def _without_build(data: Mapping[str, Any]) -> dict[str, Any]:
    """A model that is named takes the place of one that would be built."""
    model = data.get("model", {})
    if not isinstance(model, Mapping):
        return dict(data)
    return {**data, "model": {k: v for k, v in model.items() if k != "build"}}


def _into_stage(stages: Any, key: str, value: Any) -> Any:
    if not isinstance(stages, list) or not stages:
        return stages
    if not all(isinstance(s, Mapping) for s in stages):
        return stages
    names = [stage_name(stage) for stage in stages]
    if key in names and isinstance(value, Mapping):
        at, change = names.index(key), value
    else:
        at, change = len(stages) - 1, {key: value}
    below = without_loop_defaults(stages[at]) if _names_a_preset(change) else stages[at]
    return [merge(below, change) if i == at else stage for i, stage in enumerate(stages)]


def _names_a_preset(change: Mapping[str, Any]) -> bool:
    algorithm = change.get("algorithm")
    return isinstance(algorithm, str) or (isinstance(algorithm, Mapping) and "preset" in algorithm)


# ---------------------------------------------------------------- tables and presets


def resolve_algorithm(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The stage's data with the preset's row under what it says itself. Idempotent."""
    given = _spelled_out(stage.get("algorithm", {}))
    if not isinstance(given, Mapping):
        return dict(stage)
    name = given.get("preset", DEFAULT_PRESET)
    if not isinstance(name, str) or name not in PRESETS:
        kind = str(name).lower()
        where = _ELSEWHERE.get(kind)
        if stage_kind(kind) is not None:
            where = f'{kind} is a kind of stage: set stage = "{kind}"'
        raise ValueError(
            f"algorithm = {name!r}: {where}" if where else unknown("algorithm", str(name), PRESETS)
        )
    preset = PRESETS[name]
    rollout = stage.get("rollout", {})
    return {
        **stage,
        "algorithm": merge({**preset.algorithm.model_dump(), "preset": name}, given),
        "epochs": stage.get("epochs", preset.epochs),
        "minibatches": stage.get("minibatches", _minibatches(preset, rollout)),
        "rollout": {**_loop_defaults(preset, rollout), **rollout}
        if isinstance(rollout, Mapping)
        else rollout,
    }


def merge(below: Mapping[str, Any], above: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """`above` over `below`, table by table; another `kind` or `preset` replaces all of one,
    but of an optimizer, whose kinds have the same keys.

    A table over a list has the changes of its entries by number, or those of its only entry.
    `where` is the key of both. Raises KeelError for an entry that a list does not have.
    """
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        if key == "algorithm":
            old, value = _spelled_out(old), _spelled_out(value)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same = key == "optimizer" or all(
                key not in value or value[key] == old.get(key) for key in _CHANGES
            )
            out[key] = merge(old, value, f"{where}{key}.") if same else dict(value)
        elif isinstance(old, list | tuple) and isinstance(value, Mapping):
            out[key] = _into_list(old, value, f"{where}{key}.")
        else:
            out[key] = value
    return out


def _into_list(below: Sequence[Any], above: Mapping[str, Any], where: str) -> list[Any]:
    entries = list(below)
    if not all(key.isdecimal() for key in above):
        if len(entries) > 1:
            raise KeelError(
                f"{where}{next(iter(above))}: {where[:-1]} has {len(entries)} entries: write "
                f"{where}0.{next(iter(above))} for the first"
            )
        above = {"0": above}
    for key, value in above.items():
        at = int(key)
        if at > len(entries) or (at == len(entries) and where == "stages."):
            raise KeelError(f"{where}{key}: {where[:-1]} has {len(entries)} entries, from {where}0")
        old = dict.fromkeys([key], *entries[at : at + 1])
        entries[at : at + 1] = [merge(old, {key: value}, where)[key]]
    return entries


def _spelled_out(algorithm: Any) -> Any:
    """`algorithm = "ppo"` is short for a table that names the preset."""
    return {"preset": algorithm} if isinstance(algorithm, str) else algorithm


def without_loop_defaults(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The stage without the loop settings that are its preset's, so that another's can come."""
    given = _spelled_out(stage.get("algorithm"))
    name = given.get("preset") if isinstance(given, Mapping) else None
    rollout = stage.get("rollout", {})
    if not isinstance(name, str) or name not in PRESETS or not isinstance(rollout, Mapping):
        return dict(stage)
    defaults = _loop_defaults(PRESETS[name], rollout)
    kept = {k: v for k, v in rollout.items() if k not in defaults or v != defaults[k]}
    out = {**stage, "rollout": kept} if "rollout" in stage else dict(stage)
    if out.get("epochs") == PRESETS[name].epochs:
        del out["epochs"]
    if out.get("minibatches") == _minibatches(PRESETS[name], rollout):
        del out["minibatches"]
    return out


def _minibatches(preset: Preset, rollout: Any) -> int:
    """The preset's, but no more than a step has completions."""
    sizes = rollout if isinstance(rollout, Mapping) else {}
    prompts = sizes.get("prompts_per_step", PROMPTS_PER_STEP)
    group = sizes.get("group_size", GROUP_SIZE)
    known = all(isinstance(size, int) and size > 0 for size in (prompts, group))
    return min(preset.minibatches, prompts * group) if known else preset.minibatches


def _loop_defaults(preset: Preset, rollout: Mapping[str, Any]) -> dict[str, Any]:
    budget = rollout.get("max_tokens", 256)
    tokens = int(preset.overlong_share * budget) if isinstance(budget, int) else 0
    return {"dynamic_sampling": preset.dynamic_sampling, "overlong_buffer": tokens}
