"""What a stage needs of people who label its pairs; `keel.preferences.labeller` provides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from keel.config.judging import JudgingStage
from keel.models.reward import RewardModel
from keel.runs.layout import RunFolder


class PairLabeller(Protocol):
    """Has people label pairs that a stage sampled (`sampled.people`)."""

    def check(self, folder: RunFolder) -> None:
        """Raise KeelError if labels that a stage of the run began with are missing."""

    def label(
        self,
        folder: RunFolder,
        stage: JudgingStage,
        *,
        model: RewardModel,
        encode: Callable[[Any], Any],
        limit: int | None,
        seed: int,
    ) -> str:
        """Write the train rows of a stage: its pool, with the labels of people for some pairs.

        People get the pairs of which `model` is least sure; none is longer than `limit` tokens as
        `encode` makes them. Returns a line on what was labelled. Raises KeelError while people have
        not labelled all that were chosen.
        """
