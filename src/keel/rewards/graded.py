"""Rewards that are made: of mathematics, of a language, and what a program returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from keel.graders.answers import final_answer
from keel.graders.languages import check_language, language_of, language_share
from keel.graders.mathematics import Mathematics
from keel.rewards.batch import log_summary
from keel.rewards.registry import RewardContext, check_column, keywords
from keel.rewards.rules import Sample, samples, texts
from keel.rewards.validation import Wrong
from keel.types import KeelError


def math(
    context: RewardContext,
    *,
    timeout: float = 5.0,
    workers: int = 2,
    tag: str | None = None,
    evaluated: bool = True,
    strict: bool = True,
) -> MathReward:
    """The reward of a mathematically right answer.

    `timeout` is in seconds for a completion, `workers` processes run at a time. `tag` takes as the
    text what stands in the last `<tag>…</tag>` (without one, 0). With `evaluated`, an answer that
    leaves arithmetic to do (`17 \\times 24`) is not that number. Not `strict`, math-verify reads
    the text and compares, as accuracies are published.
    """
    mathematics = Mathematics(timeout=timeout, workers=workers, evaluated=evaluated, strict=strict)
    return MathReward(mathematics, tag)


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
        log_metric: Callable[[str, float], None] | None = None,
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

        if log_metric is not None:
            log_summary(log_metric, findings, _unfinished)
        if log_extra is not None:
            answers = [final_answer(one.text or "", words=True) for one in found]
            log_extra("extracted", [None if one is None else one.text for one in answers])
        return [one.best(partial(score, one)) for one in found]


def _unfinished(found: Sequence[str]) -> Mapping[str, float]:
    return {"math/timed_out": found.count("timed out"), "math/died": found.count("died")}


def language(
    context: RewardContext,
    *,
    wanted: str | None = None,
    column: str | None = None,
    share: bool = False,
) -> LanguageReward:
    """The reward of a text in the language that was asked for.

    `wanted` is an ISO 639-1 code such as "en", `column` a column of them. With `share` the reward
    is the share of the text's letters in sentences of that language. Raises KeelError unless
    exactly one of the first two is given, and if lingua is missing.
    """
    if (wanted is None) == (column is None):
        raise KeelError("set exactly one of the options wanted and column")
    if column is not None:
        check_column("column", column)
    check_language(wanted or "en")
    return LanguageReward(wanted, column, share)


class LanguageReward:
    """1 if the text is most likely in the wanted language, else 0; its code and formulas aside.

    None if the text shows no language, such as a number, and if the column is empty; `Wrong` if
    the column names no language.
    """

    def __init__(self, wanted: str | None, column: str | None, share: bool) -> None:
        self._wanted, self._column, self._share = wanted, column, share
        self.__signature__ = keywords(["completions", *([] if column is None else [column])])

    def __call__(
        self, *, completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | Wrong | None]:
        answers = texts(completions)
        wanted = [self._wanted] * len(answers) if self._column is None else columns[self._column]
        return list(map(self._score, answers, wanted))

    def _score(self, text: str, code: Any) -> float | Wrong | None:
        if code is None:
            return None
        try:
            check_language(code)
        except KeelError as error:
            return Wrong(str(error))
        if self._share:
            return language_share(text, code)
        found = language_of(text)
        return None if found is None else float(found == code)


def returned(context: RewardContext, *, column: str = "reward") -> ReturnedReward:
    """What `rollout.program` returned with the completion: a number, or this column of a mapping.

    Raises KeelError for a column that no argument can be.
    """
    check_column("column", column)
    return ReturnedReward(column)


class ReturnedReward:
    """The column as it is; None if the program returned none, as one that the budget ended."""

    def __init__(self, column: str) -> None:
        self._column = column
        self.__signature__ = keywords(["completions"], [column])

    def __call__(self, *, completions: Sequence[Any], **columns: Sequence[Any] | None) -> list[Any]:
        values = columns.get(self._column)
        return [None] * len(completions) if values is None else list(values)
