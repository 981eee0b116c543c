"""The forecast of what a judge of a recipe costs over a stage, before a request is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keel.analysis.statistics import mean_interval
from keel.config.sampling import SamplingSource
from keel.config.schema import Stage
from keel.config.sources import RewardSource
from keel.config.stage import StageConfig
from keel.preflight.finding import Finding
from keel.rewards.judge.options import GROUP, JudgeOptions
from keel.rewards.judge.pairs import choose_pairs
from keel.rewards.judge.prompts import Question, pair_question, score_question
from keel.rewards.judge.store import Cost, Prices
from keel.types import Group

BYTES_PER_TOKEN = (5.0, 4.0, 2.5)
"""Of a prompt to the judge: long tokens, usual English, and short tokens (code, other scripts)."""
REPLY_TOKENS = (16, 64)
"""Of a reply: a verdict alone, and one with two sentences of reason; at most `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A stage's questions to one judge, and their cost.

    `low`, `estimate` and `high` hold for answers as long as those sampled and one attempt a
    question: 95 % of the mean length, the ends of `BYTES_PER_TOKEN` and of a reply's length,
    evaluations that all ask the same or never, and no refill or all (dynamic sampling).
    `questions` counts repeated ones too, and no refills. `bound` holds for every tokenizer (no
    token shorter than a byte) and all attempts.
    `evaluation` counts those of the questions that validation asks.
    """

    name: str
    label: str
    key: str
    questions: int
    evaluation: int
    low: Cost
    estimate: Cost
    high: Cost
    bound: Cost
    options: JudgeOptions

    def __str__(self) -> str:
        asked = f"{self.questions} questions, {self.evaluation} of them in evaluation: about "
        if not self.estimate.dollars:
            return (
                f"{asked}{self.estimate.tokens} tokens ({self.low.tokens} to {self.high.tokens}), "
                f"at most {self.bound.tokens}"
            )
        return (
            f"{asked}${self.estimate.dollars:.2f} (${self.low.dollars:.2f} to "
            f"${self.high.dollars:.2f}), at most ${self.bound.dollars:.2f}"
        )


def forecast_judge(
    source: RewardSource, groups: Sequence[Group], stage: Stage, validation: int, key: str
) -> Forecast | None:
    """The cost of a stage's questions to a judge, estimated from those of the sampled groups.

    `validation` is the number of prompts that the stage evaluates on, `key` that of the reward.
    None where nothing was sampled. The options of the source have been validated.
    """
    options = JudgeOptions.model_validate(source.options)
    prices = options.prices
    bodies = [_body(question, options) for question in _questions(options, groups)]
    if not bodies:
        return None
    sampling = stage.sampling
    assert sampling is not None
    # A stage that does not train on what it samples evaluates on answers that it scores once.
    times = 1 if sampling.evaluation is None else evaluations_of(stage)
    train, evaluation = _counts(sampling, options, validation, times)
    # A question that was paid for is not asked again: not of equal answers to a prompt, and not at
    # a later evaluation where the answer has not changed.
    distinct = len({str(body) for body in bodies}) / len(bodies)
    new = distinct * train + evaluation
    rollout = sampling.rollout
    fills = 1 + rollout.max_refills if rollout.dynamic_sampling else 1
    most_asked = train * fills + evaluation
    asked = (distinct * train + evaluation / times, new, most_asked)
    sizes = mean_interval([prices.worst(body, 0).tokens_in for body in bodies])
    lengths = (max(sizes.low, 0.0), sizes.mean, sizes.high if len(bodies) > 1 else sizes.mean)
    replies = (*REPLY_TOKENS, options.max_tokens)
    low, estimate, high = (
        _times(prices, size / per_token, min(reply, options.max_tokens), count)
        for size, per_token, reply, count in zip(
            lengths, BYTES_PER_TOKEN, replies, asked, strict=True
        )
    )
    most = max(prices.worst(body, 0).tokens_in for body in bodies)
    bound = _times(prices, most, options.max_tokens, options.attempts * most_asked)
    return Forecast(
        source.name or source.function, options.label, key, train + evaluation, evaluation,
        low, estimate, high, bound, options,
    )  # fmt: skip


def over_budget(forecasts: Sequence[Forecast]) -> Iterator[Finding]:
    """Judges whose budget is below their forecast, over all stages that share a cache."""
    for one in forecasts:
        cache = (one.label, one.options.cache)
        shared = [other for other in forecasts if (other.label, other.options.cache) == cache]
        if one is not shared[0]:
            continue
        low, estimate, high = (
            sum(map(part, shared), Cost())
            for part in (lambda f: f.low, lambda f: f.estimate, lambda f: f.high)
        )
        budget = one.options.limit
        if budget.covers(high):
            continue
        over, option = _named(budget, high)
        sure, likely = not budget.covers(low), not budget.covers(estimate)
        yield Finding(
            "judge-over-budget",
            f"the budget of the judge {one.name!r} "
            + ("ends" if sure else "probably ends" if likely else "may end")
            + " before the run does",
            f"{over}; forecast {estimate} (from {low} to {high})",
            f"{one.key}.options.{option}",
            "raise it, or ask less: fewer steps, prompts, evaluations or answers to a prompt",
            "error" if sure else "warning",
        )


def evaluations_of(stage: StageConfig) -> int:
    """How often a stage evaluates, if it does: before, every so many steps, and after."""
    every = stage.evaluation_interval
    if every is None:
        return 0
    return 2 + ((stage.steps - 1) // every if every else 0)


def _named(budget: Any, high: Cost) -> tuple[str, str]:
    """What a budget is in words, and the option that holds it: dollars where they run out."""
    if budget.dollars is not None and high.dollars > budget.dollars:
        return f"budget = ${budget.dollars:g}", "budget"
    return f"budget_tokens = {budget.tokens}", "budget_tokens"


def _times(prices: Prices, tokens_in: float, tokens_out: float, questions: float) -> Cost:
    return prices.cost(math.ceil(tokens_in * questions), math.ceil(tokens_out * questions))


def _questions(options: JudgeOptions, groups: Sequence[Group]) -> Iterator[Question]:
    """A question for each sampled answer; in a comparison, its rival is as long as itself."""
    for group in groups:
        for completion in group.completions:
            content, text = group.prompt.content, completion.text
            if options.mode == "rubric":
                yield score_question(
                    content, text, rubric=options.rubric, low=options.low, high=options.high
                )
            else:
                yield pair_question(content, text, text, rubric=options.rubric)


def _body(question: Question, options: JudgeOptions) -> dict[str, Any]:
    return {
        "messages": list(question.messages),
        "response_format": question.format(options.structured),
    }


def _counts(
    sampling: SamplingSource, options: JudgeOptions, validation: int, evaluations: int
) -> tuple[int, int]:
    """How many questions a stage asks to learn from, and how many to evaluate."""
    of_prompt = _of_group(options, sampling.rollout.group_size)
    of_validation = of_prompt
    if sampling.algorithm is not None and sampling.algorithm.needs_greedy:
        of_prompt += _of_group(options, 1)
    if sampling.evaluation is not None:
        samples = sampling.evaluation.samples
        of_validation = _of_group(options, 1) + (_of_group(options, samples) if samples else 0)
    return sampling.train_prompts * of_prompt, evaluations * validation * of_validation


def _of_group(options: JudgeOptions, size: int) -> int:
    """How many questions a group's answers make."""
    if options.mode == "rubric":
        return size
    pairs = len(choose_pairs(size, options.rivals)) if options.against == GROUP else size
    return pairs * (2 if options.both_orders else 1)
