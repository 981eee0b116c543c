"""The reward of a mathematically right answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keel.graders.mathematics import Mathematics
from keel.rewards.batch import log_summary
from keel.rewards.context import RewardContext
from keel.rewards.rules import stated_texts
from keel.rewards.validation import Wrong


def math(
    around: RewardContext,
    *,
    timeout: float = 5.0,
    workers: int = 2,
    tag: str | None = None,
    evaluated: bool = True,
) -> MathReward:
    """Make the reward; `timeout` seconds for a completion, `workers` processes at a time.

    `tag` takes as the text what stands in the last `<tag>…</tag>` (without one, 0). With
    `evaluated`, an answer that leaves arithmetic to do (`17 \\times 24`) is not that number.
    """
    return MathReward(Mathematics(timeout=timeout, workers=workers, evaluated=evaluated), tag)


class MathReward:
    """1 where the text ends on what is mathematically the `answer` column's answer, else 0.

    None where the column is empty. What cannot be read, or not compared within its time, is 0; how
    many ran out of time or brought their process down is logged. `Wrong` where the column's answer
    cannot be read.
    """

    def __init__(self, mathematics: Mathematics, tag: str | None) -> None:
        self._mathematics = mathematics
        self._tag = tag

    def __call__(
        self,
        *,
        completions: Sequence[Any],
        answer: Sequence[Any],
        prompts: Sequence[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[float | Wrong | None]:
        stated = [text or "" for text in stated_texts(completions, self._tag, prompts)]
        asked = [at for at, gold in enumerate(answer) if gold is not None]
        # An empty answer is compared too: an answer column that cannot be read is always wrong.
        pairs = [(str(answer[at]), stated[at]) for at in asked]
        found = self._mathematics.compare(pairs)
        rewards: list[float | Wrong | None] = [None] * len(stated)
        for at, (gold, _), finding in zip(asked, pairs, found, strict=True):
            if finding == "unreadable gold":
                rewards[at] = Wrong(
                    f"the answer column holds {gold[:60]!r}, which cannot be read: use "
                    "exact_match, or name another column in task.answer"
                )
            else:
                rewards[at] = float(finding == "same")
        if log_metric is not None:
            log_summary(log_metric, found, _ended)
        return rewards

    def abandon(self) -> None:
        """End the calls under way, of which nothing is expected any more."""
        self._mathematics.abandon()

    def close(self) -> None:
        """End the worker processes."""
        self._mathematics.close()


def _ended(found: Sequence[str]) -> Mapping[str, float]:
    """How many comparisons came to no end."""
    return {"math/timed_out": found.count("timed out"), "math/died": found.count("died")}
