"""Rewards that are made: of mathematics, of a language, and what a program returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import model_validator

from keel.algorithms.terms import FrozenModel
from keel.config.fields import Count, Seconds
from keel.graders.answers import final_answer
from keel.graders.languages import check_language, language_of, language_share
from keel.graders.mathematics import Mathematics
from keel.rewards.outputs import Summary, Wrong
from keel.rewards.registry import Column, RewardContext, with_arguments
from keel.rewards.rules import Sample, samples, texts
from keel.types import KeelError


class MathOptions(FrozenModel):
    """The options of `math`."""

    timeout: Seconds = 5.0
    """Seconds for a completion."""
    workers: Count = 2
    """Processes that run at a time."""
    tag: str | None = None
    """The text is what stands in the last `<tag>…</tag>` (without one, 0)."""
    evaluated: bool = True
    """An answer that leaves arithmetic to do (`17 \\times 24`) is not that number."""
    strict: bool = True
    """False: math-verify reads the text and compares, as accuracies are published."""


def math(context: RewardContext, options: MathOptions) -> MathReward:
    """The reward of a mathematically right answer."""
    return MathReward(Mathematics(**options.model_dump(exclude={"tag"})), options.tag)


class MathReward:
    """1 if the text ends on what is mathematically the `answer` column's answer, else 0.

    None if the column is empty, and `Wrong` if its answer cannot be read. What cannot be read, or
    not compared within its time, is 0; the number that ran out of time or brought their process
    down is logged, and as `extracted` what each text ends on.
    """

    def __init__(self, mathematics: Mathematics, tag: str | None) -> None:
        self._mathematics = mathematics
        self._tag = tag
        self.abandon = mathematics.abandon
        self.close = mathematics.close

    def __call__(
        self,
        *,
        completions: Sequence[Any],
        answer: Sequence[Any],
        prompts: Sequence[Any] | None = None,
        openings: Sequence[str] | None = None,
        log_summary: Callable[[Sequence[Any], Summary], None] | None = None,
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
    ) -> list[float | Wrong | None]:
        found = samples(completions, answer, self._tag, openings, prompts)
        # An empty text is compared too: an answer column that cannot be read is always wrong.
        pairs = [(gold, one.text or "", one.question) for one in found for gold in one.golds]
        findings = self._mathematics.compare(pairs)
        known = dict(zip(pairs, findings, strict=True))

        def score(one: Sample, gold: str) -> float | Wrong:
            finding = known[gold, one.text or "", one.question]
            if finding == "unreadable gold":
                return Wrong(
                    f"the answer column holds {gold[:60]!r}, which cannot be read: use "
                    "exact_match, or name another column in task.answer"
                )
            return float(finding == "same")

        if log_summary is not None:
            log_summary(findings, _unfinished)
        if log_extra is not None:
            answers = [final_answer(one.text or "", words=True) for one in found]
            log_extra("extracted", [None if one is None else one.text for one in answers])
        return [one.best(partial(score, one)) for one in found]


def _unfinished(found: Sequence[str]) -> Mapping[str, float]:
    return {"math/timed_out": found.count("timed out"), "math/died": found.count("died")}


class LanguageOptions(FrozenModel):
    """The options of `language`."""

    wanted: str | None = None
    """The code of the language (ISO 639-1), such as "en"."""
    column: Column | None = None
    """The column with such a code."""
    share: bool = False
    """The reward is the share of the text's letters in sentences of that language."""

    @model_validator(mode="after")
    def _one_of_two(self) -> LanguageOptions:
        if (self.wanted is None) == (self.column is None):
            raise ValueError("set exactly one of the options wanted and column")
        return self


def language(context: RewardContext, options: LanguageOptions) -> Callable[..., Any]:
    """The reward of a text in the language that was asked for.

    1 if the text is most likely in it, else 0; its code and formulas aside. None if the text shows
    no language, such as a number, and if the column is empty; `Wrong` if the column names no
    language. Raises KeelError if lingua is missing.
    """
    check_language(options.wanted or "en")

    def score(text: str, code: Any) -> float | Wrong | None:
        if code is None:
            return None
        try:
            check_language(code)
        except KeelError as error:
            return Wrong(str(error))
        if options.share:
            return language_share(text, code)
        found = language_of(text)
        return None if found is None else float(found == code)

    def language(
        *, completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | Wrong | None]:
        answers = texts(completions)
        wanted = columns[options.column] if options.column else [options.wanted] * len(answers)
        return list(map(score, answers, wanted))

    return with_arguments(language, ["completions", *([options.column] if options.column else [])])


class ReturnedOptions(FrozenModel):
    """The options of `returned`."""

    column: Column = "reward"
    """The column of what the program returned."""


def returned(context: RewardContext, options: ReturnedOptions) -> Callable[..., Any]:
    """What `rollout.program` returned with the completion: a number, or this column of a mapping.

    None if the program returned none, as one that the budget ended.
    """

    def returned(*, completions: Sequence[Any], **columns: Sequence[Any] | None) -> list[Any]:
        return list(columns.get(options.column) or [None] * len(completions))

    return with_arguments(returned, ["completions"], [options.column])
