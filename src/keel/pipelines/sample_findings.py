"""Findings from a batch: how completions end, and what the rewards make of them and of the gold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keel.insight.statistics import wilson_interval
from keel.pipelines.finding import Finding
from keel.pipelines.kinds import found, percent
from keel.pipelines.lengths import Held, quantile

CUT = 0.05
"""The budget should hold 95 %: more than this share cut, for sure (the interval's lower end)."""
FLAT = 0.6
"""A third to a half of equal groups is common in good runs (all right, or all wrong): only where
surely more than this share is equal does a step mostly sample in vain. Eight groups of eight, or 28
of 32, are so sure."""
SAMPLES = 32
"""Fewer completions do not say that a reward is never earned: of 32, none is earned with a chance
of one in four where one in 23 would be."""
REFUSED = 0.1
"""A few gold answers of real data are wrong or oddly written; from one in ten on, surely (the
interval's lower end), the reward reads them otherwise than they are written."""


def truncated(cut: int, n: int, budget: int, held: Held, key: str) -> Finding | None:
    """Completions cut at the budget; `held` is the budget that would hold 95 %."""
    share = wilson_interval(cut, n)
    if n == 0 or share.low <= CUT or cut == n:
        return None
    return found(
        "truncated",
        f"{percent(share.mean)} of the completions are cut at the budget of {budget} tokens",
        f"{cut} of {n} (95 % interval {percent(share.low)} to {percent(share.high)}); {held} "
        "tokens hold 95 % of them",
        key,
        f"raise it to {held.tokens}" + ("" if held.known else " or more"),
    )


def eos_never(cut: int, n: int, budget: int, held: Held, key: str) -> Finding | None:
    """Not one completion ends by itself within the budget."""
    if n < SAMPLES or cut < n:
        return None
    low = percent(wilson_interval(0, n).high)
    end = f"some end by {held.tokens}" if held.known else f"nor do they within {held.tokens}"
    return found(
        "eos-never",
        "no completion ends by itself",
        f"all {n} run into the budget of {budget} tokens (95 %: at most {low} end); {end}",
        key,
        f"raise it to {held.tokens}"
        if held.known
        else "raise it, or name what ends an answer "
        "(stop, stop_ids), or begin with an sft stage that teaches the end",
        "error",
    )


def gold_over_budget(lengths: Sequence[int], budget: int, key: str) -> Finding | None:
    """Gold answers, their end included, that do not fit into the budget."""
    over = sum(n > budget for n in lengths)
    if not lengths or wilson_interval(over, len(lengths)).low <= CUT:
        return None
    held = quantile(lengths, 0.95)
    return found(
        "gold-over-budget",
        f"{percent(over / len(lengths))} of the right answers are longer than the budget of "
        f"{budget} tokens",
        f"{over} of {len(lengths)} gold answers, end-of-sequence token included; the longest has "
        f"{max(lengths)} tokens, {held} hold 95 %",
        key,
        f"raise it to {held} or more",
        "error" if over == len(lengths) else "warning",
    )


def gold_unwritable(wrong: Sequence[str], n: int, key: str) -> Finding | None:
    """Gold answers that the tokenizer has no tokens for."""
    if not wrong:
        return None
    return found(
        "gold-unwritable",
        "the policy cannot write right answers: its tokenizer does not know the characters",
        f"{len(wrong)} of {n} gold answers; {wrong[0]}",
        key,
        "add the characters to model.build.alphabet, or use another tokenizer",
        "error",
    )


def gold_refused(
    name: str,
    texts: Sequence[str],
    best: Sequence[float | None],
    full: float,
    samples: Sequence[float],
    key: str,
) -> Finding | None:
    """Gold answers that get less than `full`, in whatever shape, and no more than the worst sample.

    Of a function of the user's, `full` is what is more than nothing.
    """
    worst = min(samples, default=0.0)
    judged = [(t, v) for t, v in zip(texts, best, strict=True) if v is not None]
    refused = [(t, v) for t, v in judged if v < full and (v <= worst or full >= 1)]
    share = wilson_interval(len(refused), len(judged))
    if not judged or share.low <= REFUSED:
        return None
    text, value = refused[0]
    got = f"{value:g}" if math.isfinite(value) else "an error"
    return found(
        "gold-refused",
        f"reward {name!r} does not accept the gold answer",
        f"{len(refused)} of {len(judged)} gold answers, {_cut(text)!r} the first, get {got}: as "
        "they stand, in tags, boxed",
        key,
        "name the column that holds the answer alone (tasks.answer), or another reward",
        "error" if len(refused) == len(judged) else "warning",
    )


def reward_zero(
    name: str,
    values: Sequence[float],
    gold: Sequence[float | None],
    alone: bool,
    key: str,
) -> Finding | None:
    """A reward that no sample earns, though gold answers do; `alone` where it is all there is."""
    scored = [value for value in gold if value is not None]
    if len(values) < SAMPLES or any(values) or not scored or max(scored) <= 0:
        return None
    high = percent(wilson_interval(0, len(values)).high)
    return found(
        "reward-zero",
        f"no sample earns the reward {name!r}, though the gold answer does",
        f"0 for each of {len(values)} completions (95 %: at most {high} earn it); the gold answers "
        f"get {sum(scored) / len(scored):.2g} on average",
        key,
        "begin with an sft stage or a better model, give easier prompts, ask for the shape that "
        "the reward reads, or add a reward for part of the way",
        "error" if alone else "warning",
    )


def reward_constant(totals: Sequence[float], texts: int, key: str) -> Finding | None:
    """One and the same reward for every sample; `texts` is how many differ from each other."""
    if len(totals) < SAMPLES or max(totals) > min(totals):
        return None
    value = totals[0]
    seen = f"{value:g} for each of {len(totals)} completions, {texts} different ones among them"
    if texts == 1:
        return found(
            "reward-constant",
            "every sample is the same, and so is its reward",
            seen,
            key.rpartition("rewards")[0] + "rollout.temperature",
            "raise it, or give different prompts",
            "error",
        )
    return found(
        "reward-constant",
        "the reward never varies, so nothing can be learned from it",
        seen,
        key,
        "use a reward that tells the answers apart, or harder prompts",
        "error",
    )


def zero_variance(
    flat: int, groups: int, members: int, refills: int | None, key: str
) -> Finding | None:
    """Groups in which all completions have the same reward; `refills` where these are replaced."""
    share = wilson_interval(flat, groups)
    if groups == 0 or members < 2 or share.low <= FLAT:
        return None
    evidence = (
        f"{flat} of {groups} groups of {members} (95 % interval {percent(share.low)} to "
        f"{percent(share.high)})"
    )
    if refills is not None:
        rounds = groups / (groups - flat) if flat < groups else None
        wanted = (
            "no number of refills fills" if rounds is None else f"about {rounds:.0f} rounds fill"
        )
        evidence += f"; dynamic sampling replaces them: {wanted} a step, {refills + 1} are made"
    return found(
        "zero-variance",
        f"{percent(share.mean)} of the groups have equal rewards, and teach nothing",
        evidence,
        key,
        "raise rollout.group_size or temperature, mix in prompts of another difficulty, or add a "
        "reward that tells answers apart",
    )


def _cut(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
