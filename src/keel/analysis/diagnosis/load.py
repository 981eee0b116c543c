"""Reads the stages of a run folder for the conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.rollout_summary import StepRollouts, read_step, spread
from keel.runs.reader import Run

KIND = "rl"


def histories(run: Run) -> Iterator[StageHistory]:
    """Each stage of reinforcement learning that has begun."""
    recipe = run.recipe()
    tables = {str(t.get("name", t["stage"])): t for t in recipe["stages"] if t["stage"] == KIND}
    for name, table in tables.items():
        records = run.metrics(name)
        if not records:
            continue
        number = run.stages.index(name)
        written = [place.step for place in run.rollout_places() if place.stage == number]
        found = (read_step(run.folder, number, step) for step in spread(written))
        rollouts = [one for one in found if one is not None and len(one)]
        before = run.info().get("evaluation", {}).get(name, {}).get("before")
        yield history_of(name, table, recipe.get("model", {}), records, rollouts, before)


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
            name: np.array([_number(record.get(name)) for record in records], dtype=np.float64)
            for name in names
        },
        rollouts=rollouts,
        before=before,
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
