"""The reward that a program returned with its completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keel.rewards.registry import RewardContext, check_column, keywords


def returned(context: RewardContext, *, column: str = "reward") -> ReturnedReward:
    """What `rollout.program` returned with the completion: a number, or this column of a mapping.

    Raises KeelError for a column that no argument can be.
    """
    check_column("column", column)
    return ReturnedReward(column)


class ReturnedReward:
    """The column as it is; None where the program returned none, as one that the budget ended."""

    def __init__(self, column: str) -> None:
        self._column = column
        self.__signature__ = keywords(["completions"], [column])

    def __call__(self, *, completions: Sequence[Any], **columns: Sequence[Any] | None) -> list[Any]:
        values = columns.get(self._column)
        return [None] * len(completions) if values is None else list(values)
