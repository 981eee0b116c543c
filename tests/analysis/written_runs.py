"""Small run folders with given metrics and rollouts, written by the real writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keel.config.load import load_recipe, to_toml
from keel.runs.layout import RunFolder
from keel.runs.reader import Run, load
from keel.runs.rows import RolloutRow
from keel.runs.writer import Recorder, update_run_json
from tests.runs.example import row

MODEL = {"model": {"build": {"hidden_size": 32, "layers": 1, "heads": 2}}}


def written_run(
    folder: Path,
    columns: Mapping[str, Any],
    rollouts: Mapping[int, Sequence[RolloutRow]] | None = None,
    recipe: Mapping[str, Any] | None = None,
    before: Mapping[str, Any] | None = None,
) -> Run:
    """A run of one stage: each metric a value for all steps or an array; None leaves a step out."""
    keys = {**MODEL, "tasks": [{"name": "addition"}], "stage": "rl", **(recipe or {})}
    place = RunFolder.create(folder, to_toml(load_recipe(keys)))
    steps = max(len(values) for values in columns.values() if np.ndim(values))
    with Recorder(place, clock=lambda: 0.0) as recorder:
        for at in range(steps):
            values = {n: v[at] if np.ndim(v) else v for n, v in columns.items()}
            kept = {name: float(value) for name, value in values.items() if value is not None}
            recorder.metrics(0, at + 1, kept)
            recorder.rollouts(0, at + 1, list((rollouts or {}).get(at + 1, ())))
    if before is not None:
        update_run_json(place, {"evaluation": {"rl": {"before": before}}})
    return load(place.path)


def completion(
    group: int,
    reward: float,
    tokens: Sequence[int] = (5, 6, 7, 8),
    context: int = 0,
    weight: float | None = None,
    **changes: Any,
) -> RolloutRow:
    """A completion of given tokens of the policy, then `context` tokens of the environment.

    With the `weight` of a token in the loss, its term of the surrogate is recorded.
    """
    count = len(tokens) + context
    written = np.arange(count) < len(tokens)
    advantage = np.where(written, np.float32(changes.pop("advantage", 0.0)), 0)
    term = {} if weight is None else {"loss/policy": np.float32(-weight) * advantage}
    values: dict[str, Any] = {
        "group": group,
        "prompt_id": f"addition/train/{group}",
        "tokens": np.array([*tokens, *[9] * context]),
        "log_probs": np.zeros(count, np.float32),
        "pieces": (),
        "values": {"advantages": advantage, **term},
        "written": written,
        "reward": float(reward),
        "components": {"task": float(reward)},
    }
    return row(**{**values, **changes})


def ids(found: Sequence[Any]) -> list[str]:
    return [one.condition for one in found]
