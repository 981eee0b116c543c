"""Returns of the greedy policy, in separate environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.statistics import bootstrap_interval
from keel.config.control import Environment, ReturnEvaluation
from keel.config.fields import derive
from keel.control.collect import ChooseActions, run_episodes
from keel.control.environments import Environments

SIDE_BY_SIDE = 16
"""Most environments that an evaluation steps together."""


def returns_of(
    choose: ChooseActions, environment: Environment, choice: ReturnEvaluation, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return and length of each episode, in the order of their seeds."""
    episodes = choice.episodes
    count = min(episodes, SIDE_BY_SIDE)
    environments = Environments(environment, count, derive(seed, "evaluation"))
    totals, lengths = np.zeros(episodes), np.zeros(episodes, dtype=np.int64)

    def step() -> npt.NDArray[np.bool_]:
        moves = environments.step(choose(environments.observation_EO))
        ended_E = moves.ended_E | (environments.length_E >= choice.longest)
        ended_E &= environments.episode_E >= 0
        for slot in ended_E.nonzero()[0].tolist():
            number = int(environments.episode_E[slot])
            totals[number], lengths[number] = environments.tally(slot)
        return ended_E

    try:
        run_episodes(environments, step, episodes)
    finally:
        environments.close()
    return totals, lengths


def evaluate(
    choose: ChooseActions, environment: Environment, choice: ReturnEvaluation, seed: int
) -> dict[str, Any]:
    """Mean return with its 95 % bootstrap interval, and the return of each episode."""
    totals, lengths = returns_of(choose, environment, choice, seed)
    interval = bootstrap_interval(totals)
    return {
        **interval.as_dict(),
        "kind": "return",
        "returns": totals.tolist(),
        "mean_length": float(lengths.mean()),
    }
