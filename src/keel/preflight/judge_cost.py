"""The forecast of what a judge of a recipe costs over a stage, before a request is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from keel.analysis.statistics import mean_interval
from keel.config.evaluation import SamplingSource
from keel.config.schema import Stage
from keel.config.sources import RewardSource
from keel.graders.formats import answer_part
from keel.preflight.context import Finding, Forecast, found
from keel.rewards.judge_questions import (
    GROUP,
    Cost,
    JudgeOptions,
    choose_pairs,
    most_tokens,
    pair_question,
    score_question,
)
from keel.types import Group

BYTES_PER_TOKEN = (5.0, 4.0, 2.5)
"""Of a prompt to the judge: long tokens, usual English, and short tokens (code, other scripts)."""
REPLY_TOKENS = (16, 64)
"""Of a reply: a verdict alone, and one with two sentences of reason; at most `max_tokens`."""


def forecast_judge(
    source: RewardSource, groups: Sequence[Group], stage: Stage, validation: int, key: str
) -> Forecast | None:
    """The cost of a stage's questions to a judge, estimated from those of the sampled groups.

    `validation` is the number of prompts that the stage evaluates on, `key` that of the reward.
    None if nothing was sampled. The options of the source have been validated.
    """
    options = JudgeOptions.model_validate(source.options)
    bodies = list(_bodies(options, groups))
    if not bodies:
        return None
    sampling = stage.sampling
    assert sampling is not None
    # A stage that trains on what it samples evaluates before, every `every` steps, and after;
    # another on answers that it scores once.
    every = stage.evaluation_interval
    times = 1 if sampling.evaluation is None else 2 + ((stage.steps - 1) // every if every else 0)
    train, evaluation = _counts(sampling, options, validation, times)
    # A question that was paid for is not asked again: not of equal answers to a prompt, and not at
    # a later evaluation if the answer has not changed.
    distinct = len({str(body) for body in bodies}) / len(bodies) * train
    rollout = sampling.rollout
    fills = 1 + rollout.max_refills if rollout.dynamic_sampling else 1
    asked = (distinct + evaluation / times, distinct + evaluation, train * fills + evaluation)
    mean = mean_interval([most_tokens(body) for body in bodies])
    sizes = (max(mean.low, 0.0), mean.mean, mean.high if len(bodies) > 1 else mean.mean)
    low, estimate, high = (
        options.cost(
            math.ceil(size / width * questions),
            math.ceil(min(reply, options.max_tokens) * questions),
        )
        for size, width, reply, questions in zip(
            sizes, BYTES_PER_TOKEN, (*REPLY_TOKENS, options.max_tokens), asked, strict=True
        )
    )
    name = source.name or source.function
    costs = (low, estimate, high)
    return Forecast(name, key, train + evaluation, evaluation, costs, options)


def over_budget(forecasts: Sequence[Forecast]) -> Iterator[Finding]:
    """Judges whose budget is below their forecast, over all stages that share a cache."""
    for one in forecasts:
        cache = (one.options.label, one.options.cache)
        shared = [f for f in forecasts if (f.options.label, f.options.cache) == cache]
        if one is not shared[0]:
            continue
        low, estimate, high = totals(shared)
        limits = one.options
        if limits.covers(high):
            continue
        if limits.budget is not None and high.dollars > limits.budget:
            over, option = f"budget = ${limits.budget:g}", "budget"
        else:
            over, option = f"budget_tokens = {limits.budget_tokens}", "budget_tokens"
        sure, likely = not limits.covers(low), not limits.covers(estimate)
        yield found(
            "judge-over-budget", f"{one.key}.options.{option}", "error" if sure else "warning",
            name=one.name, over=over, estimate=estimate, low=low, high=high,
            ends="ends" if sure else "probably ends" if likely else "may end",
        )  # fmt: skip


def totals(forecasts: Sequence[Forecast]) -> tuple[Cost, ...]:
    """Low end, estimate and high end of several judges together."""
    return tuple(sum((one.costs[at] for one in forecasts), Cost()) for at in range(3))


def dollars(forecasts: Sequence[Forecast]) -> dict[str, float]:
    """The dollars of several judges, in JSON types; empty if none has a price."""
    costs = dict(zip(("low", "estimate", "high"), totals(forecasts), strict=True))
    priced = costs["high"].dollars > 0
    return {name: round(cost.dollars, 4) for name, cost in costs.items()} if priced else {}


def _bodies(options: JudgeOptions, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """A request for each sampled answer; in a comparison, its rival is as long as itself."""
    for group in groups:
        content = group.prompt.content
        for completion in group.completions:
            text = answer_part(completion.text, group.prompt.opening) or ""
            if options.mode == "rubric":
                question = score_question(
                    content, text, rubric=options.rubric, low=options.low, high=options.high
                )
            else:
                question = pair_question(content, text, text, rubric=options.rubric)
            response_format = question.format(options.structured)
            yield {"messages": list(question.messages), "response_format": response_format}


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
