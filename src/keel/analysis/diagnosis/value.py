"""A condition of the value model."""

from __future__ import annotations

import numpy as np

from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.trends import trend
from keel.analysis.diagnosis.values import Symptom

LEAST = 0.05
STEPS = 20


def value_model_idle(history: StageHistory) -> Symptom | None:
    """The value model explains nothing: after its warm-up and 20 steps more, the median of
    `value/explained_variance` over the last fifth of the run (5 steps at least) is at most 0.05,
    and it is not rising: its change over the last half, at that rate, would not reach 0.05 in as
    many steps again. Steps whose rewards were all equal are left out, since there is nothing to
    explain in them."""
    steps, explained = history.column("value/explained_variance")
    warm_up = int(history.setting("value.warmup_steps", 0))
    keep = steps > warm_up
    steps, explained = steps[keep], explained[keep]
    if len(steps) < STEPS:
        return None
    spread = np.zeros(len(history.steps))
    for name, values in history.columns.items():
        if name.startswith("rewards/") and name.endswith("/std"):
            spread = np.maximum(spread, np.nan_to_num(values))
    varied = spread[np.isin(history.steps, steps)] > 1e-6
    steps, explained = steps[varied], explained[varied]
    if len(steps) < STEPS:
        return None
    late = explained[-max(5, len(explained) // 5) :]
    course = trend(explained[-len(explained) // 2 :])
    level = float(np.median(late))
    if level > LEAST or (course.rises(0.05) and level + course.change > LEAST):
        return None
    evidence = (
        f"value/explained_variance is {level:.2g} over the last {len(late)} steps, "
        f"{float(np.median(explained[:5])):.2g} at the start: a constant would do as well",
    )
    figures = {"explained_variance": level}
    return Symptom(int(steps[0]), int(steps[-1]), evidence, figures)
