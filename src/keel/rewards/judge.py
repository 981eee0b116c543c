"""A language model as the judge: scores by a rubric, or which of two answers is better."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from keel.data.columns import shown_gold
from keel.rewards.judge_questions import (
    GROUP,
    Judgement,
    JudgeOptions,
    PairVerdict,
    asked_orders,
    choose_pairs,
    pair_question,
    position_bias,
    score_question,
)
from keel.rewards.judge_requests import Account, Asker
from keel.rewards.outputs import Summary
from keel.rewards.registry import RewardContext, with_arguments
from keel.rewards.rules import stated_texts


class Judge:
    """The reward: `await judge(prompts=…, completions=…)` asks its `asker`."""

    def __init__(self, asker: Asker, options: JudgeOptions) -> None:
        self.asker = asker
        self.options = options
        own = (options.reference, options.against if options.mode == "pairwise" else None)
        columns = dict.fromkeys(name for name in own if name not in (None, GROUP))
        required = dict.fromkeys(("prompts", "completions", *map(str, columns)))
        with_arguments(self, required, ("openings", "log_extra", "log_summary"))

    async def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        openings: Sequence[str] | None = None,
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        log_summary: Callable[[Sequence[Any], Summary], None] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """A reward in [0, 1] a completion; None without a verdict. The judge sees no thoughts.

        Raises KeelError if the server gives no answers or the spend limit is reached.
        """
        answers = [text or "" for text in stated_texts(completions, None, openings)]
        values: list[list[float]] = [[] for _ in answers]
        reasons: list[list[str]] = [[] for _ in answers]
        wrong: list[list[str]] = [[] for _ in answers]
        found: list[Judgement | PairVerdict] = []

        def keep(place: int, value: float | None, reason: str, why: str) -> None:
            values[place] += [] if value is None else [value]
            reasons[place] += [reason] if reason else []
            wrong[place] += [why] if why else []

        if self.options.mode == "rubric":
            low, high = self.options.low, self.options.high
            for place, one in enumerate(await self._scores(prompts, answers, columns)):
                found.append(one)
                score = None if one.value is None else (int(one.value) - low) / (high - low)
                keep(place, score, one.reason, one.wrong)
        else:
            for (a, b), pair in await self._compare(prompts, answers, columns):
                found.append(pair)
                keep(a, pair.value, pair.words(0), pair.wrong)
                if b is not None:
                    other = None if pair.value is None else 1.0 - pair.value
                    keep(b, other, pair.words(1), pair.wrong)
        label = self.options.label
        if log_extra is not None:
            log_extra(f"{label}_reason", ["\n".join(lines) for lines in reasons])
            log_extra(f"{label}_unparsed", ["\n".join(lines) for lines in wrong])
        if log_summary is not None:
            log_summary(found, partial(_metrics, label))
        return [math.fsum(some) / len(some) if some else None for some in values]

    @property
    def spending(self) -> list[str]:
        """The names of its metrics that add up over calls."""
        return [f"{self.options.label}/{what}" for what in ("asked", "tokens", "dollars")]

    def account(self) -> Account:
        """What was spent so far, by every run that shares the cache."""
        return self.asker.store.account()

    def paid(self) -> str:
        """The account as a text."""
        account = self.account()
        return f"judge {self.options.label!r}: {account.answers} answers for {account.spent}"

    def close(self) -> None:
        """Close connections and cache, once what was sent was answered or timed out."""
        self.asker.close()

    def _column(self, name: str | None, columns: dict[str, Any], size: int) -> list[str | None]:
        values = [None] * size if name is None else columns[name]
        return [shown_gold(value) for value in values]

    async def _scores(
        self, prompts: Sequence[Any], answers: Sequence[str], columns: dict[str, Any]
    ) -> list[Judgement]:
        options = self.options
        references = self._column(options.reference, columns, len(answers))
        asking = partial(score_question, rubric=options.rubric, low=options.low, high=options.high)
        asked = zip(prompts, answers, references, strict=True)
        return await self.asker.judge(
            [asking(prompt, text, reference=known) for prompt, text, known in asked]
        )

    async def _compare(
        self, prompts: Sequence[Any], answers: Sequence[str], columns: dict[str, Any]
    ) -> list[tuple[tuple[int, int | None], PairVerdict]]:
        """The pairs by the places of their answers (None: the fixed answer), with the verdicts."""
        options = self.options
        references = self._column(options.reference, columns, len(answers))
        places: list[tuple[int, int | None]] = []
        fixed: list[str | None] = []
        if options.against == GROUP:
            for _, group in itertools.groupby(range(len(prompts)), key=lambda at: prompts[at]):
                members = list(group)
                chosen = choose_pairs(len(members), options.rivals)
                places += [(members[a], members[b]) for a, b in chosen]
        else:
            fixed = self._column(options.against, columns, len(answers))
            places = [(at, None) for at, text in enumerate(fixed) if text is not None]
        pairs = [(a, answers[a], str(fixed[a]) if b is None else answers[b]) for a, b in places]
        orders = [asked_orders(one, other, options.both_orders) for _, one, other in pairs]
        questions = [
            pair_question(prompts[at], *shown, rubric=options.rubric, reference=references[at])
            for (at, one, other), asked in zip(pairs, orders, strict=True)
            for shown in itertools.compress(((one, other), (other, one)), asked)
        ]
        found = iter(await self.asker.judge(questions))
        verdicts = [
            PairVerdict((next(found) if first else None, next(found) if second else None))
            for first, second in orders
        ]
        return list(zip(places, verdicts, strict=True))


def judge(context: RewardContext, options: JudgeOptions) -> Judge:
    """A language model as the judge: scores by a rubric, or which of two answers is better."""
    path = Path(options.cache).expanduser() if options.cache else None
    if path is None and context.folder is not None:
        path = context.folder / f"{options.label}.sqlite"
    return Judge(Asker(options, path), options)


def _metrics(label: str, found: Sequence[Judgement | PairVerdict]) -> dict[str, float]:
    """The metrics of a step. The cost of each question counts once, as it was when it was paid: a
    resumed run logs the same."""
    once = {key: cost for one in found for key, cost in one.costs.items()}
    metrics = {
        "asked": float(len(once)),
        "tokens": float(sum(cost.tokens for cost in once.values())),
        "dollars": math.fsum(cost.dollars for cost in once.values()),
    }
    if found:
        metrics["unparsed"] = sum(one.value is None for one in found) / len(found)
    pairs = [one for one in found if isinstance(one, PairVerdict)]
    if known := [pair.value for pair in pairs if pair.value is not None]:
        metrics["ties"] = known.count(0.5) / len(known)
    if both := [pair for pair in pairs if pair.both]:
        metrics["inconsistent"] = sum(pair.inconsistent for pair in both) / len(both)
    if (bias := position_bias(pairs)) is not None:
        metrics["position_bias"] = bias
    return {f"{label}/{name}": value for name, value in metrics.items()}
