"""What a recipe asks of its engine, against what the engine can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from keel.config.sampling import SamplingSource
from keel.types import Capabilities, KeelError


@dataclass(frozen=True, slots=True)
class UnmetRequest:
    """A key of the stage whose value the engine cannot serve, why, and what to do."""

    key: str
    value: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value} {self.why}: {self.fix}"


def unmet_requests(asked: SamplingSource, engine: Capabilities) -> Iterator[UnmetRequest]:
    """What a stage asks for and its engine cannot give.

    The one rule: `keel check` makes findings of it, and a stage refuses to start.
    """
    rollout, algorithm = asked.rollout, asked.algorithm
    one_turn = rollout.max_turns == 1 and rollout.program is None
    if rollout.overlap_rewards and one_turn and not engine.streams:
        yield UnmetRequest(
            "rollout.overlap_rewards",
            "true",
            "scores groups while others are sampled, and the engine gives them all at its end",
            "set it to false",
        )
    level = rollout.async_level
    if level and not engine.concurrent:
        yield UnmetRequest(
            "rollout.async_level",
            str(level),
            "does not go with cluster.processes, which sample and train in turn",
            'set it to 0, or cluster.ray = "local", which has processes that sample',
        )
    elif level > 1 and not engine.pins:
        yield UnmetRequest(
            "rollout.async_level",
            str(level),
            "needs an engine that keeps several versions of the weights",
            'set cluster.ray = "local", or rollout.async_level = 1',
        )
    if algorithm is not None and algorithm.correction is None and not engine.exact:
        both = "" if rollout.old_log_probs == "trainer" else ' and old_log_probs = "trainer"'
        yield UnmetRequest(
            "rollout.engine",
            f'"{rollout.engine}"',
            "samples with log-probs that are not quite the trainer's, and nothing corrects for it",
            f'set algorithm.correction.kind = "truncate"{both}, or another engine',
        )


def check_requests(asked: SamplingSource, engine: Capabilities) -> None:
    """Raise KeelError for the first of `unmet_requests`."""
    for one in unmet_requests(asked, engine):
        raise KeelError(str(one))
