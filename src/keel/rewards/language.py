"""The reward of a text in the language that was asked for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from keel.graders.languages import check_language, language_of, language_share
from keel.rewards.context import RewardContext
from keel.rewards.registry import check_column
from keel.rewards.rules import texts
from keel.rewards.validation import Wrong
from keel.types import KeelError


def language(
    around: RewardContext,
    *,
    wanted: str | None = None,
    column: str | None = None,
    share: bool = False,
) -> LanguageReward:
    """Make the reward: `wanted` is an ISO 639-1 code such as "en", `column` a column of them.

    With `share` the reward is the share of the text's letters in sentences of that language.
    Raises KeelError unless exactly one of the first two is given, and where lingua is missing.
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
        # The column is known only now: the scorer asks the signature for it.
        names = ["completions", *([] if column is None else [column])]
        keyword = inspect.Parameter.KEYWORD_ONLY
        self.__signature__ = inspect.Signature([inspect.Parameter(n, keyword) for n in names])

    def __call__(
        self, *, completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | Wrong | None]:
        answers = texts(completions)
        wanted = [self._wanted] * len(answers) if self._column is None else columns[self._column]
        rewards: list[float | Wrong | None] = []
        for text, code in zip(answers, wanted, strict=True):
            if code is None:
                rewards.append(None)
                continue
            try:
                check_language(code)
            except KeelError as error:
                rewards.append(Wrong(str(error)))
                continue
            if self._share:
                rewards.append(language_share(text, code))
            else:
                found = language_of(text)
                rewards.append(None if found is None else float(found == code))
        return rewards
