"""Returns, Q-learning targets and losses."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.objective import background
from tests.objective import loops

Q = torch.tensor([[1.0, 3.0, 2.0], [0.5, -1.0, 0.0]], dtype=torch.float64)
REWARD = torch.tensor([1.0, -1.0], dtype=torch.float64)


def test_state_value_is_the_expectation_of_q() -> None:
    policy = torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float64)
    loops.close(background.state_value(policy, Q), [0.2 + 0.9 + 1.0, -1.0])


def test_epsilon_greedy() -> None:
    policy = background.epsilon_greedy(Q, epsilon=0.3)
    loops.close(policy, torch.tensor([[0.1, 0.8, 0.1], [0.8, 0.1, 0.1]], dtype=torch.float64))
    loops.close(policy.sum(-1), [1.0, 1.0])
    tie = torch.zeros(1, 4, dtype=torch.float64)
    assert background.epsilon_greedy(tie, epsilon=0.0).tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_terminal_transitions_do_not_bootstrap_and_truncated_ones_do() -> None:
    terminated = torch.tensor([True, False])
    target = background.td_target(REWARD, Q, terminated, gamma=0.9)
    loops.close(target, [1.0, -1.0 + 0.9 * 0.5])
    # A truncated episode is not terminated: the flag alone decides.
    loops.close(background.td_target(REWARD, Q, ~terminated, gamma=0.9), [1 + 0.9 * 3, -1.0])
    huge = torch.full_like(Q, torch.inf)
    assert float(background.td_target(REWARD, huge, terminated, gamma=0.9)[0]) == 1.0


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 4),
    horizon=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    gamma=st.floats(0.0, 1.0),
)
def test_n_step_targets_are_the_loops(rows: int, horizon: int, seed: int, gamma: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward_BK = loops.random(rows * horizon, seed).reshape(rows, horizon)
    ended_BK = torch.rand(rows, horizon, generator=generator) < 0.3
    value_B = loops.random(rows, seed + 1)
    steps_B = torch.randint(1, horizon + 1, (rows,), generator=generator)
    actual = background.n_step_target(reward_BK, ended_BK, value_B, gamma=gamma, steps_B=steps_B)
    lists = (x.tolist() for x in (reward_BK, ended_BK, value_B, steps_B))
    expected = [
        loops.n_step_target(rewards, ends, value, gamma, steps)
        for rewards, ends, value, steps in zip(*lists, strict=True)
    ]
    loops.close(actual, expected)
    whole_B = torch.full((rows,), horizon)
    assert torch.equal(
        background.n_step_target(reward_BK, ended_BK, value_B, gamma=gamma, steps_B=whole_B),
        background.n_step_target(reward_BK, ended_BK, value_B, gamma=gamma),
    )


def test_error_and_losses() -> None:
    action, target = loops.ints([2, 0]), loops.tensor([0.5, 3.0])
    error = background.q_error(Q, action, target)
    loops.close(error, [1.5, -2.5])
    loops.close(background.squared_loss(error), [1.125, 3.125])
    loops.close(background.huber(error), [1.0, 2.0])
    loops.close(background.huber(error, threshold=2.0), [1.125, 2.0 * (2.5 - 1.0)])
    edge = loops.tensor([1.0, -1.0])
    loops.close(background.huber(edge), background.squared_loss(edge))


def test_no_gradient_goes_through_the_target() -> None:
    weight = loops.random(6, 1).reshape(2, 3).requires_grad_()
    target_weight = loops.random(6, 2).reshape(2, 3).requires_grad_()
    target = background.td_target(
        REWARD, target_weight * 2, torch.tensor([False, False]), gamma=0.9
    )
    assert not target.requires_grad
    background.q_error(weight, loops.ints([1, 0]), target_weight.max(-1).values).sum().backward()
    assert target_weight.grad is None


def test_target_copies_are_bitwise() -> None:
    online, target = loops.random(50, 1), loops.random(50, 2)
    copied = background.target_update(target, online, rate=1.0)
    assert torch.equal(copied, online)
    assert copied.data_ptr() != online.data_ptr()
    half = background.target_update(target, online, rate=0.25)
    loops.close(half, 0.25 * online + 0.75 * target)
