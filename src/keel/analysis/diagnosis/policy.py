"""Conditions of the policy's movement: too far, not at all, or into one corner."""

from __future__ import annotations

import numpy as np

from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.trends import WINDOW, Array, holds_since, noise, rolling_medians, trend
from keel.analysis.diagnosis.values import Symptom

ALIKE = "frac_reward_zero_std"
COLLAPSED = 0.15
"""Share of the entropy at the start under which little is left."""
NEAR_TOP = 0.9
"""Share of the range of rewards from which on certainty is deserved."""
SHORT_RUN = 20
BEYOND = 0.5
"""Nats per token by which the divergence may exceed the entropy at the start."""
UPDATE_KL = 0.1
"""Nats per token that one step may move the policy, ten times what PPO's trust region aims at."""
JUMP = 10
RECENT = 20
STILL = 1e-3
"""|ratio − 1| under which a policy does not move within a step."""
STAYS = 1e-4
"""Nats per token from the reference under which a policy has not moved at all."""


def entropy_collapse(history: StageHistory) -> Symptom | None:
    """Entropy is gone before the task is learned: the median of the last five steps is at most
    15 % of that of the first five and at most 0.3 nats, at least half of the groups have no
    variance, the reward is below 90 % of its range, and it has not risen to a new high in the
    last third of the run (20 steps at least). Not if advantages read no reward."""
    if not history.rewarded:
        return None
    steps, entropy = history.column("entropy")
    if len(steps) < SHORT_RUN:
        return None
    first, last = float(np.median(entropy[:WINDOW])), float(np.median(entropy[-WINDOW:]))
    if last > min(COLLAPSED * first, 0.3):
        return None
    reward, bounds = history.values("reward"), history.reward_range()
    late = _median(reward[-WINDOW:], float("nan"))
    third = max(10, len(reward) // 3)
    rises = trend(reward[-third:]).rises(0.05)
    highs = [rolling_medians(part).max(initial=-np.inf) for part in np.split(reward, [-third])]
    if bounds is not None and late >= bounds[0] + NEAR_TOP * (bounds[1] - bounds[0]):
        return None
    if history.grouped and _median(history.values(ALIKE)[-WINDOW:], 1.0) < 0.5:
        return None
    if not len(reward) or (rises and highs[1] > highs[0]):
        return None
    since = holds_since(-entropy, -COLLAPSED * first)
    start = 0 if since is None else since
    evidence = [
        f"entropy fell from {first:.3g} (first five steps) to {last:.3g} nats per token, under "
        f"{COLLAPSED:.0%} of the start since step {steps[start]}",
        f"the reward is {late:.3g} and has stopped rising"
        + ("" if bounds is None else f"; completions got {bounds[0]:.3g} to {bounds[1]:.3g}"),
    ]
    figures = {"entropy_first": first, "entropy_last": last, "reward": late}
    return Symptom(int(steps[start]), int(steps[-1]), tuple(evidence), figures)


def kl_runaway(history: StageHistory) -> Symptom | None:
    """The policy writes what the reference would not: the divergence to the reference (median
    of five steps) is above the entropy of the first five steps by 0.5 nats per token or more,
    to the end. A policy that only concentrates on what the reference samples has a KL of that
    entropy at most."""
    name = "kl/reference" if "kl/reference" in history.columns else "kl"
    steps, kl = history.column(name)
    entropy = history.values("entropy")
    to_old = name == "kl" and history.setting("algorithm.divergence.to") == "old"
    if len(steps) < 2 * WINDOW or to_old:
        return None
    usual = float(np.median(entropy[:WINDOW])) if len(entropy) >= WINDOW else 1.0
    since = holds_since(kl, usual + BEYOND)
    if since is None or len(steps) - since < WINDOW:
        return None
    last = float(np.median(kl[-WINDOW:]))
    evidence = (
        f"{name} is {last:.3g} nats per token, above {usual + BEYOND:.3g} since step "
        f"{steps[since]}; the policy's entropy was {usual:.3g} at the start",
    )
    figures = {"kl": last, "entropy_first": usual}
    return Symptom(
        int(steps[since]), int(steps[-1]), evidence, figures, severe=last > usual + 5 * BEYOND
    )


def clip_idle(history: StageHistory) -> Symptom | None:
    """The clip never acts: several updates per batch and a surrogate with edges, but in 95 % of
    at least 10 steps with a gradient no token is clipped, |ratio − 1| is below 1e-3 and
    KL(old‖policy) below 1e-5 nats per token (medians)."""
    steps, region = history.column("clip_ratio/region_mean")
    if history.updates < 2 or len(steps) < 10 or _edgeless(history):
        return None
    # A step without a gradient moves nothing, whatever the learning rate.
    norm = history.values("grad_norm")
    if len(norm) and np.count_nonzero(norm > 1e-8) < 10:
        return None
    ratio, kl = history.values("ratio/mean"), history.values("kl/old")
    off = float(np.median(np.abs(ratio - 1))) if len(ratio) else 0.0
    moved = float(np.median(np.abs(kl))) if len(kl) else 0.0
    if np.quantile(region, 0.95) > 0 or off > STILL or moved > STILL / 100:
        return None
    evidence = (
        f"{history.updates} updates per batch, but in {np.mean(region == 0):.0%} of the steps no "
        f"token's ratio left the clip range; |ratio − 1| is {off:.1e} and kl/old {moved:.1e}",
    )
    figures = {"clip_region": float(np.median(region)), "kl_old": moved, "ratio_distance": off}
    return Symptom(int(steps[0]), int(steps[-1]), evidence, figures)


def clip_saturated(history: StageHistory) -> Symptom | None:
    """The clip acts on much of the batch: the share of clipped tokens (median of five steps) is
    at least 0.1 in five steps running, at any time of the run, or 0.5 for ratios of whole
    sequences, which clip up to a fifth by design. A clipped token has no gradient."""
    steps, region = history.column("clip_ratio/region_mean")
    if history.updates < 2:
        return None
    limit = 0.1 if history.setting("algorithm.ratio") == "token" else 0.5
    over = np.flatnonzero(rolling_medians(region) >= limit)
    if len(over) == 0:
        return None
    first, last = int(over[0]), int(over[-1]) + WINDOW - 1
    worst = float(region[first : last + 1].max())
    evidence = (
        f"a median of {float(np.median(region[first : last + 1])):.0%} of the tokens (at most "
        f"{worst:.0%}) are clipped in steps {steps[first]} to {steps[last]}",
    )
    figures = {"clip_region_max": worst}
    return Symptom(int(steps[first]), int(steps[last]), evidence, figures)


def learning_rate_high(history: StageHistory) -> Symptom | None:
    """Updates too large, by any of three signs. The reward fell, to the end of the run: its
    median over five steps is below its peak (or its start) by half of the way between the
    lowest reward there is and the peak, and by four times the noise of one step. Or
    KL(old‖policy) is above 0.1 nats per token (median of five steps). Or the norm of the
    gradient (median of five steps) is ten times the median of the 20 steps before and of all."""
    signs = [s for s in (_far_updates(history), _jump(history), _fall(history)) if s is not None]
    if not signs:
        return None
    return Symptom(
        min(sign.first_step for sign in signs),
        max(sign.last_step for sign in signs),
        tuple(line for sign in signs for line in sign.evidence),
        {name: value for sign in signs for name, value in sign.figures.items()},
    )


def _far_updates(history: StageHistory) -> Symptom | None:
    """Updates that move the policy too far."""
    steps, moved = history.column("kl/old")
    far = np.flatnonzero(rolling_medians(moved) >= UPDATE_KL)
    if not len(far):
        return None
    first, last = int(steps[far[0]]), int(steps[far[-1] + WINDOW - 1])
    worst = float(moved.max())
    line = f"kl/old is above {UPDATE_KL} nats in steps {first} to {last}, at most {worst:.3g}"
    return Symptom(first, last, (line,), {"kl_old_max": worst})


def _jump(history: StageHistory) -> Symptom | None:
    """A gradient far above what was usual until then, and recently."""
    steps, norm = history.column("grad_norm")
    if len(norm) < RECENT + WINDOW:
        return None
    now = rolling_medians(norm)[RECENT:]
    # A norm grows slowly with the differences between rewards: that is not a jump.
    usual = np.maximum(rolling_medians(norm, RECENT)[: len(now)], np.median(norm))
    over = np.flatnonzero((usual > 0) & (now >= JUMP * usual))
    if not len(over):
        return None
    first, last = int(steps[RECENT + over[0]]), int(steps[RECENT + over[-1] + WINDOW - 1])
    before = float(usual[over[0]])
    line = (
        f"grad_norm is {JUMP} times its {before:.3g} before, and more, in steps {first} to {last}"
    )
    return Symptom(first, last, (line,), {"grad_norm_usual": before, "grad_norm_max": norm.max()})


def _fall(history: StageHistory) -> Symptom | None:
    """A reward that was higher."""
    steps, reward = history.column("reward")
    medians = rolling_medians(reward)
    if not len(medians):
        return None
    start, best, now = float(np.median(reward[:2])), int(np.argmax(medians)), float(medians[-1])
    peak = max(float(medians[best]), start)
    bounds = history.reward_range()
    low = float(reward.min()) if bounds is None else bounds[0]
    if peak <= low or peak - now < 0.5 * (peak - low) or peak - now <= 4 * noise(reward):
        return None
    at = int(steps[best + WINDOW - 1]) if peak > start else int(steps[0])
    line = f"the reward fell from {peak:.3g} (step {at}) to {now:.3g}"
    return Symptom(at, int(steps[-1]), (line,), {"reward_peak": peak, "reward_last": now})


def learning_rate_low(history: StageHistory) -> Symptom | None:
    """Nothing moves although there is something to learn: over at least 40 steps the reward has
    no trend (p > 0.05, or a change below 5 % of its range), fewer than 70 % of the groups are
    without variance and gradients are not 0, yet the divergence to the reference, if logged, is
    below 1e-4 nats per token, that of one step below 1e-6, and the entropy changed by less than
    5 %."""
    steps, reward = history.column("reward")
    if len(steps) < 40:
        return None
    course, bounds = trend(reward), history.reward_range()
    extent = (bounds[1] - bounds[0]) if bounds is not None else float(np.ptp(reward))
    if extent == 0 or (course.p < 0.05 and abs(course.change) > 0.05 * extent):
        return None
    norm = _median(history.values("grad_norm"), 0.0)
    if norm <= 1e-8 or (history.grouped and _median(history.values(ALIKE), 1.0) >= 0.7):
        return None
    reference = "kl/reference" if "kl/reference" in history.columns else "kl"
    far = abs(_median(history.values(reference)[-WINDOW:], 0.0))
    entropy = trend(history.values("entropy"))
    if far > STAYS or (history.updates > 1 and _median(history.values("kl/old"), 0.0) > 1e-6):
        return None
    if not entropy.n or abs(entropy.change) > 0.05 * abs(entropy.first):
        return None
    level = _median(reward, 0.0)
    evidence = [
        f"the reward stays at {level:.3g} over {len(steps)} steps (change {course.change:+.2g}, p "
        f"= {course.p:.2g}) although gradients are not 0 (norm {norm:.2g})",
        f"entropy went from {entropy.first:.3g} to {entropy.last:.3g} nats per token",
    ]
    if reference in history.columns:
        evidence.append(f"{reference} is {far:.1e} nats per token at the end")
    figures = {"reward": level, "reward_change": course.change, "kl": far}
    return Symptom(int(steps[0]), int(steps[-1]), tuple(evidence), figures)


def _median(values: Array, default: float) -> float:
    return float(np.median(values)) if len(values) else default


def _edgeless(history: StageHistory) -> bool:
    kind = history.setting("algorithm.surrogate.kind")
    return history.setting("algorithm.ratio") == "none" or kind in ("unclipped", "log_prob")
