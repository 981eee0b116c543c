"""What a judge of a recipe would be paid: reckoned before a request is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keel.config.sources import RewardSource
from keel.rewards.judge import GROUP, JudgeOptions
from keel.rewards.judge_budget import Cost
from keel.rewards.judge_pairs import choose_pairs
from keel.rewards.judge_prompts import pair_question, score_question
from keel.types import Group


@dataclass(frozen=True, slots=True)
class JudgeCost:
    """Questions of one step, and what they come to at the most (no token shorter than a byte)."""

    name: str
    questions: int
    tokens: int
    dollars: float

    def __str__(self) -> str:
        asked = f"{self.questions} questions a step, at most {self.tokens} tokens"
        return asked + (f" and ${self.dollars:.2g}" if self.dollars else "")


def judge_cost(
    source: RewardSource, groups: Sequence[Group], prompts_per_step: int, group_size: int
) -> JudgeCost | None:
    """What a step's questions cost, by those that the sampled groups would put; None without any.

    The options are those of a judge that was made, and so right.
    """
    options = JudgeOptions.model_validate(source.options)
    prices = options.plan().prices
    worst = Cost()
    put = 0
    for group in groups:
        for completion in group.completions:
            content, text = group.prompt.content, completion.text
            if options.mode == "rubric":
                question = score_question(
                    content, text, rubric=options.rubric, low=options.low, high=options.high
                )
            else:
                question = pair_question(content, text, text, rubric=options.rubric)
            body = {
                "messages": list(question.messages),
                "response_format": question.format(options.structured),
            }
            worst += prices.worst(body, options.max_tokens)
            put += 1
    if put == 0:
        return None
    questions = prompts_per_step * _of_group(options, group_size)
    share = questions / put
    return JudgeCost(
        source.name or source.function,
        questions,
        round(worst.tokens * share),
        worst.dollars * share,
    )


def _of_group(options: JudgeOptions, size: int) -> int:
    """How many questions a group's answers make."""
    if options.mode == "rubric":
        return size
    pairs = len(choose_pairs(size, options.rivals)) if options.against == GROUP else size
    return pairs * (2 if options.both_orders else 1)
