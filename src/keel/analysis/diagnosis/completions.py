"""Conditions of what is written: lengths, cut completions, repetition, words of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.diagnosis.history import (
    WINDOW,
    Array,
    RolloutSample,
    StageHistory,
    StepRollouts,
    Symptom,
    median,
    newest,
    trend,
)

GROWTH = 1.5
CUT = 0.2
LIGHT = 0.8
"""Weight of a token of a long completion, of that of a short one, from which it counts as less."""
SIGNS = {"wrong": -1.0, "right": 1.0}
"""Signs of the advantages of wrong and right completions."""
ROLLOUTS = 8
"""Fewest steps with rollouts from which a trend of lengths is taken."""
REPEATED = 6
"""The same of repetition."""
MOST_COMPARED = 200
ENOUGH = 20
"""Completions with words of the environment, or without, of which a mean is taken."""


def length_explosion(history: StageHistory) -> Symptom | None:
    """Completions grow and nothing is gained by it: over 20 steps or more the mean length rises (p
    < 0.01) to 1.5 times its start, and since then the reward has not risen by more than 5 % of its
    range, or at least half of the completions are cut at `rollout.max_tokens`, after fewer than a
    fifth."""
    steps, length = history.column("completions/mean_length")
    reward, cut = history.values("reward"), history.values("completions/clipped_ratio")
    if len(steps) < 20 or not len(reward) or not len(cut):
        return None
    course, gained = trend(length), trend(reward)
    if not course.rises() or course.last < GROWTH * course.first or course.gain < 2:
        return None
    before, now = median(cut[:WINDOW]), median(cut[-WINDOW:])
    limit = before < 0.2 and now >= 0.5
    if gained.gain > 0.05 * history.reward_extent and not limit:
        return None
    figures = {**course.figures("length"), "p": course.p}
    figures |= {**gained.figures("reward"), "reward_gain": gained.gain}
    if limit:
        figures |= {"cut_first": before, "cut_last": now}
    start = int(np.argmax(length > 1.2 * course.first))
    return Symptom(steps[start:], figures, _longest(history))


def length_bias(history: StageHistory) -> Symptom | None:
    """Wrong answers grow and right ones do not, with `weights.kind = "sequence_mean"`, which
    punishes a token of a long wrong answer less [2503.20783]. In at least 8 steps with rollouts,
    the mean length at a negative advantage rises (p < 0.05) by 25 % and 2 tokens at least, at a
    positive one by less than a third as much, and in the end wrong ones are longer. If the loss
    terms were recorded, a token of a long wrong completion also has at most 0.8 times the weight of
    the others."""
    if history.setting("algorithm.weights.kind") != "sequence_mean":
        return None
    found = [
        (r.step, *(_mean_length(r, sign) for sign in SIGNS.values())) for r in history.rollouts
    ]
    found = [one for one in found if np.isfinite(one).all()]
    if len(found) < ROLLOUTS:
        return None
    at, wrong, right = np.array(found, dtype=np.float64).T
    bad, good, apart = trend(wrong), trend(right), trend(wrong - right)
    grown = bad.change
    if not bad.rises(0.05) or grown < max(2.0, 0.25 * bad.first) or bad.last < good.last:
        return None
    if good.change > grown / 3 or not apart.rises(0.05):
        return None
    figures = {**bad.figures("wrong"), "p": bad.p, **good.figures("right")}
    if _weighed(history):
        for name, sign in SIGNS.items():
            figures |= _weight_of_long(history, name, sign)
        if figures.get("weight_of_long_wrong", 1.0) > LIGHT:
            return None
    return Symptom(at, figures, _longest(history, wrong=True))


def truncation(history: StageHistory) -> Symptom | None:
    """Cut completions cost the signal: at least a fifth of the completions (last 10 steps) reach
    `rollout.max_tokens`, and they are masked (`rollout.mask_truncated`), or in the newest three
    steps with rollouts their reward is lower (p < 0.01): by 5 % of the range of rewards among
    answers to one prompt, or by 25 % among all."""
    steps, cut = history.column("completions/clipped_ratio")
    if len(steps) < 10:
        return None
    share = median(cut[-10:])
    if share < CUT:
        return None
    words: dict[str, str] = {}
    figures = {"masked": 1.0}
    if not history.setting("rollout.mask_truncated", False):
        lower = _lower_when_cut(history)
        if lower is None:
            return None
        words["among"], figures = lower
    under = np.flatnonzero(cut < CUT)
    start = min(int(under[-1]) + 1, len(steps) - 10) if len(under) else 0
    samples = newest(history, lambda r: np.flatnonzero(r.truncated))
    return Symptom(steps[start:], {"clipped_ratio": share, **figures}, samples, words)


def empty_answers(history: StageHistory) -> Symptom | None:
    """The policy answers with nothing: in the newest three steps with rollouts at least 30 % of the
    completions hold no text, and three times the share of the first three."""
    if len(history.rollouts) < 6:
        return None
    first, last = (
        float(np.concatenate([r.empty for r in steps]).mean())
        for steps in (history.rollouts[:3], history.rollouts[-3:])
    )
    if last < 0.3 or last < 3 * first:
        return None
    rewards, empty = (
        np.concatenate([getattr(r, name) for r in history.rollouts[-3:]])
        for name in ("reward", "empty")
    )
    figures = {"empty_first": first, "empty_last": last}
    for name, chosen in (("empty_reward", empty), ("other_reward", ~empty)):
        if np.isfinite(rewards[chosen]).any():
            figures[name] = float(np.nanmean(rewards[chosen]))
    samples = newest(history, lambda r: np.flatnonzero(r.empty))
    return Symptom([r.step for r in history.rollouts if r.empty.mean() >= 0.3], figures, samples)


def repetition(history: StageHistory) -> Symptom | None:
    """Completions repeat themselves: in 6 steps or more with rollouts, the mean share of 4-grams of
    tokens that occurred before in the same completion (of 12 tokens or more) rises (p < 0.05) by
    0.2, to 0.3 or more in the last fifth. Ordinary prose stays below 0.15. If completions only now
    are long enough, 0.5 is enough."""
    found = [r for r in history.rollouts if _enough(r)]
    if len(found) < REPEATED:
        return None
    share = np.array([np.nanmean(r.repetition) for r in found])
    course = trend(share)
    grown = course.rises(0.05) and course.gain >= 0.2 and course.last >= 0.3
    late = len(history.rollouts) > len(found) and course.last >= 0.5
    if not grown and not late:
        return None
    order = np.argsort(-np.nan_to_num(found[-1].repetition, nan=-1.0), kind="stable")[:3]
    return Symptom(
        [r.step for r in found[int(np.argmax(share >= 0.3)) :]],
        course.figures("repetition"),
        tuple(RolloutSample(found[-1].step, int(row)) for row in order),
    )


def environment_words(history: StageHistory) -> Symptom | None:
    """The reward is paid for the environment's words. In the last three steps with rollouts, at
    least half of the completions with tokens of the environment (20 or more, in 5 groups or more)
    are rewarded above the middle of the range and no less than those without. Yet the policy's own
    words do not depend on the prompt: the Jaccard similarity of its token sets is at most 0.05
    higher within groups than between them."""
    last, bounds = history.rollouts[-3:], history.reward_range
    if not last or bounds is None or bounds[1] == bounds[0]:
        return None
    reward = np.concatenate([r.reward for r in last])
    context = np.concatenate([r.context for r in last]) > 0
    group = np.concatenate([r.group + 10**6 * at for at, r in enumerate(last)])
    paid = context & (reward > (bounds[0] + bounds[1]) / 2)
    groups = len(np.unique(group[paid]))
    if paid.sum() < max(ENOUGH, context.sum() / 2) or groups < 5:
        return None
    figures = {
        "paid": int(paid.sum()),
        "with_context": int(context.sum()),
        "prompts": groups,
        "reward": float(np.nanmean(reward[context])),
    }
    others = reward[~context & np.isfinite(reward)]
    if len(others) >= ENOUGH:  # a single one says nothing, however it is rewarded
        figures["reward_of_others"] = float(others.mean())
        if figures["reward"] < figures["reward_of_others"]:
            return None
    compared = np.flatnonzero(paid)[:MOST_COMPARED]
    words = [one for r in last for one in r.words]
    alike = similarities([words[at] for at in compared])
    same = group[compared][:, None] == group[compared]
    pairs = ~np.eye(len(compared), dtype=bool)
    if not (same & pairs).any() or not (~same).any():
        return None
    within, between = float(alike[same & pairs].mean()), float(alike[~same].mean())
    if within - between > 0.05:
        return None
    figures |= {"similar_within": within, "similar_between": between}
    places = [(r.step, row) for r in last for row in range(len(r))]
    samples = tuple(RolloutSample(*places[at]) for at in np.flatnonzero(paid)[-3:])
    return Symptom([r.step for r in last], figures, samples)


def similarities(sets: Sequence[npt.NDArray[Any]]) -> Array:
    """Jaccard's |A ∩ B| / |A ∪ B| of all pairs of sets of tokens; 1 of two empty ones."""
    tokens, at = np.unique(np.concatenate(sets), return_inverse=True)
    has = np.zeros((len(sets), len(tokens)))
    has[np.repeat(np.arange(len(sets)), [len(one) for one in sets]), at] = 1
    shared, sizes = has @ has.T, has.sum(axis=1)
    union = sizes[:, None] + sizes - shared
    return np.where(union > 0, shared / np.maximum(union, 1), 1.0)


def _lower_when_cut(history: StageHistory) -> tuple[str, dict[str, float]] | None:
    """How much lower the rewards of cut completions are than those of their group, or of all."""
    from scipy.stats import mannwhitneyu

    last, bounds = history.rollouts[-3:], history.reward_range
    if not last or bounds is None or bounds[0] == bounds[1]:
        return None
    cut = np.concatenate([r.truncated for r in last])
    raw = np.concatenate([r.reward for r in last])
    within = np.concatenate([r.centred(r.reward) for r in last])
    judged = np.isfinite(raw)
    cut, ended = cut & judged, ~cut & judged
    if cut.sum() < 10 or ended.sum() < 10:
        return None
    for among, values, least in (("one prompt", within, 0.05), ("all prompts", raw, 0.25)):
        apart = float(values[ended].mean() - values[cut].mean())
        p = float(mannwhitneyu(values[cut], values[ended], alternative="less").pvalue)
        if apart >= least * (bounds[1] - bounds[0]) and p < 0.01:
            low, high = float(raw[cut].mean()), float(raw[ended].mean())
            return among, {"reward_of_cut": low, "reward_of_ended": high, "p": p}
    return None


def _mean_length(rollouts: StepRollouts, sign: float) -> float:
    """Of the completions with advantages of a sign; NaN of fewer than four."""
    chosen = sign * rollouts.advantage > 1e-9
    return float(rollouts.written[chosen].mean()) if chosen.sum() >= 4 else float("nan")


def _weighed(history: StageHistory) -> bool:
    """Whether the term of the surrogate is the weight of its tokens in the gradient: not if it
    holds log π, or the terms were not recorded."""
    by_log_prob = history.setting("algorithm.surrogate.kind") in ("log_prob", "cispo")
    return not by_log_prob and any(np.isfinite(r.mass).any() for r in history.rollouts)


def _weight_of_long(history: StageHistory, name: str, sign: float) -> dict[str, float]:
    """The shares of tokens and of weight in the gradient that long completions have, of those
    with advantages of a sign, and the weight of one of their tokens in that of one of the others.

    Long ones are above the median length of their step, or of it if none is longer; sums are over
    all steps. Empty if lengths do not differ.
    """
    sums = np.zeros((2, 2))
    for r in history.rollouts:
        chosen = (sign * r.advantage > 1e-9) & (r.written > 0) & (r.mass > 0)
        if not chosen.any():
            continue
        middle = np.median(r.written[chosen])
        long = chosen & (r.written > middle)
        if not long.any():  # most have the largest length, such as that of the budget
            long = chosen & (r.written == middle)
        if np.array_equal(long, chosen):
            continue  # they do not differ
        parts = (long, chosen & ~long)
        sums += [[values[part].sum() for values in (r.written, r.mass)] for part in parts]
    if not sums.all():
        return {}
    tokens, mass = sums[0] / sums.sum(axis=0)
    return {
        f"tokens_of_long_{name}": float(tokens),
        f"mass_of_long_{name}": float(mass),
        f"weight_of_long_{name}": float(mass / tokens * (1 - tokens) / (1 - mass)),
    }


def _longest(history: StageHistory, wrong: bool = False) -> tuple[RolloutSample, ...]:
    """The longest completions (wrong ones only) of the newest rollouts."""

    def rows(r: StepRollouts) -> Any:
        length = np.where(r.advantage < 0, r.written, 0) if wrong else r.written
        return np.argsort(-length, kind="stable")[: np.count_nonzero(length > 0)]

    return newest(history, rows)


def _enough(rollouts: StepRollouts) -> bool:
    """Whether at least a quarter of the completions are long enough, and eight."""
    known = int(np.isfinite(rollouts.repetition).sum())
    return known >= max(8, len(rollouts) // 4)
