"""A language model as the judge: scores by a rubric, or which of two answers is better."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from keel.config.errors import explain_validation
from keel.rewards.batch import Summary, log_summary
from keel.rewards.context import RewardContext
from keel.rewards.judge.client import Client
from keel.rewards.judge.options import GROUP, JudgeOptions
from keel.rewards.judge.pairs import (
    ComparedPair,
    PairVerdict,
    choose_pairs,
    judge_pairs,
    position_bias,
)
from keel.rewards.judge.prompts import score_question
from keel.rewards.judge.requests import Asker, Judgement
from keel.rewards.judge.store import Account, Cost, JudgeStore
from keel.rewards.registry import NamedReward
from keel.rewards.rules import texts
from keel.types import KeelError


class Judge:
    """The reward: `await judge(prompts=…, completions=…)` asks its `asker`."""

    def __init__(self, asker: Asker, options: JudgeOptions) -> None:
        self.asker = asker
        self.options = options
        own = (options.reference, options.against if options.mode == "pairwise" else None)
        self.columns = tuple(name for name in own if name not in (None, GROUP))
        # The columns are parameters by name, so that a missing one is known before the first step.
        required = dict.fromkeys(("prompts", "completions", *self.columns), True)
        self.__signature__ = _signature(required | {"log_extra": False, "log_metric": False})

    async def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """A reward in [0, 1] a completion; None without a verdict.

        Raises KeelError where the server gives no answers or the spend limit is reached.
        """
        answers = texts(completions)
        none = [None] * len(answers)
        references = _words(columns[self.options.reference] if self.options.reference else none)
        if self.options.mode == "rubric":
            result = await self._scores(prompts, answers, references)
        else:
            against = self.options.against
            baseline = None if against == GROUP else _words(columns[against])
            result = await self._pairwise(prompts, answers, references, baseline)
        rewards, reasons, wrong, found, summary = result
        if log_extra is not None:
            log_extra(f"{self.options.label}_reason", reasons)
            log_extra(f"{self.options.label}_unparsed", wrong)
        if log_metric is not None:
            log_summary(log_metric, found, partial(_labelled, self.options.label, summary))
        return rewards

    def account(self) -> Account:
        """What was spent so far, by every run that shares the cache."""
        return self.asker.store.account()

    def close(self) -> None:
        """Close connections and cache, once what was sent was answered or timed out."""
        self.asker.close()

    async def _scores(
        self, prompts: Sequence[Any], answers: Sequence[str], references: Sequence[str | None]
    ) -> _Result:
        low, high = self.options.low, self.options.high
        questions = [
            score_question(
                prompt, text, rubric=self.options.rubric, low=low, high=high, reference=reference
            )
            for prompt, text, reference in zip(prompts, answers, references, strict=True)
        ]
        found = await self.asker.judge(questions)
        rewards = [_scaled(judgement, low, high) for judgement in found]
        reasons = [judgement.parsed.reason for judgement in found]
        wrong = [judgement.parsed.wrong for judgement in found]
        return rewards, reasons, wrong, found, _score_metrics

    async def _pairwise(
        self,
        prompts: Sequence[Any],
        answers: Sequence[str],
        references: Sequence[str | None],
        baseline: Sequence[str | None] | None,
    ) -> _Result:
        """The mean worth of each answer over its pairs: with its group, or with a fixed answer."""
        places: list[tuple[int, int | None]] = []
        fixed = baseline or []
        if baseline is None:
            for _, group in itertools.groupby(range(len(prompts)), key=lambda at: prompts[at]):
                members = list(group)
                chosen = choose_pairs(len(members), self.options.rivals)
                places += [(members[a], members[b]) for a, b in chosen]
        else:
            places = [(at, None) for at, text in enumerate(fixed) if text is not None]
        pairs = [
            ComparedPair(
                prompts[a], answers[a], str(fixed[a]) if b is None else answers[b], references[a]
            )
            for a, b in places
        ]
        found = await judge_pairs(
            self.asker, pairs, rubric=self.options.rubric, both_orders=self.options.both_orders
        )
        worth: list[list[float]] = [[] for _ in answers]
        reasons: list[list[str]] = [[] for _ in answers]
        wrong: list[list[str]] = [[] for _ in answers]
        for verdict, (a, b) in zip(found, places, strict=True):
            other = None if verdict.value is None else 1.0 - verdict.value
            for at, value in ((a, verdict.value), (b, other)):
                if at is not None:
                    worth[at] += [] if value is None else [value]
                    reasons[at] += verdict.reasons
                    wrong[at] += verdict.wrong
        rewards = [math.fsum(values) / len(values) if values else None for values in worth]
        joined = ["\n".join(lines) for lines in reasons], ["\n".join(lines) for lines in wrong]
        return rewards, *joined, found, _pair_metrics


_Result = tuple[list[float | None], list[str], list[str], Sequence[Any], Summary]
"""Rewards, reasons, errors, judgements, and the function from these to metrics."""


def judge(around: RewardContext, **options: Any) -> Judge:
    """The judge of a recipe; its options are those of `JudgeOptions`. Raises KeelError."""
    try:
        chosen = JudgeOptions.model_validate(options)
    except ValidationError as error:
        raise KeelError(explain_validation(error, options, JudgeOptions)) from None
    client = Client(chosen.url, chosen.api_key_env, chosen.timeout)
    path = _cache(chosen.cache, around.folder) if chosen.cache else None
    if path is None and around.folder is not None:
        path = around.folder / f"{chosen.label}.sqlite"
    return Judge(Asker(client, JudgeStore(path), chosen), chosen)


def _signature(required: Mapping[str, bool], first: str | None = None) -> inspect.Signature:
    """Keyword parameters, and whether they are required, after a positional one."""
    parameter = inspect.Parameter
    empty = parameter.empty
    return inspect.Signature(
        ([parameter(first, parameter.POSITIONAL_OR_KEYWORD)] if first else [])
        + [
            parameter(name, parameter.KEYWORD_ONLY, default=empty if needed else None)
            for name, needed in required.items()
        ]
    )


# The loader reads the options off the signature.
judge.__signature__ = _signature(  # type: ignore[attr-defined]
    {name: info.is_required() for name, info in JudgeOptions.model_fields.items()}, "around"
)


def _cache(cache: str, rewards: Path | None) -> Path:
    """The path of the cache. Raises KeelError where a recipe may not write there."""
    path = Path(cache).expanduser()
    if rewards is not None:
        places = (Path.cwd(), rewards.parent.parent)
        if not any(path.resolve().is_relative_to(place.resolve()) for place in places):
            raise KeelError(
                f"cache = {cache!r} lies neither in {Path.cwd()} nor next to the run, and a recipe "
                "writes nowhere else: name a file there, or run Keel in the folder that holds it"
            )
    return path


def _labelled(label: str, summary: Summary, found: list[Any]) -> dict[str, float]:
    return {f"{label}/{name}": value for name, value in summary(found).items()}


def _score_metrics(found: Sequence[Judgement]) -> dict[str, float]:
    metrics = _costs([judgement.costs for judgement in found])
    if found:
        metrics["unparsed"] = sum(one.parsed.value is None for one in found) / len(found)
    return metrics


def _pair_metrics(found: Sequence[PairVerdict]) -> dict[str, float]:
    metrics = _costs([verdict.costs for verdict in found])
    if not found:
        return metrics
    values = [verdict.value for verdict in found]
    metrics["unparsed"] = values.count(None) / len(found)
    if known := [value for value in values if value is not None]:
        metrics["ties"] = known.count(0.5) / len(known)
    if both := [verdict for verdict in found if verdict.both]:
        metrics["inconsistent"] = sum(v.inconsistent for v in both) / len(both)
    if (bias := position_bias(found)) is not None:
        metrics["position_bias"] = bias
    return metrics


def spending(functions: Sequence[NamedReward]) -> list[str]:
    """The names of the judges' metrics that add up over calls."""
    judges = [f.function for f in functions if isinstance(f.function, Judge)]
    return [f"{j.options.label}/{what}" for j in judges for what in ("asked", "tokens", "dollars")]


def _costs(costs: Sequence[Mapping[str, Cost]]) -> dict[str, float]:
    """The costs of each question once, at the time of payment: a resumed run logs the same."""
    once = {key: cost for of_one in costs for key, cost in of_one.items()}
    return {
        "asked": float(len(once)),
        "tokens": float(sum(cost.tokens for cost in once.values())),
        "dollars": math.fsum(cost.dollars for cost in once.values()),
    }


def _scaled(judgement: Judgement, low: int, high: int) -> float | None:
    value = judgement.parsed.value
    return None if value is None else (int(value) - low) / (high - low)


def _words(column: Sequence[Any]) -> list[str | None]:
    return [None if value is None else str(value) for value in column]
