"""Conditions of the learning signal: no differences between rewards, or nothing left to gain."""

from __future__ import annotations

import numpy as np

from keel.analysis.diagnosis.history import StageHistory, Steps
from keel.analysis.diagnosis.trends import Array, holds_since
from keel.analysis.diagnosis.values import Symptom, newest

ALIKE = 0.9
"""Share of groups without variance from which on a step learns from one group in ten at most."""
LEARNED = 0.8
"""The same of a reward at its maximum, where the few that differ are chance."""
LONG = 20
"""Steps without a signal that are too many: a hard task may begin with some."""
AT_TOP = 10
"""Steps at the maximum that are too many."""
TOP = 0.03
"""How near the highest reward counts as at it, as a share of the range of rewards."""


def no_signal(history: StageHistory) -> Symptom | None:
    """All groups are equal: `frac_reward_zero_std` (median of 5 steps) is at least 0.9 in each
    of the last 20 steps, or the last fifth of the run if that is longer, while the reward is
    not at its maximum. If advantages do not compare a group, the same of steps whose rewards
    are all equal. Not if advantages read no reward."""
    if not history.rewarded:
        return None
    steps, zero = _alike(history)
    needed = max(LONG, len(steps) // 5)
    since = holds_since(zero, ALIKE)
    if since is None or len(zero) - since < needed:
        return None
    reward = history.values("reward")
    bounds = history.reward_range()
    late = float(np.median(reward[-needed:])) if len(reward) else float("nan")
    if bounds is not None and bounds[1] > 0 and late >= bounds[1] - TOP * (bounds[1] - bounds[0]):
        return None  # it is saturated
    share = float(np.median(zero[since:]))
    evidence = [
        f"since step {steps[since]} {share:.0%} of the groups (median) have no two different "
        f"rewards; the reward is {late:.3g}"
    ]
    if bounds is not None:
        evidence.append(f"rewards of single completions are {bounds[0]:.3g} to {bounds[1]:.3g}")
    figures = {"frac_reward_zero_std": share, "reward": late}
    samples = newest(history, lambda r: np.flatnonzero(np.isfinite(r.reward)))
    return Symptom(int(steps[since]), int(steps[-1]), tuple(evidence), figures, samples)


def saturated_reward(history: StageHistory) -> Symptom | None:
    """The reward is at its maximum: in each window of 5 steps of the last third of the run (10
    steps at least) its median is within 3 % of the range below the highest reward of any
    completion that was read, and in 80 % of the groups all rewards are equal. Not if advantages
    read no reward."""
    if not history.rewarded:
        return None
    steps, reward = history.column("reward")
    bounds = history.reward_range()
    zero = _alike(history)[1]
    if bounds is None or bounds[1] <= 0 or len(steps) < AT_TOP or len(zero) != len(steps):
        return None
    low, top = bounds
    since = holds_since(np.minimum(reward, top), top - TOP * (top - low) - 1e-9)
    alike = holds_since(zero, LEARNED)
    if since is None or alike is None:
        return None
    start = max(since, alike)
    if len(steps) - start < max(AT_TOP, len(steps) // 3):
        return None
    late = float(np.median(reward[start:]))
    constant = " and no completion got any other" if top == low else ""
    evidence = (
        f"since step {steps[start]} the mean reward is {late:.3g}; the highest of a completion is "
        f"{top:.3g}{constant}",
        f"{float(np.median(zero[start:])):.0%} of the groups there have no two different rewards",
    )
    figures = {"reward": late, "highest": top, "lowest": low}
    samples = newest(history, lambda r: np.flatnonzero(r.reward >= top))
    return Symptom(int(steps[start]), int(steps[-1]), evidence, figures, samples)


def _alike(history: StageHistory) -> tuple[Steps, Array]:
    """Steps, and the share of groups without variance; without groups 1 for a constant reward."""
    if int(history.setting("rollout.group_size", 1)) > 1:
        return history.column("frac_reward_zero_std")
    spread = history.reward_spread()
    if spread is None:
        return history.column("")
    return history.steps, (spread < 1e-9).astype(np.float64)
