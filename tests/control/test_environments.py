"""Copies of environments: transitions, seeds, replays, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium.spaces import Discrete

from keel.config.control import Environment
from keel.control.environments import Environments
from keel.control.learner import ChooseActions, collect_episodes, collect_steps
from keel.types import KeelError
from tests.control import worlds

SEED = 11
Rows = npt.NDArray[np.float32]


@contextmanager
def opened(
    name: str = worlds.COUNTER,
    count: int = 3,
    *,
    seed: int = SEED,
    group: int = 1,
    **options: Any,
) -> Iterator[Environments]:
    choice = Environment(id=name, count=count, options=options)
    environments = Environments(choice, count, seed, group)
    try:
        yield environments
    finally:
        environments.close()


def false_ones(before_NO: Rows, after_NO: Rows) -> int:
    """Transitions of a Counter that no environment made."""
    other_episode_N = before_NO[:, 0] != after_NO[:, 0]
    other_step_N = after_NO[:, 1] != before_NO[:, 1] + 1
    return int((other_episode_N | other_step_N).sum())


# ---------------------------------------------------------------- seeds


def marks(count: int, episodes: int, *, seed: int = SEED, group: int = 1) -> list[int]:
    """The marks of an iteration's episodes, in order of their numbers."""
    with opened(count=count, seed=seed, group=group) as environments:
        collected = collect_episodes(environments, worlds.choose_all, episodes)
    assert collected.episode_S.tolist() == list(range(episodes))
    first_S = np.cumsum(collected.lengths) - np.array(collected.lengths)
    return [int(m) for m in collected.observation_NO[first_S, 0]]


def test_an_episodes_seed_depends_on_its_number_only() -> None:
    wanted = [worlds.mark_of(SEED, number) for number in range(12)]
    assert len(set(wanted)) == 12
    for count in (1, 2, 5, 12, 20):
        assert marks(count, 12) == wanted
    assert not set(marks(5, 12, seed=SEED + 1)) & set(wanted)


def test_groups_share_the_start_state() -> None:
    shown = marks(5, 12, group=4)
    assert shown == [worlds.mark_of(SEED, n, 4) for n in range(12)]
    assert [len(set(shown[at : at + 4])) for at in (0, 4, 8)] == [1, 1, 1]
    assert len(set(shown)) == 3


# ---------------------------------------------------------------- replays


def there_and_back(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint holds it."""
    out: dict[str, Any] = json.loads(json.dumps(state))
    return out


def assert_same(
    left: Environments, right: Environments, choose: ChooseActions, times: int = 12
) -> None:
    """Both are in one place, and stay so."""
    assert left.begun == right.begun
    assert left.episode_E.tolist() == right.episode_E.tolist()
    slots = range(left.count)
    assert [left.episode(slot) for slot in slots] == [right.episode(slot) for slot in slots]
    assert there_and_back(left.state()) == there_and_back(right.state())
    if left.begun == 0 or (left.episode_E < 0).any():
        one, two = (collect_episodes(e, choose, 4) for e in (left, right))
    else:
        one, two = (collect_steps(e, choose, times) for e in (left, right))
    for name in ("observation_NO", "action_N", "reward_N", "episode_S", "last_state_SO"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_restore_leads_to_the_same_place() -> None:
    """Times chosen so that episodes under way have all kinds of lengths, 0 among them."""
    ragged: set[tuple[int, ...]] = set()
    for times in range(1, 25):
        with opened(longest=9) as first, opened(longest=9) as second:
            collect_steps(first, worlds.choose_all, times)
            lengths = tuple(first.episode(slot).length for slot in range(3))
            ragged.add(tuple(sorted(lengths)))
            assert second.restore(there_and_back(first.state()))
            assert_same(first, second, worlds.choose_all)
    assert len(ragged) > 5
    assert any(0 in lengths and max(lengths) > 4 for lengths in ragged)


def test_restore_of_copies_at_rest_and_before_the_start() -> None:
    with opened(count=4) as first, opened(count=4) as second, opened(count=4) as third:
        assert third.restore(there_and_back(second.state()))
        assert_same(second, third, worlds.choose_all)
        collect_episodes(first, worlds.choose_all, 6)
        assert (first.episode_E < 0).all()
        assert second.restore(there_and_back(first.state()))
        assert_same(first, second, worlds.choose_all)
        # One at work among others at rest, which may end and begin again meanwhile.
        first.begin([1])
        for _ in range(first.vector.envs[1].unwrapped.length - 1):  # type: ignore[attr-defined]
            first.step(worlds.choose_all(first.observation_EO))
        assert third.restore(there_and_back(first.state()))
        assert_same(first, third, worlds.choose_all)


def test_restore_says_when_it_led_elsewhere() -> None:
    with opened(worlds.DRIFTER) as first, opened(worlds.DRIFTER) as second:
        collect_steps(first, worlds.choose_all, 7)
        assert not second.restore(there_and_back(first.state()))


# ---------------------------------------------------------------- spaces


def test_discrete_actions_count_from_their_start() -> None:
    with opened(worlds.SHIFTED) as environments:
        assert environments.actions == Discrete(3)
        environments.begin(range(3))
        moves = environments.step(np.array([0, 1, 2]))
        assert moves.observation_EO[:, 0].tolist() == [5, 6, 7]
        assert environments.state()["actions"] == [[0], [1], [2]]


def test_real_actions_are_cut_at_the_bounds() -> None:
    with opened(worlds.REACH) as environments:
        assert environments.actions.shape == (2,)
        environments.begin(range(3))
        action_E2 = np.array([[3, 3], [-3, -3], [0.5, -0.5]], dtype=np.float32)
        moves = environments.step(action_E2)
        wanted = [[1.0, 0.25], [-0.5, -2.0], [0.5, -0.5]]
        assert moves.observation_EO.tolist() == wanted
        # The policy is judged by what it drew.
        assert environments.state()["actions"] == [[row] for row in action_E2.tolist()]


def test_dictionaries_and_numbers_become_vectors() -> None:
    with opened(worlds.PARTS, 2) as environments, opened(worlds.NUMBERED, 1) as numbered:
        assert environments.observation_size == 6
        environments.begin([0, 1])
        assert environments.observation_EO.tolist() == [[1, 0, 0, 0, 0, 0]] * 2
        moves = environments.step(np.array([0, 0]))
        assert moves.observation_EO.tolist() == [[0, 1, 0, 0, 0.25, 0.25]] * 2
        assert numbered.observation_size == 4
        numbered.begin([0])
        numbered.step(np.array([0]))
        assert numbered.observation_EO.tolist() == [[0, 1, 0, 0]]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("NoSuchThing-v0", {}, "NoSuchThing"),
        ("no_such_module:Thing-v0", {}, "no_such_module"),
        ("not an id", {}, "not an id"),
        (worlds.COUNTER, {"speed": 3}, "speed"),
        (worlds.LEVERS, {}, "MultiDiscrete"),
        (worlds.SEQUENCES, {}, "Sequence"),
        (worlds.STRANGE, {}, "Own()"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(KeelError) as caught:
        Environments(Environment(id=name, options=options), 1, SEED)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
