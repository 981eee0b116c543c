"""Conditions of the other models: the value model, and the engine's copy of the policy."""

from __future__ import annotations

import numpy as np

from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.trends import WINDOW, holds_since, trend
from keel.analysis.diagnosis.values import Symptom

MEAN = "sampling/sampling_logp_difference/mean"
LARGEST = "sampling/sampling_logp_difference/max"
LEAST = 0.05
STEPS = 20


def value_model(history: StageHistory) -> Symptom | None:
    """The value model explains nothing: after its warm-up and 20 steps more, the median of
    `value/explained_variance` over the last fifth of the run (5 steps at least) is at most
    0.05, and at the rate of the last half it would not reach 0.05 in as many steps again. Steps
    whose rewards were all equal are left out."""
    steps, explained = history.column("value/explained_variance")
    warm_up = int(history.setting("value.warmup_steps", 0))
    keep = steps > warm_up
    steps, explained = steps[keep], explained[keep]
    if len(steps) < STEPS:
        return None
    spread = history.reward_spread()
    if spread is None:
        return None
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


def engine_mismatch(history: StageHistory) -> Symptom | None:
    """Engine and trainer disagree about the log-probabilities of the samples: the mean of the
    absolute difference (median of five steps) is at the end above 1e-3 nats for an engine in
    the model's float32, or 0.05 if model or engine is in bfloat16 or works under autocast.
    Rounding explains under 1e-5 and about 1e-2."""
    steps, mean = history.column(MEAN)
    own = [history.model.get(key) for key in ("dtype", "autocast")]
    coarse = "auto" in own or "bfloat16" in (history.setting("rollout.dtype"), *own)
    limit = 0.05 if coarse or history.model.get("device") == "cuda" else 1e-3
    since = holds_since(mean, limit)
    if since is None:
        return None
    last = float(np.median(mean[-WINDOW:]))
    largest = history.values(LARGEST)
    worst = f"; one token by {largest.max():.3g}" if len(largest) else ""
    evidence = (
        f"log-probabilities of engine and trainer differ by {last:.2g} nats (mean per token) since "
        f"step {steps[since]}, where rounding explains {limit / 5:.0e}{worst}",
    )
    figures = {"difference": last, "limit": limit}
    return Symptom(int(steps[since]), int(steps[-1]), evidence, figures, severe=last > 10 * limit)
