"""Evaluation: the episodes of its own seeds, each once, whatever else runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from keel.config.control import Environment, ReturnEvaluation
from keel.config.fields import derive
from keel.control.evaluate import SIDE_BY_SIDE, evaluate, returns_of
from tests.control import worlds

SEED = 4


@pytest.mark.parametrize("episodes", [1, 3, SIDE_BY_SIDE + 9])
@pytest.mark.parametrize("name", [worlds.COUNTER, "CartPole-v1"])
def test_returns_are_those_of_a_plain_loop(name: str, episodes: int) -> None:
    totals, lengths = returns_of(
        worlds.choose_all, Environment(id=name), ReturnEvaluation(episodes=episodes), SEED
    )
    plain = worlds.plain_episodes(name, derive(SEED, "evaluation"), 0, episodes)
    assert lengths.tolist() == [len(steps) for steps in plain]
    # Added in order of time on both sides.
    assert totals.tolist() == [sum(step.reward for step in steps) for steps in plain]
    assert episodes < 3 or len(set(lengths.tolist())) > 1


def test_the_mean_and_its_interval_are_of_every_episode() -> None:
    result = evaluate(
        worlds.choose_all, Environment(id=worlds.COUNTER), ReturnEvaluation(episodes=20), SEED
    )
    totals, lengths = returns_of(
        worlds.choose_all, Environment(id=worlds.COUNTER), ReturnEvaluation(episodes=20), SEED
    )
    assert result["returns"] == totals.tolist()
    assert result["mean"] == pytest.approx(np.mean(totals), abs=1e-12)
    assert result["mean_length"] == pytest.approx(np.mean(lengths), abs=1e-12)
    assert result["low"] < result["mean"] < result["high"]
    assert result["kind"] == "return"


def test_endless_episode_is_cut_and_counted() -> None:
    """CliffWalking has no time limit, and always going up leads nowhere: −1 a step."""
    choice = ReturnEvaluation(episodes=3, longest=50)

    def up(observation_EO: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        return np.zeros(len(observation_EO), dtype=np.int64)

    totals, lengths = returns_of(up, Environment(id="CliffWalking-v1"), choice, SEED)
    assert lengths.tolist() == [50, 50, 50]
    assert totals.tolist() == [-50.0, -50.0, -50.0]
