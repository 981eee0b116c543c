"""Fills a stage's algorithm, and the loop settings that go with it, from a preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keel.algorithms.presets import PRESETS, Preset
from keel.config.entry import stage_kind
from keel.config.fields import unknown
from keel.config.foreign import ELSEWHERE
from keel.types import KeelError

DEFAULT_PRESET = "grpo"
PROMPTS_PER_STEP, GROUP_SIZE = 32, 8
_CHANGES = ("kind", "preset")
"""Where one of these differs, a table is another thing: nothing of the old one stays."""


def resolve_algorithm(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The stage's data with the preset's row under what it says itself. Idempotent."""
    given = _spelled_out(stage.get("algorithm", {}))
    if not isinstance(given, Mapping):
        return dict(stage)
    name = given.get("preset", DEFAULT_PRESET)
    if not isinstance(name, str) or name not in PRESETS:
        kind = str(name).lower()
        where = ELSEWHERE.get(kind)
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
    """`above` over `below`, table by table; another `kind` or `preset` replaces all of one.

    A table over a list has the changes of its entries by number, or those of its only entry.
    `where` is the key of both. Raises KeelError for an entry that a list does not have.
    """
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        if key == "algorithm":
            old, value = _spelled_out(old), _spelled_out(value)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same = all(key not in value or value[key] == old.get(key) for key in _CHANGES)
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
