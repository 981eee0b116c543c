"""What is known of a stage so far: its recipe, its metrics and some of its rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.diagnosis.rollout_summary import StepRollouts, read_step, spread
from keel.analysis.panels import has_rollouts
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

    `records` are as metrics.jsonl has them. `rollouts` are of some steps only, in order. `before`
    is the evaluation before the stage.
    """

    stage: str
    recipe: Mapping[str, Any]
    model: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    rollouts: Sequence[StepRollouts] = ()
    before: Mapping[str, Any] | None = None

    @cached_property
    def steps(self) -> Steps:
        return np.array([record["step"] for record in self.records], dtype=np.int64)

    @cached_property
    def names(self) -> frozenset[str]:
        """The metrics that some record has."""
        return frozenset(name for record in self.records for name in record)

    def column(self, name: str) -> tuple[Steps, Array]:
        """Steps and values of a metric, if it is a finite number; empty if it was not logged."""
        values = self._all(name)
        finite = np.isfinite(values)
        return self.steps[finite], values[finite]

    def values(self, name: str) -> Array:
        return self.column(name)[1]

    def _all(self, name: str) -> Array:
        """A value for each of the steps, NaN for what is not a number."""
        if name not in self._read:
            found = [record.get(name) for record in self.records]
            numbers = [one if isinstance(one, int | float) else np.nan for one in found]
            self._read[name] = np.array(numbers, dtype=np.float64)
        return self._read[name]

    @cached_property
    def _read(self) -> dict[str, Array]:
        return {}

    def setting(self, key: str, default: Any = None) -> Any:
        """A key of the stage's recipe by its dotted name; `default` if it is absent or none."""
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
    def reference(self) -> str:
        """The metric of the divergence to the reference."""
        return "kl/reference" if "kl/reference" in self.names else "kl"

    @property
    def rewards(self) -> list[Mapping[str, Any]]:
        """The recipe's table of each reward function."""
        return list(self.setting("rewards.functions", []))

    @cached_property
    def reward_range(self) -> tuple[float, float] | None:
        """The lowest and highest reward of any completion that was read; None for no rollouts."""
        found = [r.reward[np.isfinite(r.reward)] for r in self.rollouts]
        every = np.concatenate(found) if found else np.empty(0)
        return (float(every.min()), float(every.max())) if len(every) else None

    @property
    def reward_extent(self) -> float:
        """How far apart the lowest and the highest reward are; without rollouts, of step means."""
        bounds, means = self.reward_range, self.values("reward")
        return float(np.ptp(means)) if bounds is None else bounds[1] - bounds[0]

    def reward_spread(self) -> Array | None:
        """The largest standard deviation of a reward in each step; None if there is none."""
        found = [self._all(name) for name in self.names if fnmatchcase(name, "rewards/*/std")]
        return np.nan_to_num(np.stack(found)).max(axis=0) if found else None


def histories(run: Run, damaged: list[str] | None = None) -> Iterator[StageHistory]:
    """Each stage of reinforcement learning, in order.

    Rollout files that cannot be read are left out and named in the list `damaged`. Raises KeelError
    if recipe or metrics, or without the list rollouts, cannot be read.
    """
    recipe = run.recipe()
    written = run.rollout_places()
    tables = recipe.get("stages", [recipe.get("stage")])
    for number, (name, table) in enumerate(zip(run.stages, tables, strict=False)):
        if not isinstance(table, Mapping) or not has_rollouts(str(table.get("stage"))):
            continue
        before = run.info().get("evaluation", {}).get(name, {}).get("before")
        found = StageHistory(name, table, recipe.get("model", {}), run.metrics(name), (), before)
        rollouts = []
        for step in spread([place.step for place in written if place.stage == number]):
            try:
                one = read_step(run.folder, number, step)
                rollouts += [] if one is None else [one]
            except KeelError:
                if damaged is None:
                    raise
                damaged.append(run.folder.rollouts(number, step).name)
        yield replace(found, rollouts=rollouts)
