"""A condition of the engine that samples: its model is not the trainer's."""

from __future__ import annotations

import numpy as np

from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.trends import WINDOW, holds_since
from keel.analysis.diagnosis.values import Symptom

MEAN = "sampling/sampling_logp_difference/mean"
LARGEST = "sampling/sampling_logp_difference/max"


def engine_mismatch(history: StageHistory) -> Symptom | None:
    """Engine and trainer disagree about the log-probabilities of what was sampled: the mean of the
    absolute difference (median of five steps) is at the end above 1e-3 nats for an engine in the
    model's float32, or 0.05 where model or engine is in bfloat16, or works under autocast. Float32
    gives under 1e-5 and bfloat16 about 1e-2, so either limit is five times or more what rounding
    explains. The difference is
    logged where the trainer scores the old policy: with several updates per batch, or a
    reference."""
    steps, mean = history.column(MEAN)
    coarse = "bfloat16" in (history.setting("rollout.dtype"), history.model.get("dtype"))
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
