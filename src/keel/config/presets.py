"""Fills a stage's algorithm, and the loop settings that go with it, from a preset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keel.algorithms.presets import PRESETS, Preset
from keel.config.suggest import unknown

DEFAULT_PRESET = "grpo"
_CHANGES = ("kind", "preset")
"""Where one of these differs, a table is another thing: nothing of the old one stays."""


def resolve_algorithm(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The stage's data with the preset's row under what it says itself. Idempotent."""
    given = stage.get("algorithm", {})
    if isinstance(given, str):
        given = {"preset": given}
    if not isinstance(given, Mapping):
        return dict(stage)
    name = given.get("preset", DEFAULT_PRESET)
    if name not in PRESETS:
        raise ValueError(unknown("algorithm", str(name), PRESETS))
    preset = PRESETS[name]
    rollout = stage.get("rollout", {})
    return {
        **stage,
        "algorithm": merge({**preset.row.model_dump(), "preset": name}, given),
        "epochs": stage.get("epochs", preset.epochs),
        "rollout": {**_loop_defaults(preset, rollout), **rollout},
    }


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, table by table; another `kind` or `preset` replaces all of one."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same = all(key not in value or value[key] == old.get(key) for key in _CHANGES)
            out[key] = merge(old, value) if same else dict(value)
        else:
            out[key] = value
    return out


def _loop_defaults(preset: Preset, rollout: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(rollout, Mapping):
        return {}
    budget = rollout.get("max_tokens", 256)
    tokens = int(preset.overlong_share * budget) if isinstance(budget, int) else 0
    return {"dynamic_sampling": preset.dynamic_sampling, "soft_overlong": tokens}
