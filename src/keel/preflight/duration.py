"""How long a stage will take, from what a check has timed."""

from __future__ import annotations

from dataclasses import dataclass

from keel.config.stage import StageConfig

DISK_BYTES = 300e6
"""Written, read again for the checksum and synced in a second."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one step, and of a checkpoint.

    `measuring` and `learning` are those of its tokens before the first update and in one pass over
    them; `sampling` and `scoring` those of its `sequences` (0 where nothing is sampled). An
    evaluation is of `evaluated` prompts.
    """

    measuring: float
    learning: float
    checkpoint: float
    sequences: int = 0
    sampling: float = 0.0
    scoring: float = 0.0
    evaluated: int = 0


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds of a stage, by what they go into."""

    parts: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.parts)

    def cost(self, price: float) -> float:
        """At a price for an hour."""
        return self.seconds / 3600 * price


def stage_duration(stage: StageConfig, timed: Timed) -> Duration:
    """The seconds of a whole stage whose steps are as the one that was timed.

    Left out are loading, evaluations on preference data, and what longer answers would take.
    """
    parts = {
        "sampling": timed.sampling * stage.steps,
        "scoring": timed.scoring * stage.steps,
        "measuring": timed.measuring * stage.steps,
        "learning": timed.learning * stage.passes * stage.steps,
        "evaluation": _evaluation(stage, timed),
        "checkpoints": timed.checkpoint * checkpoints_of(stage),
    }
    return Duration(tuple((name, seconds) for name, seconds in parts.items() if seconds))


def evaluations_of(stage: StageConfig) -> int:
    """How often a stage evaluates, if it does: before, every so many steps, and after."""
    every = stage.evaluation_interval
    if every is None:
        return 0
    return 2 + ((stage.steps - 1) // every if every else 0)


def checkpoints_of(stage: StageConfig) -> int:
    """How many checkpoints a stage leaves: every so many steps, and at the end."""
    return (stage.steps - 1) // stage.checkpoints.every + 1


def _evaluation(stage: StageConfig, timed: Timed) -> float:
    evaluation = None if stage.sampling is None else stage.sampling.evaluation
    if evaluation is None:
        return 0.0
    answers = timed.evaluated * (1 + evaluation.samples)
    one = (timed.sampling + timed.scoring) / max(timed.sequences, 1)
    return one * answers * evaluations_of(stage)
