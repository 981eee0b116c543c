"""Conditions of the lengths of completions: growth, bias, truncation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.rollout_summary import StepRollouts
from keel.analysis.diagnosis.trends import WINDOW, trend
from keel.analysis.diagnosis.values import RolloutSample, Symptom, newest

GROWTH = 1.5
CUT = 0.2
LIGHT = 0.8
"""Weight of a token of a long completion, of that of a short one, from which it counts as less."""
SIGNS = {"wrong": -1.0, "right": 1.0}
"""Signs of the advantages of wrong and right completions."""
ROLLOUTS = 8
"""Fewest steps with rollouts from which a trend of them is taken."""


@dataclass(frozen=True, slots=True)
class LongCompletions:
    """The shares of tokens and of weight in the gradient that long completions have: those above
    the median length, or of it where none is longer."""

    tokens: float
    mass: float

    @property
    def weight(self) -> float:
        """The weight of one of their tokens, in that of one of the others."""
        return self.mass / self.tokens * (1 - self.tokens) / (1 - self.mass)

    def __str__(self) -> str:
        return (
            f"the long ones have {self.tokens:.0%} of the tokens and "
            f"{self.mass:.0%} of the weight in the gradient, {self.weight:.2f} times that of the "
            "others for each token"
        )


def length_explosion(history: StageHistory) -> Symptom | None:
    """Completions grow and nothing is gained by it: over 20 steps or more the mean length rises
    (Mann-Kendall p < 0.01) to 1.5 times its start, and since then the reward has not risen by
    more than 5 % of its range, or at least half of the completions are cut at
    `rollout.max_tokens`, after fewer than a fifth."""
    steps, length = history.column("completions/mean_length")
    if len(steps) < 20:
        return None
    course = trend(length)
    if not course.rises() or course.last < GROWTH * course.first or course.last - course.first < 2:
        return None
    reward, cut = history.values("reward"), history.values("completions/clipped_ratio")
    if not len(reward) or not len(cut):
        return None
    bounds, gain = history.reward_range(), trend(reward)
    range_ = float(np.ptp(reward)) if bounds is None else bounds[1] - bounds[0]
    limit = float(np.median(cut[:WINDOW])) < 0.2 and float(np.median(cut[-WINDOW:])) >= 0.5
    gained = gain.last - gain.first
    if gained > 0.05 * range_ and not limit:
        return None
    start = int(np.argmax(length > 1.2 * course.first))
    evidence = [
        f"the mean length rose from {course.first:.3g} to {course.last:.3g} tokens (p = "
        f"{course.p:.1g}) while the reward went from {gain.first:.3g} to {gain.last:.3g}"
    ]
    if limit:
        evidence.append(
            f"{float(np.median(cut[-WINDOW:])):.0%} of the completions are cut at "
            f"rollout.max_tokens, {float(np.median(cut[:WINDOW])):.0%} were at the start"
        )
    figures = {"length_first": course.first, "length_last": course.last, "reward_gain": gained}
    return Symptom(int(steps[start]), int(steps[-1]), tuple(evidence), figures, _longest(history))


def length_bias(history: StageHistory) -> Symptom | None:
    """Wrong answers grow and right ones do not, with `weights.kind = "sequence_mean"`, which
    punishes a token of a long wrong answer less than one of a short wrong answer [2503.20783].
    In at least 8 steps with rollouts, the mean length of completions with a negative advantage
    rises (p < 0.05) by 25 % and 2 tokens at least, that of completions with a positive one by
    less than a third as much; the difference rises too (p < 0.05), and in the end wrong ones
    are longer. If the terms of the loss were recorded, a token of a wrong completion above the
    median length of its step must also have at most 0.8 times the weight of one of the others."""
    if history.setting("algorithm.weights.kind") != "sequence_mean":
        return None
    found = [(r.step, *_sides(r)) for r in history.rollouts]
    found = [one for one in found if all(np.isfinite(one[1:]))]
    if len(found) < ROLLOUTS:
        return None
    at, wrong, right = np.array(found, dtype=np.float64).T
    bad, good, apart = trend(wrong), trend(right), trend(wrong - right)
    grown = bad.change
    if not bad.rises(0.05) or grown < max(2.0, 0.25 * bad.first) or bad.last < good.last:
        return None
    if good.change > grown / 3 or not apart.rises(0.05):
        return None
    evidence = [
        f"wrong answers grew from {bad.first:.3g} to {bad.last:.3g} tokens (p = {bad.p:.1g}), "
        f"right ones went from {good.first:.3g} to {good.last:.3g}",
    ]
    figures = {"wrong_first": bad.first, "wrong_last": bad.last, "right_last": good.last}
    if _weighed(history):
        parts = {name: _long_ones(history, sign) for name, sign in SIGNS.items()}
        if parts["wrong"] is None or parts["wrong"].weight > LIGHT:
            return None
        for name, part in parts.items():
            if part is not None:
                evidence.append(f"{name} answers: {part}")
                figures[f"weight_of_long_{name}"] = part.weight
    return Symptom(int(at[0]), int(at[-1]), tuple(evidence), figures, _longest(history, wrong=True))


def truncation(history: StageHistory) -> Symptom | None:
    """Cut completions cost the signal: at least a fifth of the completions (median of the last
    10 steps) reach `rollout.max_tokens`, and they are masked (`rollout.mask_truncated`), or in
    the newest three steps with rollouts their reward is lower than that of the others
    (Mann-Whitney p < 0.01): by 5 % of the range of rewards among answers to one prompt, or by
    25 % among all."""
    steps, cut = history.column("completions/clipped_ratio")
    if len(steps) < 10:
        return None
    share = float(np.median(cut[-10:]))
    if share < CUT:
        return None
    masked = bool(history.setting("rollout.mask_truncated", False))
    over = np.flatnonzero(cut < CUT)
    start = int(over[-1]) + 1 if len(over) else 0
    start = min(start, len(steps) - 10)
    evidence = [f"{share:.0%} of the completions reach rollout.max_tokens (last 10 steps)"]
    figures = {"clipped_ratio": share}
    if masked:
        evidence.append("rollout.mask_truncated leaves them out of the loss")
        figures["masked"] = 1.0
    else:
        lower = _lower_when_cut(history)
        if lower is None:
            return None
        evidence.append(lower[0])
        figures |= lower[1]
    samples = newest(history, lambda r: np.flatnonzero(r.truncated))
    return Symptom(int(steps[start]), int(steps[-1]), tuple(evidence), figures, samples)


def _lower_when_cut(history: StageHistory) -> tuple[str, dict[str, float]] | None:
    """How much lower the rewards of cut completions are than those of their group."""
    from scipy.stats import mannwhitneyu

    last = history.rollouts[-3:]
    bounds = history.reward_range()
    if not last or bounds is None or bounds[0] == bounds[1]:
        return None
    cut = np.concatenate([r.truncated for r in last])
    raw = np.concatenate([r.reward for r in last])
    within = np.concatenate([r.centred(r.reward) for r in last])
    judged = np.isfinite(raw)
    cut, ended = cut & judged, ~cut & judged
    if cut.sum() < 10 or ended.sum() < 10:
        return None
    for values, least, where in ((within, 0.05, " in groups"), (raw, 0.25, "")):
        apart = float(values[ended].mean() - values[cut].mean())
        p = float(mannwhitneyu(values[cut], values[ended], alternative="less").pvalue)
        if apart >= least * (bounds[1] - bounds[0]) and p < 0.01:
            low, high = float(raw[cut].mean()), float(raw[ended].mean())
            line = (
                f"cut ones are rewarded with {low:.3g}, others with {high:.3g} (p = {p:.1g}{where})"
            )
            return line, {"reward_of_cut": low, "reward_of_ended": high}
    return None


def _sides(rollouts: StepRollouts) -> tuple[float, float]:
    """Mean lengths of the completions with a negative and with a positive advantage."""
    wrong, right = rollouts.advantage < -1e-9, rollouts.advantage > 1e-9
    if wrong.sum() < 4 or right.sum() < 4:
        return float("nan"), float("nan")
    return float(rollouts.written[wrong].mean()), float(rollouts.written[right].mean())


def _weighed(history: StageHistory) -> bool:
    """Whether the term of the surrogate is the weight of its tokens in the gradient: not where it
    holds log π, nor where the terms were not recorded."""
    by_log_prob = history.setting("algorithm.surrogate.kind") in ("log_prob", "cispo")
    return not by_log_prob and any(np.isfinite(r.mass).any() for r in history.rollouts)


def _long_ones(history: StageHistory, sign: float) -> LongCompletions | None:
    """What the long completions have, of those with advantages of a sign.

    Medians are of each step, sums over all steps. None if lengths do not differ.
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
        sums += [
            [values[part].sum() for values in (r.written, r.mass)]
            for part in (long, chosen & ~long)
        ]
    if not sums.all():
        return None
    tokens, mass = sums[0] / sums.sum(axis=0)
    return LongCompletions(float(tokens), float(mass))


def _longest(history: StageHistory, wrong: bool = False) -> tuple[RolloutSample, ...]:
    """The longest completions (wrong ones only) of the newest rollouts."""

    def rows(r: StepRollouts) -> Any:
        length = np.where(r.advantage < 0, r.written, 0) if wrong else r.written
        return np.argsort(-length, kind="stable")[: np.count_nonzero(length > 0)]

    return newest(history, rows)
