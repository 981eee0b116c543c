"""Findings from a batch: how completions end, and what the rewards make of them and of the gold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keel.analysis.statistics import wilson_interval
from keel.preflight.finding import Finding
from keel.preflight.finding_kinds import found, percent
from keel.preflight.lengths import BudgetShare, quantile

CUT = 0.05
"""The budget should hold 95 %: more than this share cut, for sure (the interval's lower end)."""
FLAT = 0.6
"""A third to a half of equal groups is common in good runs (all right, or all wrong): only where
surely more than this share is equal does a step mostly sample in vain. Eight groups of eight, or 28
of 32, are so sure."""
SAMPLES = 32
"""Fewer completions do not say that a reward is never earned: of 32, none is earned with a chance
of one in four where one in 23 would be."""
REFUSED_MEND = "name the column that holds the answer alone (tasks.answer), or another reward"
REFUSED = 0.1
"""A few gold answers of real data are wrong or oddly written; from one in ten on, surely (the
interval's lower end), the reward reads them otherwise than they are written."""


def truncated(cut: int, n: int, budget: int, held: BudgetShare, key: str) -> Finding | None:
    """Completions cut at the budget; `held` is the budget that would hold 95 %."""
    share = wilson_interval(cut, n)
    if n == 0 or share.low <= CUT or (cut == n and n >= SAMPLES):  # then `eos_never` speaks
        return None
    return found(
        "truncated",
        f"{percent(share.mean)} of the completions are cut at the budget of {budget} tokens",
        f"{cut} of {n} (95 % interval {percent(share.low)} to {percent(share.high)}); {held} "
        "tokens hold 95 % of them",
        key,
        f"raise it to {held.tokens}" + ("" if held.known else " or more"),
    )


def eos_never(cut: int, n: int, budget: int, held: BudgetShare, key: str) -> Finding | None:
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
    wrong: Sequence[float | None] = (),
    mend: str = REFUSED_MEND,
) -> Finding | None:
    """Gold answers that get less than `full`, in whatever shape, and no more than the worst sample.

    Of a function of the user's, `full` is what is more than nothing. `wrong` is what another
    prompt's gold answer gets in the place of each: where 0 is the most there is, that is less.
    """
    worst = min(samples, default=0.0)
    others = [*wrong, *[None] * (len(texts) - len(wrong))]
    judged = [(t, v, w) for t, v, w in zip(texts, best, others, strict=True) if v is not None]
    refused = [
        (t, v)
        for t, v, w in judged
        if v < full and (full >= 1 or (v <= worst and (w is None or v <= w)))
    ]
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
        mend,
        "error" if len(refused) == len(judged) else "warning",
    )


def mend_refused(own: bool, conversation: bool, task: str) -> str:
    """What to do about refused gold answers; `own`: the reward is a function of the user's."""
    if not own:
        return REFUSED_MEND
    lists = "; in a conversation it is handed lists of messages, not texts" if conversation else ""
    return (
        f"let the function read what the answer column holds{lists}, or name the column that holds "
        f"the answer alone ({task}.answer)"
    )


def threshold_unreached(
    name: str, best: Sequence[float], samples: Sequence[float], threshold: float, key: str
) -> Finding | None:
    """An evaluation that no gold answer passes, in whatever shape, nor any sample."""
    if not best or max([*best, *samples]) >= threshold:
        return None
    most = max(best)
    return found(
        "threshold-unreached",
        "no right answer passes the evaluation",
        f"reward {name!r} gives {len(best)} gold answers {most:g} at the most, and an answer "
        f"passes from {threshold:g} on",
        key,
        f"set it to {most:g}, or name another reward in evaluation.component",
    )


def reward_zero(
    name: str,
    values: Sequence[float],
    gold: Sequence[float | None],
    key: str,
) -> Finding | None:
    """A reward that no sample earns, though gold answers do.

    A warning: so few samples cannot tell never from seldom, and seldom is enough to learn from.
    """
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
    )


def reward_none(n: int, key: str) -> Finding | None:
    """Not one of `n` completions gets a reward."""
    if n < SAMPLES:
        return None
    return found(
        "reward-none",
        "no sample gets a reward, so nothing can be learned",
        f"None for each of {n} completions",
        key,
        "return a number where the reward applies, or give prompts that it applies to",
        "error",
    )


def reward_constant(
    totals: Sequence[float], texts: int, key: str, why: str | None = None
) -> Finding | None:
    """One and the same reward for every sample; `texts` is how many differ from each other.

    `why` names the gate or the clip that makes them so, whose key `key` then is.
    """
    if len(totals) < SAMPLES or max(totals) > min(totals):
        return None
    value = totals[0]
    seen = f"{value:g} for each of {len(totals)} completions, {texts} different ones among them"
    if why is not None:
        return found(
            "reward-constant",
            "the reward never varies, so nothing can be learned from it",
            f"{seen}; {why}",
            key,
            "set it to what some of the answers reach, or leave it out",
            "error",
        )
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
        "raise it, or the temperature beside it, mix in prompts of another difficulty, or add a "
        "reward that tells answers apart",
    )


def _cut(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
