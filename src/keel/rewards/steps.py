"""Rewards of steps: where they go, what they make of an answer, and a rule with a gold answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from keel.algorithms.terms import FrozenModel
from keel.data.columns import gold_entries, read_gold
from keel.models.text import split_steps, token_ends
from keel.rewards.registry import RewardContext
from keel.rewards.rules import texts
from keel.types import KeelError

Aggregate = Literal["min", "last", "product", "mean"]
Judged = list[tuple[int, float]]
"""What a process reward says: (index of the step's last token, reward) of each step."""


def on_tokens(
    tokenizer: Any, ids: Sequence[int], text: str, separator: str, rewards: Sequence[float]
) -> Judged:
    """The steps' rewards at the tokens that close them; the last step closes with the answer.

    An answer without any step is one step, with reward 0; one without any token has none.
    """
    if not ids:
        return []
    last = len(ids) - 1
    spans = split_steps(text, separator)
    if not spans:
        return [(last, 0.0)]
    ends = [*token_ends(tokenizer, ids, [end for _, end in spans[:-1]]), last]
    if len(set(ends)) < len(ends):
        raise KeelError(
            f"two steps of {text[:40]!r} end in one token, so they cannot be distinguished: "
            f"choose another separator than {separator!r}"
        )
    return list(zip(ends, rewards, strict=True))


def aggregate(right: Sequence[float], how: Aggregate) -> float:
    """The judgement of a whole answer from the probabilities of its steps being right.

    min: as good as the worst step. last: what is thought at the end. product: that all are right,
    taken as independent. mean. An answer without a step gets 0.
    """
    if not right:
        return 0.0
    if how == "min":
        return min(right)
    if how == "last":
        return right[-1]
    if how == "product":
        return math.prod(right)
    return sum(right) / len(right)


def needs_tokenizer(tokenizer: Any) -> Any:
    """The policy's tokenizer. Raises KeelError if there is none to place steps with."""
    if tokenizer is None:
        raise KeelError("steps end at tokens of a policy, and there is none here")
    return tokenizer


class StepMatchOptions(FrozenModel):
    """The options of `step_match`."""

    separator: str = "\n"
    """Steps stand between separators."""
    strict: bool = True
    """A step counts only if all before it were right: the labels are of a first wrong step."""


def step_match(context: RewardContext, options: StepMatchOptions) -> Callable[..., Any]:
    """A rule that judges an answer step by step against the gold one.

    1 for each step that is the `answer` column's, in its place, and 0 for the others. None if the
    column is empty.
    """
    tokenizer, separator = needs_tokenizer(context.tokenizer), options.separator
    split_steps("", separator)  # refuses a separator that divides nothing, before the run

    def step_match(
        *,
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        answer: Sequence[Any],
    ) -> list[Judged | None]:
        rewards: list[Judged | None] = []
        for text, ids, value in zip(texts(completions), completion_ids, answer, strict=True):
            golds = map(str, gold_entries(read_gold(value)))
            marks = max(
                (_marks(text, gold, separator, options.strict) for gold in golds),
                key=sum,
                default=None,
            )
            judged = None if marks is None else on_tokens(tokenizer, ids, text, separator, marks)
            rewards.append(judged)
        return rewards

    return step_match


def _marks(text: str, gold: str, separator: str, strict: bool) -> list[float]:
    wanted = [gold[a:b].strip() for a, b in split_steps(gold, separator)]
    wanted = [step.removesuffix(separator).strip() for step in wanted]
    marks: list[float] = []
    for number, (a, b) in enumerate(split_steps(text, separator)):
        step = text[a:b].removesuffix(separator).strip()
        fits = number < len(wanted) and step == wanted[number]
        marks.append(float(fits and (not strict or all(marks))))
    # An answer that stops short is wrong at its end.
    if marks and len(marks) < len(wanted):
        marks[-1] = 0.0
    return marks
