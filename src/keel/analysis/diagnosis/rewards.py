"""Conditions of a reward that rises for the wrong reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keel.analysis.diagnosis.history import StageHistory, reward_name
from keel.analysis.diagnosis.rollout_summary import StepRollouts
from keel.analysis.diagnosis.trends import WINDOW, rolling_medians, trend
from keel.analysis.diagnosis.values import RolloutSample, Symptom, newest

ROLLOUTS = 8
ENDS = ("low", "high")
COMPONENT = "evaluation.component"
JUDGES = ("exact_match", "numeric_match", "choice", "place_match", "math", "code", "task")
"""Built-in rewards whose 1 means that the answer is right."""


def gold_falls(history: StageHistory) -> Symptom | None:
    """The reward rises and a score that is not trained on falls (over-optimisation
    [2210.10760]). The reward's trend is up (p < 0.01) over 20 steps or more, to no less than it
    was when the score was best. And the newest evaluation is below the best one before it by
    more than their 95 % intervals allow; or a reward of weight 0 is in the last fifth of the
    run lower than in its best five steps (Mann-Whitney p < 0.01), by 15 %."""
    steps, reward = history.column("reward")
    if len(steps) < 20:
        return None
    course = trend(reward)
    if not course.rises():
        return None
    fall = _evaluations(history) or _unweighted(history)
    if fall is None:
        return None
    first, line, figures = fall
    # Before the stage, the score is of the policy that sampled the first step.
    until = max(1, int(np.searchsorted(steps, first, side="right")))
    if np.median(reward[-WINDOW:]) < np.median(reward[:until][-WINDOW:]):
        return None
    evidence = (f"the reward rose from {course.first:.3g} to {course.last:.3g}", line)
    figures = {"reward_first": course.first, "reward_last": course.last, **figures}
    return Symptom(first, int(steps[-1]), evidence, figures, _best_rewarded(history))


def gold_still(history: StageHistory) -> Symptom | None:
    """The reward rises and a score that it should serve does not. Over 20 steps or more the
    reward's trend is up (p < 0.01), by 30 % of its first value (and a tenth of `reward_std`) or
    by a quarter of `reward_std`; some reward that is trained on is not declared as correctness,
    and none that is rises. The median of the later half of `eval/pass@1` is below 0.9 and at
    most 0.05 above the first value; its 95 % interval at the end is at most 0.35 wide."""
    steps, reward = history.column("reward")
    course, spreads = trend(reward), history.values("reward_std")
    paid = [s for s in history.rewards() if s.get("weight", 1.0) > 0]
    right = [s for s in paid if _judges(s) or reward_name(s) == history.setting(COMPONENT)]
    own, rise = abs(course.first), course.last - course.first
    spread = float(np.median(spreads)) if len(spreads) else own
    if len(steps) < 20 or not course.rises():
        return None
    if rise < max(0.1 * spread, min(0.25 * spread, 0.3 * own)):
        return None
    rising = [s for s in right if trend(history.values(_mean_of(s))).rises()]
    found = _evaluated(history, "eval/pass@1")
    falls = _evaluations(history) or _unweighted(history)
    if len(right) == len(paid) or rising or falls or len(found) < 2:
        return None
    later = float(np.median([mean for _, mean, *_ in found[len(found) // 2 :]]))
    (at, first, *_), (newest, _, low, high) = found[0], found[-1]
    if later > first + 0.05 or later >= 0.9 or high - low > 0.35:
        return None
    evidence = (
        f"the reward rose from {course.first:.3g} to {course.last:.3g}",
        f"eval/pass@1 went from {first:.3g} (step {at}) to {later:.3g} (step {newest})",
    )
    figures = {"reward_first": course.first, "reward_last": course.last}
    return Symptom(int(steps[0]), int(steps[-1]), evidence, figures, _best_rewarded(history))


def length_reward(history: StageHistory) -> Symptom | None:
    """The reward rises through length alone. In 8 steps or more with rollouts, reward is
    regressed on length within groups. The mean reward rises (p < 0.01) by 10 % of its range,
    the mean length by 20 %, and at the length of the start the reward keeps less than a quarter
    of the rise. Reward and length correlate within groups by 0.5 or more."""
    rollouts = [r for r in history.rollouts if np.isfinite(r.reward).sum() > 8]
    bounds = history.reward_range()
    if len(rollouts) < ROLLOUTS or bounds is None:
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
    if not raw.rises() or raw.last - raw.first < 0.1 * (bounds[1] - bounds[0]):
        return None
    if not grown.rises(0.05) or grown.last < 1.2 * grown.first or correlation < 0.5:
        return None
    controlled = trend(reward - slope * (length - length[0]))
    if controlled.last - controlled.first > 0.25 * (raw.last - raw.first):
        return None
    evidence = (
        f"the reward rose from {raw.first:.3g} to {raw.last:.3g}, the length from "
        f"{grown.first:.3g} to {grown.last:.3g} tokens",
        f"at equal length the reward went from {controlled.first:.3g} to {controlled.last:.3g}: "
        f"within groups a token more is worth {slope:.2g} (correlation {correlation:.2f})",
    )
    figures = {"slope": slope, "correlation": correlation, "controlled_last": controlled.last}
    steps = [r.step for r in rollouts]
    return Symptom(steps[0], steps[-1], evidence, figures, _best_rewarded(history))


def format_hacking(history: StageHistory) -> Symptom | None:
    """The form is learned and the content is not. Of two rewards or more, one that is not
    declared as correctness is at 90 % of its range or more (median of the last fifth, 10 steps
    at least) and has risen by a tenth of it (p < 0.01), while one that is (or, if none is
    declared, another with a positive weight) is below half of its range and has not risen by 5
    % of it. Or, in the newest three steps with rollouts, at least 30 % of the completions that
    are rewarded above the mean of their step (10 or more) hold markers (tags, signs) and no
    letter or digit."""
    sources = [s for s in history.rewards() if s.get("weight", 1.0) > 0]
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
    evidence = (
        f"{share:.0%} of the {count} completions that are rewarded above their step's mean hold "
        f"markers and no letter or digit (steps {last[0].step} to {last[-1].step})",
    )
    samples = newest(history, lambda _: np.flatnonzero(bare[-1]))
    return Symptom(last[0].step, last[-1].step, evidence, {"share": share}, samples)


def _form_over_content(history: StageHistory, form: str, content: str) -> Symptom | None:
    steps, of_form = history.column(f"rewards/{form}/mean")
    of_content = history.values(f"rewards/{content}/mean")
    if len(steps) < 20 or len(of_content) < 20:
        return None
    low, top = _range(history, form)
    least, most = _range(history, content)
    shown, meant = trend(of_form), trend(of_content)
    if shown.last < low + 0.9 * (top - low) or not shown.rises():
        return None
    if shown.last - shown.first < 0.1 * (top - low):
        return None
    if meant.last >= least + 0.5 * (most - least):
        return None
    if meant.last - meant.first > 0.05 * (most - least):
        return None
    reached = int(np.argmax(of_form >= low + 0.9 * (top - low)))
    evidence = (
        f"rewards/{form} rose from {shown.first:.3g} to {shown.last:.3g}, of at most {top:.3g}",
        f"rewards/{content} went from {meant.first:.3g} to {meant.last:.3g}, of at most {most:.3g}",
    )
    figures = {"form_last": shown.last, "content_first": meant.first, "content_last": meant.last}
    samples: tuple[RolloutSample, ...] = ()
    if history.rollouts and {form, content} <= history.rollouts[-1].components.keys():
        samples = newest(
            history,
            lambda r: np.flatnonzero(
                (r.components[form] >= low + 0.9 * (top - low)) & ~(r.components[content] > least)
            ),
        )
    return Symptom(int(steps[reached]), int(steps[-1]), evidence, figures, samples)


def _range(history: StageHistory, component: str) -> tuple[float, float]:
    found = [r.components[component] for r in history.rollouts if component in r.components]
    every = np.concatenate(found) if found else np.empty(0)
    every = every[np.isfinite(every)]
    return (
        (min(0.0, float(every.min())), max(1.0, float(every.max()))) if len(every) else (0.0, 1.0)
    )


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


def _evaluations(history: StageHistory) -> tuple[int, str, dict[str, float]] | None:
    """The newest evaluation against the best before it, the one before the stage included."""
    name = history.pass_at_1
    found = [] if name is None else _evaluated(history, name)
    if len(found) < 2:
        return None
    at, best, low, _ = max(found[:-1], key=lambda one: one[1])
    newest, last, _, high = found[-1]
    if high >= low:
        return None
    line = (
        f"{name} fell from {best:.3g} (at least {low:.3g}; step {at}) to {last:.3g} (at most "
        f"{high:.3g}; step {newest})"
    )
    return int(at), line, {"gold_best": float(best), "gold_last": float(last)}


def _unweighted(history: StageHistory) -> tuple[int, str, dict[str, float]] | None:
    """A reward of weight 0 that is lower in the last fifth of the run than in its best steps."""
    from scipy.stats import mannwhitneyu

    for source in history.rewards():
        if source.get("weight", 1.0) != 0:
            continue
        name = _mean_of(source)
        steps, gold = history.column(name)
        if len(gold) < 20:
            continue
        late = gold[-max(WINDOW, len(gold) // 5) :]
        medians = rolling_medians(gold[: len(gold) - len(late)])
        best = int(np.argmax(medians))
        early = gold[best : best + WINDOW]
        peak, last = float(medians[best]), float(np.median(late))
        p = float(mannwhitneyu(late, early, alternative="less").pvalue)
        if p >= 0.01 or peak - last < 0.15 * abs(peak):
            continue
        line = f"{name}, which has weight 0, fell from {peak:.3g} to {last:.3g} (p = {p:.1g})"
        return int(steps[best]), line, {"gold_best": peak, "gold_last": last}
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
