"""Rewards by graders that need a process or a library: mathematics and language."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keel.graders.answers import final_answer
from keel.graders.languages import check_language, language_of, language_share
from keel.graders.mathematics import Mathematics
from keel.rewards.batch import log_summary
from keel.rewards.registry import RewardContext, check_column, keywords
from keel.rewards.rules import any_gold, question_texts, stated_texts, texts
from keel.rewards.validation import Wrong
from keel.types import KeelError


def math(
    context: RewardContext,
    *,
    timeout: float = 5.0,
    workers: int = 2,
    tag: str | None = None,
    evaluated: bool = True,
) -> MathReward:
    """The reward of a mathematically right answer.

    `timeout` is in seconds for a completion, `workers` processes run at a time. `tag` takes as the
    text what stands in the last `<tag>…</tag>` (without one, 0). With `evaluated`, an answer that
    leaves arithmetic to do (`17 \\times 24`) is not that number.
    """
    return MathReward(Mathematics(timeout=timeout, workers=workers, evaluated=evaluated), tag)


class MathReward:
    """1 where the text ends on what is mathematically the `answer` column's answer, else 0.

    None where the column is empty. What cannot be read, or not compared within its time, is 0; how
    many ran out of time or brought their process down is logged, and as `extracted` what each text
    ends on. `Wrong` where the column's answer
    cannot be read.
    """

    def __init__(self, mathematics: Mathematics, tag: str | None) -> None:
        self._mathematics = mathematics
        self._tag = tag
        self.abandon = mathematics.abandon
        self.close = mathematics.close

    @any_gold
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
        every = stated_texts(completions, self._tag, prompts, openings)
        stated = [text or "" for text in every]
        compared = [at for at, gold in enumerate(answer) if gold is not None]
        # An empty text is compared too: an answer column that cannot be read is always wrong.
        asked = [""] * len(stated) if prompts is None else question_texts(prompts)
        pairs = [(str(answer[at]), stated[at], asked[at]) for at in compared]
        found = self._mathematics.compare(pairs)
        rewards: list[float | Wrong | None] = [None] * len(stated)
        for at, (gold, *_), finding in zip(compared, pairs, found, strict=True):
            if finding == "unreadable gold":
                rewards[at] = Wrong(
                    f"the answer column holds {gold[:60]!r}, which cannot be read: use "
                    "exact_match, or name another column in task.answer"
                )
            else:
                rewards[at] = float(finding == "same")
        if log_metric is not None:
            log_summary(log_metric, found, _unfinished)
        if log_extra is not None:
            answers = [final_answer(text, words=True) for text in stated]
            log_extra("extracted", [None if one is None else one.text for one in answers])
        return rewards


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
    exactly one of the first two is given, and where lingua is missing.
    """
    if (wanted is None) == (column is None):
        raise KeelError("set exactly one of the options wanted and column")
    if column is not None:
        check_column("column", column)
    check_language(wanted or "en")
    return LanguageReward(wanted, column, share)


class LanguageReward:
    """1 where the text is most likely in the wanted language, else 0; its code and formulas aside.

    None where the text shows no language, such as a number, and where the column is empty; `Wrong`
    where the column names no language.
    """

    def __init__(self, wanted: str | None, column: str | None, share: bool) -> None:
        self._wanted, self._column, self._share = wanted, column, share
        self.__signature__ = keywords(["completions", *([] if column is None else [column])])

    def __call__(
        self, *, completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | Wrong | None]:
        answers = texts(completions)
        wanted = [self._wanted] * len(answers) if self._column is None else columns[self._column]
        return [self._score(text, code) for text, code in zip(answers, wanted, strict=True)]

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
