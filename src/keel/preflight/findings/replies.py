"""What an environment's replies give away."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keel.analysis.statistics import wilson_interval
from keel.preflight.finding import Finding
from keel.preflight.finding_kinds import found
from keel.preflight.prompt_stats import PromptStats, SamplingPlan
from keel.types import KeelError, Prompt, Task

PROBED = 32
"""Prompts whose environment is asked."""
SPELLED = 0.1
"""A reply may hold an answer by chance; from one in ten on, surely (the interval's lower end), it
gives answers away."""


def reply_holds_answer(source: PromptStats, plan: SamplingPlan) -> Finding | None:
    """An environment that spells the gold answer in reply to words that say nothing of it.

    It is asked with no words and with another prompt's gold answer, as many times as a completion
    has turns. An answer that stands in the prompt, or in the reply to a prompt of another answer as
    well (an option, a count), is no sign.
    """
    golds = [(p, source.tasks[p.task].gold(p)) for p in source.first[:PROBED]]
    known = [(prompt, gold) for prompt, gold in golds if gold is not None and gold.strip()]
    if len({gold for _, gold in known}) < 2:
        return None
    others = [
        next(gold for _, gold in (*known[at:], *known[:at]) if gold != own)
        for at, (_, own) in enumerate(known)
    ]
    told = [
        _replies(source.tasks[prompt.task], prompt, ("", other), plan.rollout.max_turns)
        for (prompt, _), other in zip(known, others, strict=True)
    ]
    hits = [at for at in range(len(known)) if _tells(at, known, told)]
    share = wilson_interval(len(hits), len(known))
    if share.low <= SPELLED:
        return None
    prompt, gold = known[hits[0]]
    reply = next(text for _, text in told[hits[0]] if _holds(text, gold))
    number = list(source.tasks).index(prompt.task)
    return found(
        "reply-holds-answer",
        "the environment's reply spells the right answer, which the policy need only repeat",
        f"{len(hits)} of {len(known)} prompts, in reply to words that do not hold it; "
        f"{prompt.id!r}: {gold[:40]!r} in {reply[:80]!r}",
        f"{plan.key}tasks.{number}.name",
        "say in `reply` whether an answer is right, not what the right one is",
    )


def _replies(
    task: Task, prompt: Prompt, probes: Sequence[str], max_turns: int
) -> list[tuple[str, str]]:
    """What the environment says to someone who writes a probe in each turn: probe and reply."""
    said: list[tuple[str, str]] = []
    for probe in probes:
        text = ""
        for _ in range(max_turns - 1):
            text += probe
            try:
                reply = task.reply(prompt, text)
            except KeelError:  # such words are no part of its language
                break
            if reply is None:
                break
            said.append((probe, reply))
            text += reply
    return said


def _tells(
    at: int,
    known: Sequence[tuple[Prompt, str]],
    told: Sequence[Sequence[tuple[str, str]]],
) -> bool:
    prompt, gold = known[at]
    content = prompt.content
    asked = content if isinstance(content, str) else "\n".join(turn["content"] for turn in content)
    elsewhere = any(
        _holds(text, gold)
        for replies, (_, other) in zip(told, known, strict=True)
        if not _holds(other, gold)
        for probe, text in replies
        if not _holds(probe, gold)  # it may only have repeated it
    )
    spelled = any(_holds(text, gold) for _, text in told[at])
    return spelled and not elsewhere and not _holds(asked, gold)


def _holds(text: str, gold: str) -> bool:
    """Whether the answer stands in the text as a word or words of its own."""
    gold = gold.strip()
    return re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", text) is not None
