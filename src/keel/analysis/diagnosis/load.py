"""Reads the stages of a run folder for the conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.rollout_summary import StepRollouts, read_step, spread
from keel.runs.reader import Run
from keel.types import KeelError

KIND = "rl"


def histories(run: Run, damaged: list[str] | None = None) -> Iterator[StageHistory]:
    """Each stage of reinforcement learning, in order.

    Rollout files that cannot be read are left out and named in the list `damaged`. Raises KeelError
    where recipe or metrics, or without the list rollouts, cannot be read.
    """
    recipe = run.recipe()
    for name, table in zip(run.stages, recipe.get("stages", [recipe.get("stage")]), strict=False):
        if isinstance(table, Mapping) and table.get("stage") == KIND:
            yield stage_history(run, name, table, recipe.get("model", {}), damaged)


def stage_history(
    run: Run,
    stage: str,
    table: Mapping[str, Any],
    model: Mapping[str, Any],
    damaged: list[str] | None = None,
) -> StageHistory:
    """What the folder holds of a stage, whose `table` and whose `model` are the recipe's."""
    records = run.metrics(stage)
    number = run.stages.index(stage)
    written = [place.step for place in run.rollout_places() if place.stage == number]
    rollouts = []
    for step in spread(written):
        try:
            one = read_step(run.folder, number, step)
        except KeelError:
            if damaged is None:
                raise
            damaged.append(run.folder.rollouts(number, step).name)
            continue
        rollouts += [one] if one is not None and len(one) else []
    before = run.info().get("evaluation", {}).get(stage, {}).get("before")
    return history_of(stage, table, model, records, rollouts, before)


def history_of(
    stage: str,
    table: Mapping[str, Any],
    model: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    rollouts: Sequence[StepRollouts] = (),
    before: Mapping[str, Any] | None = None,
) -> StageHistory:
    """A history of records as metrics.jsonl has them; null reads as NaN."""
    names = sorted({name for record in records for name in record} - {"stage", "step"})
    return StageHistory(
        stage=stage,
        recipe=table,
        model=model,
        steps=np.array([record["step"] for record in records], dtype=np.int64),
        columns={
            name: np.array([number(record.get(name)) for record in records], dtype=np.float64)
            for name in names
        },
        rollouts=rollouts,
        before=before,
    )


def number(value: Any) -> float:
    """The value as a float; NaN for anything but a number."""
    return float(value) if isinstance(value, int | float) else float("nan")
