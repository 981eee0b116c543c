"""Parts of an iteration: by actions, and by whole episodes."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from keel.control.collect import Experience
from keel.learn.batch import Estimates

LENGTHS = (3, 1, 4, 2)
N = sum(LENGTHS)
STARTS = (0, 3, 4, 8)
ESTIMATES = Estimates(torch.arange(N) + 0.1)


def experience(vectors: bool = False) -> Experience:
    """Ten actions of four episodes; every number says which action it is of."""
    n = torch.arange(N)
    return Experience(
        lengths=LENGTHS,
        groups_S=torch.tensor([7, 7, 8, 8]),
        engine_log_prob_N=n + 0.1,
        old_log_prob_N=n + 0.2,
        value_N=n + 0.3,
        observation_NO=torch.stack([n, n + 100], 1).float(),
        action_N=torch.stack([n, -n], 1).float() if vectors else n,
    )


def assert_rows(part: Experience, wanted: list[int], vectors: bool = False) -> None:
    """All that it says of an action is of these ones, in this order."""
    n = torch.tensor(wanted)
    assert torch.equal(part.engine_log_prob_N, n + 0.1)
    for name, more in (("old_log_prob_N", 0.2), ("value_N", 0.3)):
        assert torch.equal(getattr(part, name), n + more)
    assert torch.equal(part.observation_NO, torch.stack([n, n + 100], 1).float())
    assert torch.equal(part.action_N, torch.stack([n, -n], 1).float() if vectors else n)
    absent = {"reference_log_prob_N", "teacher_log_prob_N"}
    assert {f.name for f in fields(part) if getattr(part, f.name) is None} == absent


@pytest.mark.parametrize("vectors", [False, True])
def test_steps_are_chosen_each_for_itself(vectors: bool) -> None:
    part = experience(vectors).minibatch([9, 0, 4], steps=True)
    assert_rows(part, [9, 0, 4], vectors)
    assert part.lengths == (1, 1, 1)
    assert part.sequences == 3


@pytest.mark.parametrize("vectors", [False, True])
def test_episodes_are_chosen_whole(vectors: bool) -> None:
    part = experience(vectors).minibatch([2, 0], steps=False)
    assert_rows(part, [4, 5, 6, 7, 0, 1, 2], vectors)
    assert part.lengths == (4, 3)
    assert part.groups_S.tolist() == [8, 7]


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
