"""Conditions of what is written: repetition, and words that the policy did not write."""

from __future__ import annotations

import numpy as np

from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.rollout_summary import Bools, StepRollouts
from keel.analysis.diagnosis.trends import trend
from keel.analysis.diagnosis.values import RolloutSample, Symptom

ROLLOUTS = 6
MOST_COMPARED = 200
ENOUGH = 20
"""Completions with words of the environment, or without, of which a mean is taken."""


def repetition(history: StageHistory) -> Symptom | None:
    """Completions repeat themselves: in 6 steps or more with rollouts, the mean share of
    4-grams of tokens that occurred before in the same completion (of 12 tokens or more) rises
    (p < 0.05) by 0.2, to 0.3 or more in the last fifth. Ordinary prose stays below 0.15. If
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
    """The reward is paid for the environment's words. In the last three steps with rollouts, at
    least half of the completions that hold tokens of the environment (20 or more, to 5 groups
    or more) are rewarded above the middle of the range and no less than those without, if there
    are 20 of these. Yet the policy's own words do not depend on the prompt: the mean Jaccard
    similarity of its sets of tokens is within groups at most 0.05 above that between groups."""
    newest = list(history.rollouts[-3:])
    bounds = history.reward_range()
    if not newest or bounds is None or bounds[1] == bounds[0]:
        return None
    reward = np.concatenate([r.reward for r in newest])
    context = np.concatenate([r.context for r in newest]) > 0
    group = np.concatenate([r.group + 10**6 * at for at, r in enumerate(newest)])
    paid = context & (reward > (bounds[0] + bounds[1]) / 2)
    groups = len(np.unique(group[paid]))
    if paid.sum() < max(ENOUGH, context.sum() / 2) or groups < 5:
        return None
    mean, others = float(np.nanmean(reward[context])), reward[~context & np.isfinite(reward)]
    compared = len(others) >= ENOUGH  # a single one says nothing, however it is rewarded
    if compared and mean < others.mean():
        return None
    sketch = np.concatenate([r.sketch for r in newest])[paid][:MOST_COMPARED]
    same = group[paid][:MOST_COMPARED, None] == group[paid][:MOST_COMPARED]
    alike = np.mean(sketch[:, None, :] == sketch[None, :, :], axis=2)
    pairs = ~np.eye(len(sketch), dtype=bool)
    if not (same & pairs).any() or not (~same).any():
        return None
    within, between = float(alike[same & pairs].mean()), float(alike[~same].mean())
    if within - between > 0.05:
        return None
    evidence = (
        f"{int(paid.sum())} of {int(context.sum())} completions with words of the environment are "
        f"rewarded (mean {mean:.3g})" + (f", others {others.mean():.3g}" if compared else ""),
        f"what the policy wrote in them is as similar between {groups} prompts ({between:.2f}) as "
        f"for one prompt ({within:.2f})",
    )
    figures = {"reward": mean, "similar_within": within, "similar_between": between}
    return Symptom(newest[0].step, newest[-1].step, evidence, figures, _samples(newest, paid))


def _enough(rollouts: StepRollouts) -> bool:
    """Whether at least a quarter of the completions are long enough, and eight."""
    known = int(np.isfinite(rollouts.repetition).sum())
    return known >= max(8, len(rollouts) // 4)


def _samples(steps: list[StepRollouts], mask: Bools) -> tuple[RolloutSample, ...]:
    """The last three of the completions that a mask over several steps chooses."""
    places = [(r.step, row) for r in steps for row in range(len(r))]
    return tuple(RolloutSample(*places[at]) for at in np.flatnonzero(mask)[-3:])
