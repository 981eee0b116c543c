"""Iterations against plain loops over single environments, and what ends an episode's part."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from keel.config.control import Network
from keel.control.actor import Categorical
from keel.control.collect import (
    BLOCK,
    Collected,
    collect_episodes,
    collect_steps,
    greedy,
    sampling,
)
from tests.control import worlds
from tests.control.test_environments import SEED, opened
from tests.control.worlds import Step

ENVIRONMENTS = [worlds.COUNTER, "CartPole-v1"]


def by_episode(rows: list[list[Step]]) -> list[list[Step]]:
    """The rows' steps, episode by episode."""
    episodes: dict[int, list[Step]] = {}
    for step in chain.from_iterable(rows):
        episodes.setdefault(step.episode, []).append(step)
    return [episodes[number] for number in sorted(episodes)]


def assert_is(collected: Collected, parts: list[list[Step]]) -> None:
    """What was collected is these parts of episodes, bit for bit."""
    steps = list(chain.from_iterable(parts))
    np.testing.assert_array_equal(collected.observation_NO, [s.observation for s in steps])
    np.testing.assert_array_equal(collected.action_N, [s.action for s in steps])
    np.testing.assert_array_equal(collected.reward_N, [s.reward for s in steps])
    assert collected.lengths == tuple(len(part) for part in parts)
    assert collected.episode_S.tolist() == [part[0].episode for part in parts]
    np.testing.assert_array_equal(collected.last_state_SO, [part[-1].after for part in parts])
    assert collected.terminated_S.tolist() == [part[-1].terminated for part in parts]


def assert_finished(collected: Collected, ended: list[list[Step]]) -> None:
    """The episodes that ended, in the order in which they did."""
    finished = collected.finished
    assert finished.numbers.tolist() == [episode[0].episode for episode in ended]
    assert finished.lengths.tolist() == [len(episode) for episode in ended]
    # Rewards are added in order of time on both sides.
    assert finished.returns.tolist() == [sum(s.reward for s in episode) for episode in ended]


# ---------------------------------------------------------------- against plain loops


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("count", [1, 3])
def test_steps_are_those_of_a_plain_loop(name: str, count: int) -> None:
    iterations = (13, 1, 160)
    rows = worlds.plain_steps(name, SEED, count, sum(iterations))
    whole = {episode[0].episode: episode for episode in by_episode(rows)}
    done = 0
    with opened(name, count) as environments:
        for times in iterations:
            collected = collect_steps(environments, worlds.choose_all, times)
            some = rows[done : done + times]
            assert_is(collected, by_episode(some))
            ended = [whole[s.episode] for row in some for s in row if s.ended]
            assert_finished(collected, ended)
            done += times
    assert len(whole) > 2 * count


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("count", [1, 4, 9])
def test_episodes_are_those_of_a_plain_loop(name: str, count: int) -> None:
    with opened(name, count) as environments:
        for first, many in ((0, 7), (7, 1), (8, 9)):
            collected = collect_episodes(environments, worlds.choose_all, many)
            episodes = worlds.plain_episodes(name, SEED, first, many)
            assert_is(collected, episodes)
            by_number = {episode[0].episode: episode for episode in episodes}
            assert sorted(collected.finished.numbers) == sorted(by_number)
            assert_finished(collected, [by_number[n] for n in collected.finished.numbers.tolist()])
            assert (environments.episode_E < 0).all()


# ---------------------------------------------------------------- what ends a part


def iterations(times: int, many: int, **options: Any) -> list[Collected]:
    """Iterations of one Counter."""
    with opened(count=1, **options) as environments:
        return [collect_steps(environments, worlds.choose_all, times) for _ in range(many)]


@pytest.mark.parametrize(
    ("ending", "terminated"), [("terminated", True), ("truncated", False), ("both", True)]
)
def test_an_episode_over_three_iterations(ending: str, terminated: bool) -> None:
    first, second, third = iterations(3, 3, length=7, ending=ending)
    for part, count in ((first, 3), (second, 6)):
        assert part.lengths == (3,)
        assert part.episode_S.tolist() == [0]
        assert part.terminated_S.tolist() == [False]  # cut by the end of the iteration
        assert part.last_state_SO[:, 1].tolist() == [count]
        assert len(part.finished.numbers) == 0
    assert third.lengths == (1, 2)
    assert third.episode_S.tolist() == [0, 1]
    assert third.terminated_S.tolist() == [terminated, False]
    # After the end lies the state that was reached, not the next episode's first.
    assert third.last_state_SO.tolist() == [
        [worlds.mark_of(SEED, 0), 7],
        [worlds.mark_of(SEED, 1), 2],
    ]
    assert third.finished.numbers.tolist() == [0]
    assert third.finished.lengths.tolist() == [7]  # all of it, not this iteration's part
    assert third.finished.returns[0] > sum(range(1, 8)) - 1


def test_buffers_grow() -> None:
    length = 2 * BLOCK + 5
    with opened(count=2, length=length) as environments:
        collected = collect_episodes(environments, worlds.choose_all, 3)
    assert_is(collected, worlds.plain_episodes(worlds.COUNTER, SEED, 0, 3, length=length))


# ---------------------------------------------------------------- draws


def test_draws_follow_from_the_generator_and_see_normal_observations() -> None:
    seen: list[npt.NDArray[np.float32]] = []

    def normal(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        seen.append(x)
        return x + 1

    actor = Categorical(2, 5, Network(hidden=(4,)), seed=1)
    observation = np.zeros((3, 2), dtype=np.float32)
    once, again = [
        sampling(actor, normal, np.random.default_rng(4), 3)(observation) for _ in range(2)
    ]
    np.testing.assert_array_equal(once, again)
    best = greedy(actor, normal)(observation)
    with torch.no_grad():
        logits = actor(torch.ones(3, 2))
    assert best.tolist() == logits.argmax(-1).tolist()
    assert len(seen) == 3
