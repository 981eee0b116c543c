"""A rule that judges an answer step by step against the gold one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keel.graders.steps import split_steps
from keel.rewards.context import RewardContext
from keel.rewards.rules import texts
from keel.rewards.step_texts import Judged, needs_tokenizer, on_tokens


def step_match(
    around: RewardContext, *, separator: str = "\n", strict: bool = True
) -> Callable[..., Any]:
    """1 for each step that is the `answer` column's, in its place, and 0 for the others.

    With `strict` a step counts only where all before it were right, so that the labels are those of
    a first wrong step. Steps stand between `separator`s. None where the column is empty.
    """
    tokenizer = needs_tokenizer(around.tokenizer)
    split_steps("", separator)  # refuses a separator that divides nothing, before the run

    def step_match(
        *,
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        answer: Sequence[Any],
    ) -> list[Judged | None]:
        rewards: list[Judged | None] = []
        for text, ids, gold in zip(texts(completions), completion_ids, answer, strict=True):
            if gold is None:
                rewards.append(None)
                continue
            marks = _marks(text, str(gold), separator, strict)
            rewards.append(on_tokens(tokenizer, ids, text, separator, marks))
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
