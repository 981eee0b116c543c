"""Stages for tests, of defaults and presets alone: no tuning of shipped recipes moves them."""

from __future__ import annotations

from typing import Any

from keel.algorithms.presets import PRESETS
from keel.config.control import ControlRecipe, PolicyGradientStage, QLearningStage
from keel.config.layers import gather, layer
from keel.config.load import parse_override


def q_learning(name: str, *overrides: str) -> QLearningStage:
    """A small one; what a test is about it sets itself."""
    small = {
        "steps": 600,
        "row_every": 40,
        "network": {"hidden": [8]},
        "replay": {"capacity": 200, "warmup": 20, "batch_size": 32},
        "exploration": {"share": 0.5},
        "target": {"every": 50},
    }
    stage = _stage({"stage": "q_learning", "environment": {"id": name}, **small}, overrides)
    assert isinstance(stage, QLearningStage)
    return stage


def policy_gradient(preset: str, name: str, *overrides: str) -> PolicyGradientStage:
    """A small one without a reference policy."""
    row: dict[str, Any] = {"preset": preset}
    found = PRESETS[preset].algorithm
    if found.divergence is not None and found.divergence.to == "reference":
        row["divergence"] = "none"
    if found.value is not None:
        row |= {"advantage": {"gamma": 0.98}, "value": {"coefficient": 1.0, "clip": "none"}}
    small = {
        "steps": 4000,
        "rollout_steps": 24,
        "group_size": 8 if found.needs_groups else 1,
        "network": {"hidden": [8]},
        "optimizer": {"learning_rate": 1e-3},
    }
    environment = {"id": name, "count": 8}
    stage = _stage(
        {"stage": "policy_gradient", "algorithm": row, "environment": environment, **small},
        overrides,
    )
    assert isinstance(stage, PolicyGradientStage)
    return stage


def _stage(data: dict[str, Any], overrides: tuple[str, ...]) -> Any:
    data = gather(data)
    for override in overrides:
        data = layer(data, parse_override(override))
    return ControlRecipe.model_validate(data).stage
