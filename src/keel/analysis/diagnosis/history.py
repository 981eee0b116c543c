"""What is known of a stage so far: its recipe, its metrics and some of its rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.diagnosis.rollout_summary import StepRollouts, read_step, spread
from keel.config.kinds import stage_kind
from keel.runs.reader import Run
from keel.types import KeelError

Array = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]
GROUP_ADVANTAGES = ("group_relative", "leave_one_out", "process_group_relative", "optimal")
"""Advantages that are 0 if all rewards of a group are equal."""
UNREWARDED_ADVANTAGES = ("teacher_log_ratio",)
"""Advantages that read no reward: what rewards show says nothing of the signal."""


@dataclass(frozen=True, eq=False)
class StageHistory:
    """A stage of reinforcement learning: `recipe` is its table, `model` the recipe's of the model.

    `columns` holds each metric by name, a value for each of `steps` (NaN if a record has none).
    `rollouts` are of some steps only, in order. `before` is the evaluation before the stage.
    """

    stage: str
    recipe: Mapping[str, Any]
    model: Mapping[str, Any]
    steps: Steps
    columns: Mapping[str, Array]
    rollouts: Sequence[StepRollouts] = ()
    before: Mapping[str, Any] | None = None

    def column(self, name: str) -> tuple[Steps, Array]:
        """Steps and values of a metric, if it is a finite number; empty if it was not logged."""
        values = self.columns.get(name)
        if values is None:
            return np.empty(0, dtype=np.int64), np.empty(0)
        finite = np.isfinite(values)
        return self.steps[finite], values[finite]

    def values(self, name: str) -> Array:
        return self.column(name)[1]

    def setting(self, key: str, default: Any = None) -> Any:
        """A key of the stage's recipe by its dotted name; `default` where it is absent or none."""
        found: Any = self.recipe
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None or found == "none" else found

    @property
    def updates(self) -> int:
        """Optimizer steps on each batch."""
        return int(self.setting("epochs", 1)) * int(self.setting("minibatches", 1))

    @property
    def grouped(self) -> bool:
        """Whether advantages compare the completions of one prompt."""
        several = int(self.setting("rollout.group_size", 1)) > 1
        kind = self.setting("algorithm.advantage.kind")
        baseline = self.setting("algorithm.advantage.group_baseline", False)
        return several and (kind in GROUP_ADVANTAGES or bool(baseline))

    @property
    def rewarded(self) -> bool:
        """Whether advantages are made of rewards."""
        return self.setting("algorithm.advantage.kind") not in UNREWARDED_ADVANTAGES

    @property
    def pass_at_1(self) -> str | None:
        """The name of the metric that validation is judged by, if the run has it."""
        return next((n for n in ("eval/pass@1", "eval/reward") if n in self.columns), None)

    def reward_range(self) -> tuple[float, float] | None:
        """The lowest and highest reward of any completion that was read; None for no rollouts."""
        found = [r.reward[np.isfinite(r.reward)] for r in self.rollouts]
        every = np.concatenate(found) if found else np.empty(0)
        return (float(every.min()), float(every.max())) if len(every) else None

    def reward_spread(self) -> Array | None:
        """The largest standard deviation of a reward in each step; None if there is none."""
        found = [self.columns[name] for name in self.columns if fnmatchcase(name, "rewards/*/std")]
        return np.nan_to_num(np.stack(found)).max(axis=0) if found else None

    def rewards(self) -> list[Mapping[str, Any]]:
        """The recipe's table of each reward function."""
        return list(self.setting("rewards.functions", []))


def reward_name(source: Mapping[str, Any]) -> str:
    """The name of a reward in metrics: its own, else that of the function."""
    own = source.get("name")
    if own not in (None, "none"):
        return str(own)
    return str(source["function"]).rpartition(":")[2]


def histories(run: Run, damaged: list[str] | None = None) -> Iterator[StageHistory]:
    """Each stage of reinforcement learning, in order.

    Rollout files that cannot be read are left out and named in the list `damaged`. Raises KeelError
    if recipe or metrics, or without the list rollouts, cannot be read.
    """
    recipe = run.recipe()
    for name, table in zip(run.stages, recipe.get("stages", [recipe.get("stage")]), strict=False):
        if isinstance(table, Mapping) and _has_rollouts(table):
            yield stage_history(run, name, table, recipe.get("model", {}), damaged)


def _has_rollouts(table: Mapping[str, Any]) -> bool:
    kind = stage_kind(str(table.get("stage")))
    return kind is not None and bool(kind.learns_from_rollouts)


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
