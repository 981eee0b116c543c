"""Where a run is, in figures, and what it optimises. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keel.analysis.panels import Panel, panels_of
from keel.view.formula import mathml
from keel.view.library import OpenRun, recipe_of


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run in figures; None if it is not known."""

    state: str
    stage: str
    step: int
    steps: int
    seconds_left: float | None
    tokens_per_second: float | None
    cost: float | None

    def parts(self) -> list[str]:
        """As short texts."""
        out = [self.state, f"{self.stage}: step {self.step:,} of {self.steps:,}"]
        if self.seconds_left is not None and self.state == "running":
            out.append(f"about {duration(self.seconds_left)} left")
        if self.tokens_per_second is not None:
            out.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.cost is not None:
            out.append(f"cost {self.cost:.2f}")
        return out


def status_of(run: OpenRun, stage: str, price: float | None = None) -> Status:
    """Where a run is; `price` is of an hour, and what judges cost is added to it."""
    columns, times = run.metrics.columns(stage), run.timings.columns(stage)
    steps = int(run.stage_config(stage).get("steps", 0))
    done = columns.get("environment_steps")
    written = [column.steps[-1] for column in columns.values()]
    step = int(done.values[-1]) if done is not None else int(max(written, default=0))
    total = times.get("total")
    left = speed = cost = None
    if total is not None and len(total.values):
        each = float(np.median(total.values[-20:]))
        taken = len(total.values) if done is not None else step
        left = each * max(steps - step, 0) * (taken / step if step else 0)
        tokens = columns.get("step/tokens")
        if tokens is not None and each > 0:
            speed = float(np.median(tokens.values[-20:])) / each
    dollars = ("judge/dollars", "eval/judge/dollars")
    paid = [columns[name].values.sum() for name in dollars if name in columns]
    if price is not None or paid:
        totals = [run.timings.columns(name).get("total") for name in run.timings.stages()]
        hours = sum(float(one.values.sum()) for one in totals if one is not None) / 3600
        cost = float(sum(paid)) + hours * (price or 0.0)
    return Status(run.state(), stage, step, steps, left, speed, cost)


def duration(seconds: float) -> str:
    """A time in the unit that fits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def panels(run: OpenRun, stage: str) -> list[Panel]:
    """The panels of a stage."""
    config = run.stage_config(stage)
    alone = config.get("rollout", {}).get("group_size") == 1
    return panels_of(str(config["stage"]), list(run.columns(stage)), alone=alone)


def formula_of(run: OpenRun, stage: str) -> list[str]:
    """The objective of a stage with its figures, as lines of MathML; none for other stages."""
    recipe = recipe_of(run)
    found = None if recipe is None else next((s for s in recipe.stages if s.name == stage), None)
    if recipe is None or found is None:
        return []
    objective = found.explain(lora=recipe.model.lora is not None)
    return [] if objective is None else [mathml(line.latex) for line in objective.objective]
