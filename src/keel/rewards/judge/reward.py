"""A language model as the judge: scores by a rubric, or which of two answers is better."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from keel.algorithms.spec import Coefficient, Positive, Row
from keel.config.errors import explain_validation
from keel.config.fields import Count, Index, Words
from keel.rewards.batch import Summary, log_summary
from keel.rewards.context import RewardContext
from keel.rewards.judge.client import Client
from keel.rewards.judge.pairs import (
    ComparedPair,
    PairVerdict,
    choose_pairs,
    judge_pairs,
    position_bias,
    together,
)
from keel.rewards.judge.prompts import RUBRIC, Structured, score_question
from keel.rewards.judge.requests import Asker, Judgement, RequestPlan
from keel.rewards.judge.spending import Cost, Prices, SpendLimit
from keel.rewards.judge.store import Account, JudgeStore
from keel.rewards.registry import NamedReward
from keel.rewards.rules import texts
from keel.types import KeelError

GROUP = "group"
"""The rivals of an answer are those of its group."""
OURS = ("model", "messages", "response_format", "seed", "n", "stream")
"""Keys of a request that are set elsewhere, or that the answer would not be read with."""
LIMITS = ("max_tokens", "max_completion_tokens")


class JudgeOptions(Row):
    """The options of the judge."""

    model: str
    mode: Literal["rubric", "pairwise"] = "rubric"
    url: str | None = None
    """The server, as in http://localhost:8000/v1; None is OpenAI's."""
    api_key_env: str | None = None
    """The environment variable of the API key; None is OPENAI_API_KEY there, and none elsewhere."""
    rubric: str = RUBRIC
    """What counts, in words for the judge."""
    low: int = 1
    high: int = 10
    """The ends of the scale of a rubric; the reward is 0 at `low` and 1 at `high`."""
    reference: str | None = None
    """The column of an answer that deserves full marks."""
    against: str = GROUP
    """Whom an answer is compared with: others of its group, or the column of a fixed answer."""
    rivals: Count = 2
    """How many others of its group an answer is compared with."""
    both_orders: bool = True
    temperature: Coefficient = 0.0
    max_tokens: Count = 512
    limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the server calls the limit on an answer's length."""
    seed: Index = 0
    extra: dict[str, Any] = Field(default_factory=dict)
    """More keys of a request, such as reasoning_effort or top_p."""
    without: Words = ()
    """Keys that the server does not take: seed, temperature."""
    structured: Structured = "json_schema"
    attempts: Count = 2
    """How often a question is asked whose answer says nothing; each is paid for."""
    concurrency: Count = 8
    retries: Index = 6
    backoff: Coefficient = 1.0
    """Seconds before the first retry; twice as long before each that follows."""
    timeout: Positive = 30.0
    """Seconds that one request may take; rewards.timeout bounds all requests of a step."""
    price_in: Coefficient = 0.0
    price_out: Coefficient = 0.0
    """Dollars for a million tokens."""
    budget: Positive | None = None
    """The most dollars that may be spent, over all runs that share the cache."""
    budget_tokens: Annotated[int, Field(ge=1, le=10**15)] | None = None
    cache: str | None = None
    """The file of paid answers; None is one of the run's. In a run it lies in the folder that Keel
    runs in, or beside the run's folder."""
    label: Annotated[str, Field(pattern=r"^[\w-]+$")] = "judge"
    """What its metrics and its file are called: a second judge of a run needs another."""

    @model_validator(mode="after")
    def _fits(self) -> JudgeOptions:
        if not 1 <= self.high - self.low <= 100:
            raise ValueError(f"low = {self.low} and high = {self.high}: 1 to 100 must lie between")
        for key in self.extra:
            if key in (*OURS, *LIMITS, "temperature"):
                raise ValueError(f"extra.{key}: it is an option of its own, or would not be read")
            _check_json(key, self.extra[key])
        for key in self.without:
            if key not in ("seed", "temperature"):
                raise ValueError(f"without = {key!r}: only seed and temperature can be left out")
        if self.budget is not None and not self.price_in + self.price_out:
            raise ValueError(f"budget = {self.budget:g}: set price_in and price_out, or drop it")
        return self

    def plan(self) -> RequestPlan:
        """How questions are asked."""
        sampling = {"temperature": self.temperature, self.limit_name: self.max_tokens, **self.extra}
        return RequestPlan(
            model=self.model,
            sampling={k: v for k, v in sampling.items() if k not in self.without},
            max_tokens=self.max_tokens,
            seed=None if "seed" in self.without else self.seed,
            structured=self.structured,
            concurrency=self.concurrency,
            retries=self.retries,
            backoff=self.backoff,
            attempts=self.attempts,
            prices=Prices(self.price_in, self.price_out),
            budget=SpendLimit(self.budget, self.budget_tokens),
        )


class Judge:
    """The reward. `asker` is what asks; `await judge(prompts=…, completions=…)` gives rewards."""

    def __init__(self, asker: Asker, options: JudgeOptions) -> None:
        self.asker = asker
        self.options = options
        own = (options.reference, options.against if options.mode == "pairwise" else None)
        self.columns = tuple(name for name in own if name not in (None, GROUP))
        # The columns are parameters by name, so that a missing one is known before the first step.
        kinds = {"prompts": True, "completions": True} | dict.fromkeys(self.columns, True)
        kinds |= {"log_extra": False, "log_metric": False}
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if required else None,
                )
                for name, required in kinds.items()
            ]
        )

    async def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """A reward in [0, 1] a completion; None where the judge said nothing of it.

        Raises KeelError where the server gives no answers or the budget ends.
        """
        answers = texts(completions)
        none = [None] * len(answers)
        references = _words(columns[self.options.reference] if self.options.reference else none)
        if self.options.mode == "rubric":
            said = await self._scores(prompts, answers, references)
        elif self.options.against == GROUP:
            said = await self._among(prompts, answers, references)
        else:
            baseline = _words(columns[self.options.against])
            said = await self._against(prompts, answers, references, baseline)
        rewards, reasons, wrong, found, summary = said
        if log_extra is not None:
            log_extra(f"{self.options.label}_reason", reasons)
            log_extra(f"{self.options.label}_unparsed", wrong)
        if log_metric is not None:
            log_summary(log_metric, found, partial(_labelled, self.options.label, summary))
        return rewards

    def account(self) -> Account:
        """What was paid so far, by every run that shares the cache."""
        return self.asker.store.account()

    def close(self) -> None:
        """Let go of the connections and the cache, once what was sent has been answered.

        From any thread but an event loop's own. What is not there when a request's time is over is
        counted as lost.
        """
        try:
            self.asker.finish()
            self.asker.client.close()
        finally:
            self.asker.close()

    async def _scores(
        self, prompts: Sequence[Any], answers: Sequence[str], references: Sequence[str | None]
    ) -> _Said:
        low, high = self.options.low, self.options.high
        questions = [
            score_question(
                prompt, text, rubric=self.options.rubric, low=low, high=high, reference=reference
            )
            for prompt, text, reference in zip(prompts, answers, references, strict=True)
        ]
        found = await together(self.asker, [self.asker.judge(q) for q in questions])
        rewards = [_scaled(judgement, low, high) for judgement in found]
        reasons = [judgement.parsed.reason for judgement in found]
        wrong = [judgement.parsed.wrong for judgement in found]
        return rewards, reasons, wrong, found, _score_metrics

    async def _among(
        self, prompts: Sequence[Any], answers: Sequence[str], references: Sequence[str | None]
    ) -> _Said:
        """Each answer against others to the same prompt that stand beside it."""
        meet: list[tuple[int, int]] = []
        for _, group in itertools.groupby(range(len(prompts)), key=lambda at: prompts[at]):
            members = list(group)
            chosen = choose_pairs(len(members), self.options.rivals)
            meet += [(members[a], members[b]) for a, b in chosen]
        pairs = [ComparedPair(prompts[a], answers[a], answers[b], references[a]) for a, b in meet]
        return await self._compared(pairs, meet, len(answers))

    async def _against(
        self,
        prompts: Sequence[Any],
        answers: Sequence[str],
        references: Sequence[str | None],
        baseline: Sequence[str | None],
    ) -> _Said:
        """Each answer against a fixed one; rows without one get None."""
        there = [at for at, text in enumerate(baseline) if text is not None]
        pairs = [
            ComparedPair(prompts[at], answers[at], text, references[at])
            for at, text in enumerate(baseline)
            if text is not None
        ]
        return await self._compared(pairs, [(at, None) for at in there], len(answers))

    async def _compared(
        self, pairs: Sequence[ComparedPair], meet: Sequence[tuple[int, int | None]], n: int
    ) -> _Said:
        """The mean worth of each answer over its pairs; `meet` says whose they are."""
        found = await judge_pairs(
            self.asker, pairs, rubric=self.options.rubric, both_orders=self.options.both_orders
        )
        worth: list[list[float]] = [[] for _ in range(n)]
        reasons: list[list[str]] = [[] for _ in range(n)]
        wrong: list[list[str]] = [[] for _ in range(n)]
        for verdict, (a, b) in zip(found, meet, strict=True):
            for at, value in ((a, verdict.value), (b, _other(verdict.value))):
                if at is not None:
                    worth[at] += [] if value is None else [value]
                    reasons[at] += verdict.reasons
                    wrong[at] += verdict.wrong
        rewards = [math.fsum(values) / len(values) if values else None for values in worth]
        joined = ["\n".join(lines) for lines in reasons], ["\n".join(lines) for lines in wrong]
        return rewards, *joined, found, _pair_metrics


_Said = tuple[list[float | None], list[str], list[str], Sequence[Any], Summary]
"""Rewards, reasons, what was wrong, what was found, and the metrics that come of that."""


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
    return Judge(Asker(client, JudgeStore(path), chosen.plan()), chosen)


# The loader reads a maker's options off its signature.
judge.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter("around", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    + [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if info.is_required() else None,
        )
        for name, info in JudgeOptions.model_fields.items()
    ]
)


def _cache(cache: str, rewards: Path | None) -> Path:
    """Where the file of paid answers lies. Raises KeelError where a recipe may not write."""
    path = Path(cache).expanduser()
    if rewards is not None:
        places = (Path.cwd(), rewards.parent.parent)
        if not any(path.resolve().is_relative_to(place.resolve()) for place in places):
            raise KeelError(
                f"cache = {cache!r} lies neither in {Path.cwd()} nor beside the run, and a recipe "
                "writes nowhere else: name a file there, or run Keel in the folder that holds it"
            )
    return path


def _check_json(key: str, value: Any) -> None:
    """Raise ValueError where a request cannot carry a value."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(
            f"extra.{key} = {value!r:.60}: JSON has no such value: write a string, a finite number "
            "or the like"
        ) from None


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
    if told := [value for value in values if value is not None]:
        metrics["ties"] = told.count(0.5) / len(told)
    if both := [verdict for verdict in found if verdict.both]:
        metrics["inconsistent"] = sum(v.inconsistent for v in both) / len(both)
    if (bias := position_bias(found)) is not None:
        metrics["position_bias"] = bias
    return metrics


def spending(functions: Sequence[NamedReward]) -> list[str]:
    """The metrics of the judges among the rewards that add up over calls."""
    judges = [f.function for f in functions if isinstance(f.function, Judge)]
    return [f"{j.options.label}/{what}" for j in judges for what in ("asked", "tokens", "dollars")]


def _costs(costs: Sequence[Mapping[str, Cost]]) -> dict[str, float]:
    """Of each question once, however many answers it judged.

    As they were when paid for, so that a resumed run logs what the first one did.
    """
    once = {key: cost for of_one in costs for key, cost in of_one.items()}
    return {
        "asked": float(len(once)),
        "tokens": float(sum(cost.tokens for cost in once.values())),
        "dollars": math.fsum(cost.dollars for cost in once.values()),
    }


def _scaled(judgement: Judgement, low: int, high: int) -> float | None:
    value = judgement.parsed.value
    return None if value is None else (int(value) - low) / (high - low)


def _other(value: float | None) -> float | None:
    return None if value is None else 1.0 - value


def _words(column: Sequence[Any]) -> list[str | None]:
    return [None if value is None else str(value) for value in column]
