"""Where a key of a recipe lives: shared by the run, or in one of its stages.

A recipe with one stage may be written flat; a key with a stage's name in front goes to that stage;
any other goes to the last stage, which is the one the recipe is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from keel.config.entry import DEFAULT_KIND
from keel.config.presets import merge, without_loop_defaults
from keel.types import KeelError

SHARED = frozenset(
    {"name", "description", "seed", "threads", "model", "cluster", "stages", "repeat"}
)


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
