"""Conditions of what is written: repetition, and words that the policy did not write."""

from __future__ import annotations

import numpy as np

from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.rollout_summary import Bools, StepRollouts
from keel.analysis.diagnosis.trends import trend
from keel.analysis.diagnosis.values import RolloutSample, Symptom

ROLLOUTS = 6


def repetition(history: StageHistory) -> Symptom | None:
    """Completions repeat themselves: in 6 steps or more with rollouts, the mean share of 4-grams of
    tokens that occurred before in the same completion (of 12 tokens or more) rises (p < 0.05) by
    0.2, to 0.3 or more in the last fifth. Ordinary prose and mathematics stay below 0.15. Where
    completions have only now become long enough, a share of 0.5 is enough."""
    found = [(r.step, float(np.nanmean(r.repetition))) for r in history.rollouts if _enough(r)]
    if len(found) < ROLLOUTS:
        return None
    steps, share = np.array([s for s, _ in found]), np.array([value for _, value in found])
    course = trend(share)
    grown = course.rises(0.05) and course.last - course.first >= 0.2 and course.last >= 0.3
    late = len(history.rollouts) > len(found) and course.last >= 0.5
    if not grown and not late:
        return None
    at = int(np.argmax(share >= 0.3))
    evidence = (
        f"{course.last:.0%} of the 4-grams of a completion occurred in it before (last steps), "
        f"{course.first:.0%} in the first",
    )
    figures = {"repetition_first": course.first, "repetition_last": course.last}
    newest = next(r for r in reversed(history.rollouts) if _enough(r))
    order = np.argsort(-np.nan_to_num(newest.repetition, nan=-1.0), kind="stable")[:3]
    samples = tuple(RolloutSample(newest.step, int(row)) for row in order)
    return Symptom(int(steps[at]), int(steps[-1]), evidence, figures, samples)


def environment_words(history: StageHistory) -> Symptom | None:
    """The reward is paid for the environment's words. Of the completions that hold tokens of the
    environment and are rewarded above the middle of the range (20 or more, to 5 groups or more, in
    the last three steps with rollouts), at least half consist of one and the same sequence of the
    policy's tokens, and these are rewarded no less than all others: what differs between them is
    only what the environment wrote. A policy that uses what it reads writes something else for each
    prompt."""
    newest = list(history.rollouts[-3:])
    bounds = history.reward_range()
    if not newest or bounds is None or bounds[1] == bounds[0]:
        return None
    reward = np.concatenate([r.reward for r in newest])
    wording = np.concatenate([r.wording for r in newest])
    context = np.concatenate([r.context for r in newest])
    written = np.concatenate([r.written for r in newest])
    group = np.concatenate([r.group + 10**6 * at for at, r in enumerate(newest)])
    paid = (context > 0) & (reward > (bounds[0] + bounds[1]) / 2)
    if paid.sum() < 20:
        return None
    kinds, counts = np.unique(wording[paid], return_counts=True)
    same = wording == kinds[int(np.argmax(counts))]
    chosen = paid & same
    share = float(counts.max() / paid.sum())
    others = reward[~same & np.isfinite(reward)]
    mean = float(np.nanmean(reward[same & (context > 0)]))
    if share < 0.5 or len(np.unique(group[chosen])) < 5:
        return None
    if len(others) and mean < float(others.mean()) - 1e-9:
        return None
    tokens = float(np.median(written[chosen]))
    evidence = [
        f"{share:.0%} of the {int(paid.sum())} rewarded completions with words of the environment "
        f"consist of the same {tokens:.0f} tokens of the policy, for "
        f"{len(np.unique(group[chosen]))} prompts",
        f"they are rewarded with {mean:.3g}"
        + (f", all others with {float(others.mean()):.3g}" if len(others) else ""),
    ]
    figures = {"share": share, "reward": mean, "tokens": tokens}
    samples = _samples(newest, same & (context > 0))
    return Symptom(newest[0].step, newest[-1].step, tuple(evidence), figures, samples)


def _enough(rollouts: StepRollouts) -> bool:
    """Whether at least a quarter of the completions are long enough, and eight."""
    known = int(np.isfinite(rollouts.repetition).sum())
    return known >= max(8, len(rollouts) // 4)


def _samples(steps: list[StepRollouts], mask: Bools) -> tuple[RolloutSample, ...]:
    """The last three of the completions that a mask over several steps chooses."""
    places = [(r.step, row) for r in steps for row in range(len(r))]
    return tuple(RolloutSample(*places[at]) for at in np.flatnonzero(mask)[-3:])
