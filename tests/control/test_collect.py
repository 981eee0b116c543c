"""Iterations and evaluations against plain loops over single environments; mini-batches."""

from __future__ import annotations

from dataclasses import fields
from itertools import chain

import numpy as np
import numpy.typing as npt
import pytest
import torch

from keel.config.control import Environment, Network, ReturnEvaluation
from keel.config.fields import derive
from keel.control.learner import (
    SIDE_BY_SIDE,
    Collected,
    Experience,
    collect_episodes,
    collect_steps,
    evaluate,
    greedy,
    returns_of,
    sampling,
)
from keel.control.networks import Categorical
from keel.learn.batch import Estimates
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
    # Rewards are added in order of time on both sides.
    assert collected.finished == [
        (sum(s.reward for s in episode), len(episode), episode[0].episode) for episode in ended
    ]


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
            numbers = [episode.number for episode in collected.finished]
            assert sorted(numbers) == sorted(by_number)
            assert_finished(collected, [by_number[n] for n in numbers])
            assert (environments.episode_E < 0).all()


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


LENGTHS = (3, 1, 4, 2)
N = sum(LENGTHS)
STARTS = (0, 3, 4, 8)
ESTIMATES = Estimates(torch.arange(N) + 0.1)


def experience() -> Experience:
    """Ten actions of four episodes; every number says which action it is of."""
    n = torch.arange(N)
    return Experience(
        lengths=LENGTHS,
        groups=(7, 7, 8, 8),
        engine_log_prob_N=n + 0.1,
        old_log_prob_N=n + 0.2,
        value_N=n + 0.3,
        observation_NO=torch.stack([n, n + 100], 1).float(),
        action_N=n,
    )


def assert_rows(part: Experience, wanted: list[int]) -> None:
    """All that it says of an action is of these ones, in this order."""
    n = torch.tensor(wanted)
    assert torch.equal(part.engine_log_prob_N, n + 0.1)
    for name, more in (("old_log_prob_N", 0.2), ("value_N", 0.3)):
        assert torch.equal(getattr(part, name), n + more)
    assert torch.equal(part.observation_NO, torch.stack([n, n + 100], 1).float())
    assert torch.equal(part.action_N, n)
    absent = {"reference_log_prob_N", "teacher_log_prob_N", "old_entropy_N", "old_squares_N"}
    absent |= {"anchor_N"}
    assert {f.name for f in fields(part) if getattr(part, f.name) is None} == absent


def test_episodes_are_chosen_whole() -> None:
    part = experience().minibatch([2, 0], steps=False)
    assert_rows(part, [4, 5, 6, 7, 0, 1, 2])
    assert part.lengths == (4, 3)
    assert part.groups == (8, 7)


@pytest.mark.parametrize("count", [3, 10])
@pytest.mark.parametrize("steps", [True, False])
def test_parts_cover_everything_once(steps: bool, count: int) -> None:
    every = experience()
    pairs = list(every.split(ESTIMATES, count, np.random.default_rng(1), steps=steps))
    parts = [part for part, _ in pairs]
    for part, estimates in pairs:
        assert torch.equal(estimates.advantage_N, part.engine_log_prob_N)
    assert len(parts) == min(count, N if steps else len(LENGTHS))
    seen = [part.action_N.tolist() for part in parts]
    assert sorted(n for numbers in seen for n in numbers) == list(range(N))
    for part, numbers in zip(parts, seen, strict=True):
        assert_rows(part, numbers)
        if steps:
            assert part.lengths == (1,) * len(numbers)
            continue
        at = 0
        for length in part.lengths:  # each is one whole episode, in order of time
            start = STARTS.index(numbers[at])
            assert length == LENGTHS[start]
            assert numbers[at : at + length] == list(range(STARTS[start], STARTS[start] + length))
            at += length
    sizes = [len(part.action_N) if steps else part.sequences for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_the_order_is_random_and_follows_from_the_generator() -> None:
    every = experience()

    def order(seed: int) -> list[int]:
        parts = every.split(ESTIMATES, 2, np.random.default_rng(seed), steps=True)
        return [n for part, _ in parts for n in part.action_N.tolist()]

    assert order(1) == order(1) != order(2)
    assert order(1) != sorted(order(1))
