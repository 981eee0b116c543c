"""The memory: what it keeps, what it draws, and windows of n steps, against a plain list."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch

from keel.control.q_learning import Replay, Transitions


@dataclass(frozen=True)
class FrozenModel:
    """One step of one environment; its number is its observation, and one more what comes after."""

    number: int
    action: int
    reward: float
    terminated: bool
    truncated: bool


def filled(
    times: int, count: int, capacity: int, *, end: float = 0.0, seed: int = 0
) -> tuple[Replay, list[list[FrozenModel]]]:
    """A memory after so many times, and all that went in, a column an environment."""
    rng = np.random.default_rng(seed)
    replay = Replay(capacity, count, 1)
    columns: list[list[FrozenModel]] = [[] for _ in range(count)]
    for t in range(times):
        rows = [
            FrozenModel(
                number=1000 * e + 2 * t,
                action=int(rng.integers(4)),
                reward=float(rng.integers(1, 100)),
                terminated=bool(rng.random() < end / 2),
                truncated=bool(rng.random() < end / 2),
            )
            for e in range(count)
        ]
        for column, row in zip(columns, rows, strict=True):
            column.append(row)
        numbers = np.array([[row.number] for row in rows], dtype=np.float32)
        replay.add(
            numbers,
            np.array([row.action for row in rows]),
            np.array([row.reward for row in rows]),
            np.array([row.terminated for row in rows]),
            np.array([row.truncated for row in rows]),
            numbers + 1,
        )
    return replay, columns


def window(column: list[FrozenModel], at: int, horizon: int) -> list[FrozenModel]:
    """From a row on: up to `horizon` rows, no further than an end or the newest."""
    out: list[FrozenModel] = []
    for row in column[at : at + horizon]:
        out.append(row)
        if row.terminated or row.truncated:
            break
    return out


# ---------------------------------------------------------------- what is there


def test_the_oldest_is_overwritten() -> None:
    replay, columns = filled(7, 2, 10)
    assert len(replay) == 10
    kept = sorted(row.number for column in columns for row in column[-5:])
    assert sorted(replay.observation_TEO.reshape(-1).tolist()) == kept
    assert len(filled(3, 2, 10)[0]) == 6
    # A capacity that is not a multiple of the environments is rounded down, never up.
    assert len(filled(9, 2, 11)[0]) == 10


@pytest.mark.parametrize(("times", "horizon"), [(3, 1), (13, 1), (13, 3)])
def test_draws_are_uniform_over_what_is_there(times: int, horizon: int) -> None:
    replay, columns = filled(times, 3, 15, end=0.3)
    there = sorted(row.number for column in columns for row in column[-5:])
    draws = 1000 * len(there)
    drawn = replay.sample(draws, horizon, np.random.default_rng(3))
    numbers, counts = np.unique(drawn.observation_BO[:, 0].numpy(), return_counts=True)
    assert numbers.tolist() == there
    chi_square = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    # The 0.999 quantiles for 8 and for 14 degrees of freedom.
    assert chi_square < {9: 26.12, 15: 36.12}[len(there)]


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("times", [1, 4, 6, 7, 9, 12, 26])  # not full, just full, wrapped
@pytest.mark.parametrize("horizon", [1, 2, 3, 6, 8])
def test_windows_are_those_of_a_plain_list(count: int, times: int, horizon: int) -> None:
    replay, columns = filled(times, count, 6 * count, end=0.25, seed=times)
    drawn = replay.sample(200, horizon, np.random.default_rng(times))
    seen: set[int] = set()
    for b in range(200):
        number = int(drawn.observation_BO[b, 0])
        seen.add(number)
        wanted = window(columns[number // 1000], number % 1000 // 2, horizon)
        steps = int(drawn.steps_B[b])
        assert steps == len(wanted)
        assert drawn.action_B[b] == wanted[0].action
        assert drawn.reward_BK[b, :steps].tolist() == [row.reward for row in wanted]
        terminated = [row.terminated for row in wanted]
        assert drawn.terminated_BK[b, :steps].tolist() == terminated
        assert drawn.next_observation_BO[b, 0] == wanted[-1].number + 1
    assert len(seen) == min(times, 6) * count  # every row was looked at
    assert drawn.reward_BK.shape == (200, horizon)


# ---------------------------------------------------------------- to the disk and back


def same(left: Transitions, right: Transitions) -> bool:
    pairs = ((getattr(left, f.name), getattr(right, f.name)) for f in fields(Transitions))
    return all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("times", [3, 6, 17])
def test_what_is_restored_draws_the_same(times: int) -> None:
    replay, _ = filled(times, 2, 12, end=0.2)
    saved = {name: tensor.clone() for name, tensor in replay.tensors().items()}
    assert {len(tensor) for tensor in saved.values()} == {min(times, 6)}
    other = Replay(12, 2, 1)
    other.restore(saved, replay.written)
    assert len(other) == len(replay)
    for memory in (replay, other):  # and goes on alike
        more = np.array([[5000.0], [6000.0]], dtype=np.float32)
        no = np.array([False, False])
        memory.add(more, np.array([1, 2]), np.array([0.5, 0.25]), no, no, more + 1)
    for horizon in (1, 3):
        one, two = (m.sample(50, horizon, np.random.default_rng(9)) for m in (replay, other))
        assert same(one, two)
        assert not same(one, replay.sample(50, horizon, np.random.default_rng(10)))
