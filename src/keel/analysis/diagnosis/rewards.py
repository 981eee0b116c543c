"""Conditions of the reward: it tells nothing apart, or rises for the wrong reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keel.analysis.diagnosis.history import (
    WINDOW,
    Array,
    RolloutSample,
    StageHistory,
    StepRollouts,
    Steps,
    Symptom,
    holds_since,
    median,
    newest,
    rolling_medians,
    trend,
)
from keel.config.sources import CORRECTNESS

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
ROLLOUTS = 8
ENDS = ("low", "high")
COMPONENT = "evaluation.component"
JUDGES = (*CORRECTNESS, "task")
"""Rewards whose 1 means that the answer is right, the task's own among them."""


def no_reward(history: StageHistory) -> Symptom | None:
    """Completions get no reward: in the newest three steps with rollouts, at least 90 % (10 or
    more) have none. Not if advantages read no reward."""
    last = history.rollouts[-3:]
    count, without = sum(map(len, last)), sum(int(np.isnan(r.reward).sum()) for r in last)
    if not history.rewarded or count < 10 or without < 0.9 * count:
        return None
    samples = newest(history, lambda r: np.flatnonzero(np.isnan(r.reward)))
    figures = {"without": without, "completions": count}
    return Symptom([r.step for r in last], figures, samples)


def no_signal(history: StageHistory) -> Symptom | None:
    """All groups are equal: `frac_reward_zero_std` is at least 0.9 in each of the last 20 steps, or
    the last fifth of the run if that is longer, while the reward is not at its maximum. If
    advantages do not compare a group, the same of steps whose rewards are all equal. Not if
    advantages read no reward."""
    steps, zero = _alike(history)
    needed = max(LONG, len(steps) // 5)
    since = holds_since(zero, ALIKE)
    if not history.rewarded or since is None or len(zero) - since < needed:
        return None
    bounds, late = history.reward_range, median(history.values("reward")[-needed:])
    if bounds is not None and bounds[1] > 0 and late >= bounds[1] - TOP * (bounds[1] - bounds[0]):
        return None  # it is saturated
    figures = {"frac_reward_zero_std": median(zero[since:]), "reward": late}
    if bounds is not None:
        figures |= {"lowest": bounds[0], "highest": bounds[1]}
    samples = newest(history, lambda r: np.flatnonzero(np.isfinite(r.reward)))
    return Symptom(steps[since:], figures, samples)


def saturated_reward(history: StageHistory) -> Symptom | None:
    """The reward is at its maximum: over the last third of the run (10 steps at least) it is within
    3 % of the range below the highest reward of any completion that was read, and in 80 % of the
    groups all rewards are equal. Not if advantages read no reward."""
    steps, reward = history.column("reward")
    zero, bounds = _alike(history)[1], history.reward_range
    if not history.rewarded or bounds is None or bounds[1] <= 0:
        return None
    if len(steps) < AT_TOP or len(zero) != len(steps):
        return None
    low, top = bounds
    since = holds_since(np.minimum(reward, top), top - TOP * (top - low) - 1e-9)
    alike = holds_since(zero, LEARNED)
    if since is None or alike is None:
        return None
    start = max(since, alike)
    if len(steps) - start < max(AT_TOP, len(steps) // 3):
        return None
    figures = {
        "reward": median(reward[start:]),
        "frac_reward_zero_std": median(zero[start:]),
        "highest": top,
        "lowest": low,
    }
    samples = newest(history, lambda r: np.flatnonzero(r.reward >= top))
    return Symptom(steps[start:], figures, samples)


def gold_falls(history: StageHistory) -> Symptom | None:
    """The reward rises and a score that is not trained on falls (over-optimisation [2210.10760]).
    The reward's trend is up (p < 0.01) over 20 steps or more, while the newest evaluation is below
    the best one by more than their 95 % intervals allow; or a reward of weight 0 is in the last
    fifth of the run lower than in its best five steps (p < 0.01), by 15 %."""
    steps, reward = history.column("reward")
    course, fall = trend(reward), _gold_fall(history)
    if len(steps) < 20 or not course.rises() or fall is None:
        return None
    first = int(fall.steps[0])
    # Before the stage, the score is of the policy that sampled the first step.
    until = max(1, int(np.searchsorted(steps, first, side="right")))
    if median(reward[-WINDOW:]) < median(reward[:until][-WINDOW:]):
        return None
    figures = {**course.figures("reward"), **fall.figures}
    return Symptom((first, steps[-1]), figures, _best_rewarded(history), fall.words)


def gold_still(history: StageHistory) -> Symptom | None:
    """The reward rises and a score that it should serve does not. Over 20 steps or more the
    reward's trend is up (p < 0.01), by 30 % of its first value or a quarter of `reward_std`; some
    reward that is trained on is not declared as correctness, and none that is rises. The median of
    the later half of `eval/pass@1` is below 0.9 and at most 0.05 above the first value, with an
    interval at most 0.35 wide."""
    steps, reward = history.column("reward")
    course, spreads = trend(reward), history.values("reward_std")
    paid = [s for s in history.rewards if s.get("weight", 1.0) > 0]
    right = [s for s in paid if _judges(s) or reward_name(s) == history.setting(COMPONENT)]
    own = abs(course.first)
    spread = median(spreads, own)
    if len(steps) < 20 or not course.rises():
        return None
    if course.gain < max(0.1 * spread, min(0.25 * spread, 0.3 * own)):
        return None
    rising = [s for s in right if trend(history.values(_mean_of(s))).rises()]
    found = _evaluated(history, "eval/pass@1")
    if len(right) == len(paid) or rising or _gold_fall(history) or len(found) < 2:
        return None
    later = median(np.array([mean for _, mean, *_ in found[len(found) // 2 :]]))
    (at, first, *_), (last, _, low, high) = found[0], found[-1]
    if later > first + 0.05 or later >= 0.9 or high - low > 0.35:
        return None
    figures = {
        **course.figures("reward"),
        "gold_first": first,
        "gold_first_step": at,
        "gold_last": later,
        "gold_last_step": last,
    }
    return Symptom(steps, figures, _best_rewarded(history))


def length_reward(history: StageHistory) -> Symptom | None:
    """The reward rises through length alone. In 8 steps or more with rollouts the mean reward rises
    (p < 0.01) by 10 % of its range and the mean length by 20 %; a regression on length within
    groups leaves less than a quarter of the rise, with a correlation of 0.5 or more. Not where the
    accuracy on validation prompts rises too (the intervals are apart): calls of tools and worked
    solutions are longer and right."""
    rollouts = [r for r in history.rollouts if np.isfinite(r.reward).sum() > 8]
    if len(rollouts) < ROLLOUTS:
        return None
    reward = np.array([np.nanmean(r.reward) for r in rollouts])
    length = np.array([r.written.mean() for r in rollouts])
    raw, grown = trend(reward), trend(length)
    # Where all are as long as they can be, length no longer tells answers apart.
    growing = length < length[0] + 0.9 * (grown.last - length[0])
    fitted = _slope([r for r, one in zip(rollouts, growing, strict=True) if one])
    if fitted is None:
        return None
    slope, correlation = fitted
    if not raw.rises() or raw.gain < 0.1 * history.reward_extent:
        return None
    if not grown.rises(0.05) or grown.last < 1.2 * grown.first or correlation < 0.5:
        return None
    controlled = trend(reward - slope * (length - length[0]))
    accuracies = _evaluated(history, "eval/pass@1")
    learned = bool(accuracies) and accuracies[-1][2] > accuracies[0][3]
    if controlled.gain > 0.25 * raw.gain or learned:
        return None
    figures = {
        **raw.figures("reward"),
        **grown.figures("length"),
        **controlled.figures("controlled"),
        "slope": slope,
        "correlation": correlation,
    }
    return Symptom([r.step for r in rollouts], figures, _best_rewarded(history))


def format_hacking(history: StageHistory) -> Symptom | None:
    """The form is learned and the content is not. A reward that is not declared as correctness is
    at 90 % of its range or more (last fifth, 10 steps at least) and has risen by a tenth of it (p <
    0.01), while one that is declared (if none is, another with a positive weight) is below half of
    its range and has not risen by 5 %. Or, in the newest three steps with rollouts, at least 30 %
    of the completions that are rewarded above the mean (10 or more) hold markers (tags, signs) and
    no letter or digit."""
    sources = [s for s in history.rewards if s.get("weight", 1.0) > 0]
    declared = [s for s in sources if _judges(s)]
    for form in sources:
        if form in declared:
            continue
        for content in declared or [s for s in sources if s is not form]:
            found = _form_over_content(history, reward_name(form), reward_name(content))
            if found is not None:
                return found
    return _markers_only(history)


def _markers_only(history: StageHistory) -> Symptom | None:
    last = history.rollouts[-3:]
    better = [r.reward > np.nanmean(r.reward) for r in last if np.isfinite(r.reward).any()]
    if not better or len(better) != len(last):
        return None
    count = sum(int(one.sum()) for one in better)
    bare = [one & r.bare for one, r in zip(better, last, strict=True)]
    share = sum(int(one.sum()) for one in bare) / max(1, count)
    if count < 10 or share < 0.3:
        return None
    samples = newest(history, lambda _: np.flatnonzero(bare[-1]))
    return Symptom([r.step for r in last], {"share": share, "rewarded": count}, samples)


def _form_over_content(history: StageHistory, form: str, content: str) -> Symptom | None:
    steps, of_form = history.column(f"rewards/{form}/mean")
    of_content = history.values(f"rewards/{content}/mean")
    if len(steps) < 20 or len(of_content) < 20:
        return None
    low, top = _range(history, form)
    least, most = _range(history, content)
    shown, meant = trend(of_form), trend(of_content)
    near_top, extent = low + 0.9 * (top - low), most - least
    if shown.last < near_top or not shown.rises() or shown.gain < 0.1 * (top - low):
        return None
    if meant.last >= least + 0.5 * extent or meant.gain > 0.05 * extent:
        return None
    figures = {**shown.figures("form"), "form_top": top}
    figures |= {**meant.figures("content"), "content_top": most}

    def rows(r: StepRollouts) -> Any:
        if not {form, content} <= r.components.keys():
            return ()
        formed, right = r.components[form] >= near_top, r.components[content] > least
        return np.flatnonzero(formed & ~right)

    reached = int(np.argmax(of_form >= near_top))
    words = {"form": form, "content": content}
    return Symptom(steps[reached:], figures, newest(history, rows), words)


def _range(history: StageHistory, component: str) -> tuple[float, float]:
    """The lowest and highest score of a reward, 0 and 1 among them."""
    found = [r.components[component] for r in history.rollouts if component in r.components]
    every = np.concatenate([*found, [0.0, 1.0]])
    return float(np.nanmin(every)), float(np.nanmax(every))


def _alike(history: StageHistory) -> tuple[Steps, Array]:
    """Steps, and the share of groups without variance; without groups 1 for a constant reward."""
    if int(history.setting("rollout.group_size", 1)) > 1:
        return history.column("frac_reward_zero_std")
    steps, spread = history.reward_spread()
    return steps, (spread < 1e-9).astype(np.float64)


def reward_name(source: Mapping[str, Any]) -> str:
    """The name of a reward in metrics: its own, else that of the function."""
    own = source.get("name")
    if own not in (None, "none"):
        return str(own)
    return str(source["function"]).rpartition(":")[2]


def _judges(source: Mapping[str, Any]) -> bool:
    """Whether a reward is declared as correctness, by the recipe or by itself."""
    declared = source.get("correctness", "none")
    return source["function"] in JUDGES if declared in (None, "none") else bool(declared)


def _mean_of(source: Mapping[str, Any]) -> str:
    return f"rewards/{reward_name(source)}/mean"


def _evaluated(history: StageHistory, name: str) -> list[tuple[float, ...]]:
    """The evaluations with their intervals, the one before the stage as of step 0."""
    steps, means = history.column(name)
    found = list(zip(steps, means, *(history.values(f"{name}/{e}") for e in ENDS), strict=False))
    before = history.before
    if before is not None and all(before.get(key) is not None for key in ("mean", *ENDS)):
        found.insert(0, (0, before["mean"], before["low"], before["high"]))
    return found


def _gold_fall(history: StageHistory) -> Symptom | None:
    """A score that is not trained on, which fell: an evaluation, or a reward of weight 0."""
    return _evaluation_fell(history) or _unweighted_fell(history)


def _evaluation_fell(history: StageHistory) -> Symptom | None:
    """The newest evaluation against the best before it, the one before the stage included."""
    name = next((n for n in ("eval/pass@1", "eval/reward") if n in history.columns), "")
    found = _evaluated(history, name)
    if not name or len(found) < 2:
        return None
    at, best, low, _ = max(found[:-1], key=lambda one: one[1])
    now, last, _, high = found[-1]
    if high >= low:
        return None
    figures = {
        "gold_best": best,
        "gold_best_low": low,
        "gold_best_step": at,
        "gold_last": last,
        "gold_last_high": high,
        "gold_last_step": now,
    }
    return Symptom((at, now), figures, words={"gold": name})


def _unweighted_fell(history: StageHistory) -> Symptom | None:
    """A reward of weight 0 that is lower in the last fifth of the run than in its best steps."""
    from scipy.stats import mannwhitneyu

    for source in history.rewards:
        steps, gold = history.column(_mean_of(source))
        if source.get("weight", 1.0) != 0 or len(gold) < 20:
            continue
        late = gold[-max(WINDOW, len(gold) // 5) :]
        medians = rolling_medians(gold[: len(gold) - len(late)])
        best = int(np.argmax(medians))
        peak, last = float(medians[best]), median(late)
        p = float(mannwhitneyu(late, gold[best : best + WINDOW], alternative="less").pvalue)
        if p >= 0.01 or peak - last < 0.15 * abs(peak):
            continue
        figures = {"gold_best": peak, "gold_last": last, "p": p}
        return Symptom(steps[best:], figures, words={"gold": _mean_of(source)})
    return None


def _slope(rollouts: list[StepRollouts]) -> tuple[float, float] | None:
    """Slope and correlation of reward on length within groups, over all steps."""
    if not rollouts:
        return None
    length = np.concatenate(
        [r.centred(np.where(np.isfinite(r.reward), r.written, np.nan)) for r in rollouts]
    )
    reward = np.concatenate([r.centred(r.reward) for r in rollouts])
    inside = np.isfinite(length) & np.isfinite(reward)
    x, y = length[inside], reward[inside]
    xx, yy, xy = float(x @ x), float(y @ y), float(x @ y)
    if xx <= 1e-9 or yy <= 1e-12:
        return None
    return xy / xx, xy / float(np.sqrt(xx * yy))


def _best_rewarded(history: StageHistory) -> tuple[RolloutSample, ...]:
    return newest(
        history, lambda r: np.argsort(-np.nan_to_num(r.reward, nan=-np.inf), kind="stable")
    )
