"""Conditions of the policy's movement: too far, not at all, or into one corner; of its models."""

from __future__ import annotations

import numpy as np

from keel.analysis.diagnosis.history import (
    WINDOW,
    StageHistory,
    Symptom,
    holds_since,
    median,
    noise,
    rolling_medians,
    trend,
)

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
EXPLAINED = 0.05
"""Explained variance of a value model up to which a constant would do as well."""
MISMATCH = "sampling/sampling_logp_difference"
FEW = 0.9
"""Effective sample size under which a mismatch of engine and trainer costs a tenth of the tokens.
"""


def entropy_collapse(history: StageHistory) -> Symptom | None:
    """Entropy is gone before the task is learned: at most 15 % of that of the first five steps and
    at most 0.3 nats, while at least half of the groups have no variance, the reward is below 90 %
    of its range, and it has not risen to a new high in the last third of the run (20 steps at
    least). Not if advantages read no reward."""
    steps, entropy = history.column("entropy")
    reward, bounds = history.values("reward"), history.reward_range
    if not history.rewarded or len(steps) < SHORT_RUN or not len(reward):
        return None
    first, last = median(entropy[:WINDOW]), median(entropy[-WINDOW:])
    if last > min(COLLAPSED * first, 0.3):
        return None
    late = median(reward[-WINDOW:])
    if bounds is not None and late >= bounds[0] + NEAR_TOP * (bounds[1] - bounds[0]):
        return None
    if history.grouped and median(history.values(ALIKE)[-WINDOW:], 1.0) < 0.5:
        return None
    third = max(10, len(reward) // 3)
    before, after = (
        rolling_medians(part).max(initial=-np.inf) for part in np.split(reward, [-third])
    )
    if trend(reward[-third:]).rises(0.05) and after > before:
        return None
    start = holds_since(-entropy, -COLLAPSED * first) or 0
    figures = {"entropy_first": first, "entropy_last": last, "reward": late}
    if bounds is not None:
        figures |= {"lowest": bounds[0], "highest": bounds[1]}
    bonus = history.values("entropy/coefficient")
    if len(bonus):
        figures["bonus"] = bonus[-1]
    return Symptom(steps[start:], figures)


def kl_runaway(history: StageHistory) -> Symptom | None:
    """The policy writes what the reference would not: the divergence to the reference is above the
    entropy of the first five steps by 0.5 nats per token or more, to the end. Concentrating on what
    the reference samples costs at most that entropy."""
    steps, kl = history.column(history.reference)
    entropy = history.values("entropy")
    to_old = history.reference == "kl" and history.setting("algorithm.divergence.to") == "old"
    if len(steps) < 2 * WINDOW or to_old:
        return None
    usual = median(entropy[:WINDOW]) if len(entropy) >= WINDOW else 1.0
    since = holds_since(kl, usual + BEYOND)
    if since is None or len(steps) - since < WINDOW:
        return None
    last = median(kl[-WINDOW:])
    return Symptom(
        steps[since:],
        {"kl": last, "entropy_first": usual, "limit": usual + BEYOND},
        words={"metric": history.reference},
        severe=last > usual + 5 * BEYOND,
    )


def clip_idle(history: StageHistory) -> Symptom | None:
    """The clip never acts: several updates per batch, but in 95 % of at least 10 steps with a
    gradient no token is clipped, |ratio − 1| is below 1e-3 and KL(old‖policy) below 1e-5 nats per
    token."""
    steps, region = history.column("clip_ratio/region_mean")
    surrogate = history.setting("algorithm.surrogate.kind")
    edgeless = history.setting("algorithm.ratio") == "none" or surrogate in (
        "unclipped",
        "log_prob",
    )
    if history.updates < 2 or len(steps) < 10 or edgeless:
        return None
    # A step without a gradient moves nothing, whatever the learning rate.
    norm = history.values("grad_norm")
    if len(norm) and np.count_nonzero(norm > 1e-8) < 10:
        return None
    off = median(np.abs(history.values("ratio/mean") - 1), 0.0)
    moved = median(np.abs(history.values("kl/old")), 0.0)
    if np.quantile(region, 0.95) > 0 or off > STILL or moved > STILL / 100:
        return None
    figures = {
        "updates": history.updates,
        "idle": float(np.mean(region == 0)),
        "clip_region": median(region),
        "kl_old": moved,
        "ratio_distance": off,
    }
    return Symptom(steps, figures)


def clip_saturated(history: StageHistory) -> Symptom | None:
    """The clip acts on much of the batch: the share of clipped tokens is at least 0.1 in five steps
    running, or 0.5 for ratios of whole sequences, which clip up to a fifth by design. A clipped
    token has no gradient."""
    steps, region = history.column("clip_ratio/region_mean")
    limit = 0.1 if history.setting("algorithm.ratio") == "token" else 0.5
    over = np.flatnonzero(rolling_medians(region) >= limit)
    if history.updates < 2 or not len(over):
        return None
    saturated = slice(int(over[0]), int(over[-1]) + WINDOW)
    inside = region[saturated]
    figures = {"clip_region": median(inside), "clip_region_max": float(inside.max())}
    return Symptom(steps[saturated], figures)


def learning_rate_high(history: StageHistory) -> Symptom | None:
    """Updates too large, by any of three signs (medians of five steps). The reward fell, to the end
    of the run, from its peak (or start) by half of the way down to the lowest reward, and by four
    times the noise of one step. Or KL(old‖policy) is above 0.1 nats per token. Or the norm of the
    gradient is ten times the median of the 20 steps before and of all."""
    return _any_of(_far_updates(history), _jump(history), _fall(history))


def _any_of(*signs: Symptom | None) -> Symptom | None:
    """The signs that are there as one."""
    found = [sign for sign in signs if sign is not None]
    if not found:
        return None
    every = [step for sign in found for step in (sign.steps[0], sign.steps[-1])]
    figures = {name: value for sign in found for name, value in sign.figures.items()}
    return Symptom((min(every), max(every)), figures, severe=any(sign.severe for sign in found))


def _far_updates(history: StageHistory) -> Symptom | None:
    """Updates that move the policy too far."""
    steps, moved = history.column("kl/old")
    far = np.flatnonzero(rolling_medians(moved) >= UPDATE_KL)
    if not len(far):
        return None
    first, last = steps[far[0]], steps[far[-1] + WINDOW - 1]
    worst = float(moved.max())
    return Symptom((first, last), {"kl_old_from": first, "kl_old_to": last, "kl_old_max": worst})


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
    first, last = steps[RECENT + over[0]], steps[RECENT + over[-1] + WINDOW - 1]
    figures = {"grad_norm_usual": float(usual[over[0]]), "grad_norm_max": norm.max()}
    return Symptom((first, last), {"grad_norm_from": first, "grad_norm_to": last, **figures})


def _fall(history: StageHistory) -> Symptom | None:
    """A reward that was higher."""
    steps, reward = history.column("reward")
    medians = rolling_medians(reward)
    if not len(medians):
        return None
    start, best, now = median(reward[:2]), int(np.argmax(medians)), float(medians[-1])
    peak = max(float(medians[best]), start)
    low = float(reward.min()) if history.reward_range is None else history.reward_range[0]
    if peak <= low or peak - now < 0.5 * (peak - low) or peak - now <= 4 * noise(reward):
        return None
    at = steps[best + WINDOW - 1] if peak > start else steps[0]
    figures = {"reward_peak": peak, "reward_peak_step": at, "reward_last": now}
    return Symptom((at, steps[-1]), figures)


def learning_rate_low(history: StageHistory) -> Symptom | None:
    """Nothing moves although there is something to learn: over at least 40 steps the reward has no
    trend (p > 0.05, or a change below 5 % of its range), fewer than 70 % of the groups lack
    variance and gradients are not 0, yet the divergence to the reference is below 1e-4 nats per
    token, that of a step below 1e-6, and entropy changed by less than 5 %."""
    steps, reward = history.column("reward")
    if len(steps) < 40:
        return None
    course, extent = trend(reward), history.reward_extent
    if extent == 0 or (course.p < 0.05 and abs(course.change) > 0.05 * extent):
        return None
    norm = median(history.values("grad_norm"), 0.0)
    if norm <= 1e-8 or (history.grouped and median(history.values(ALIKE), 1.0) >= 0.7):
        return None
    far = abs(median(history.values(history.reference)[-WINDOW:], 0.0))
    entropy = trend(history.values("entropy"))
    if far > STAYS or (history.updates > 1 and median(history.values("kl/old"), 0.0) > 1e-6):
        return None
    if not entropy.n or abs(entropy.change) > 0.05 * abs(entropy.first):
        return None
    figures = {
        "reward": median(reward),
        "reward_change": course.change,
        "p": course.p,
        "grad_norm": norm,
        "kl": far,
        **entropy.figures("entropy"),
    }
    known = history.reference in history.columns
    return Symptom(steps, figures, words={"metric": history.reference} if known else {})


def value_model(history: StageHistory) -> Symptom | None:
    """The value model explains nothing: after its warm-up and 20 steps more,
    `value/explained_variance` over the last fifth of the run is at most 0.05, and at the rate
    of the last half would not reach it in as many steps again. Steps with equal rewards are left
    out."""
    steps, explained = history.column("value/explained_variance")
    scored, spread = history.reward_spread()
    varied = np.isin(steps, scored[spread > 1e-6])
    keep = (steps > int(history.setting("value.warmup_steps", 0))) & varied
    steps, explained = steps[keep], explained[keep]
    if len(steps) < SHORT_RUN:
        return None
    late = explained[-max(5, len(explained) // 5) :]
    course, level = trend(explained[-len(explained) // 2 :]), median(late)
    if level > EXPLAINED or (course.rises(0.05) and level + course.change > EXPLAINED):
        return None
    figures = {"explained_variance": level, "explained_first": median(explained[:5])}
    return Symptom(steps, {**figures, "late_steps": len(late)})


def engine_mismatch(history: StageHistory) -> Symptom | None:
    """Engine and trainer disagree about the log-probabilities of the samples, at the end by any of
    four signs. The mean absolute difference is above 1e-3 nats for an engine in the model's
    float32, or 0.05 with bfloat16; rounding explains under 1e-5, and about 1e-2. The mean
    difference k1 is of one sign for ten steps and a tenth of that; rounding errors cancel. (Neither
    counts with `rollout.async_level`, where the engine has older weights by design.) The effective
    sample size is below 0.9: a tenth of the tokens is lost. Or, if completions are weighed as a
    whole, their χ² is above 1, so that their weights are worth less than half of them."""
    own = [history.model.get(key) for key in ("dtype", "autocast")]
    coarse = "auto" in own or "bfloat16" in (history.setting("rollout.dtype"), *own)
    limit = 0.05 if coarse or history.model.get("device") == "cuda" else 1e-3
    k1 = history.values("sampling/kl/k1")
    side = np.sign(median(k1[-WINDOW:], 0.0))
    whole = "sequence" in (c.get("level") for c in history.setting("algorithm.corrections", ()))
    fresh = not history.setting("rollout.async_level", 0)
    return _any_of(
        _apart(history, limit) if fresh else None,
        _stays(history, "sampling/kl/k1", side, limit / 10, "k1", 2) if fresh else None,
        _stays(history, "sampling/effective_sample_size", -1, -FEW, "effective"),
        _stays(history, "sampling/chi_squared/sequence", 1, 1.0, "chi_squared") if whole else None,
    )


def _stays(
    history: StageHistory, name: str, sign: float, limit: float, figure: str, windows: int = 1
) -> Symptom | None:
    """A metric that, times the sign, is at the limit or above to the end."""
    steps, values = history.column(name)
    since = holds_since(sign * values, limit)
    if since is None or len(steps) - since < windows * WINDOW:
        return None
    return Symptom(steps[since:], {figure: median(values[-WINDOW:])})


def _apart(history: StageHistory, limit: float) -> Symptom | None:
    """A mean absolute difference above the limit."""
    steps, mean = history.column(f"{MISMATCH}/mean")
    since = holds_since(mean, limit)
    if since is None:
        return None
    last, largest = median(mean[-WINDOW:]), history.values(f"{MISMATCH}/max")
    figures = {"difference": last, "limit": limit, "rounding": limit / 5}
    if len(largest):
        figures["largest"] = float(largest.max())
    return Symptom(steps[since:], figures, severe=last > 10 * limit)
