"""Our estimates against the numbers that rlax publishes for its own.

Inputs and results are those of rlax 0.1.9 (DeepMind), rlax/_src/multistep_test.py and
rlax/_src/value_learning_test.py; the code here is ours. Papers: GAE arXiv:1506.02438; λ-returns
and n-step returns Sutton and Barto 2018 chapters 7 and 12; Q(λ) Peng and Williams 1996;
Q-learning Watkins 1989; double Q-learning arXiv:1509.06461.

rlax takes a discount a step: 0 where the episode terminates, else γ. Ours take one γ, and a
termination as a value of 0 after it and a trace that stops. Where rlax's discounts differ from
step to step, γ is 1 here and the discount d_t goes where our functions take a number a step: into
the value after (d_t V) and into λ (d_t λ), or into the decay of `linear_recurrence`. So
`returns_to_go`, `monte_carlo`, `gae.n_step` and `n_step_target` with more than one reward are not
among the functions called: no γ of theirs can express those numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keel.objective import background, gae, segments

# float32 figures of order 1 after ten operations at most: some roundings of 1e-7 each.
FLOAT32 = 2e-6
# The GAE figures are cut, not rounded: 0.81596 stands there as 0.815, 2.539651 as 2.5396. So one
# may be off by one in its last decimal, the fourth or the third. (rlax itself asks for 1e-3.)
PRINTED = {1.0: 1e-4, 0.7: 1e-4, 0.4: 1e-3}


def real(x: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor, tolerance: float = FLOAT32) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0.0)


# ---------------- GAE, one γ a row: multistep_test.py, TruncatedGeneralizedAdvantageEstimationTest

# Row 0 is one episode that the window cuts off; row 1 has γ = 0.9 and terminates in its fourth
# step, so that a second episode begins after it.
GAE_ROWS = (
    {
        "gamma": 0.99,
        "lengths": [5],
        "reward": [0.0, 0.0, 1.0, 0.0, -0.5],
        "value": [1.0, 4.0, -3.0, -2.0, -1.0],
        "after": [4.0, -3.0, -2.0, -1.0, -1.0],
    },
    {
        "gamma": 0.9,
        "lengths": [4, 1],
        "reward": [0.0, 0.0, 0.0, 0.0, 1.0],
        "value": [-3.0, -2.0, -1.0, 0.0, 5.0],
        "after": [-2.0, -1.0, 0.0, 0.0, -1.0],
    },
)
GAE = {
    1.0: ([-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3.0, 2.0, 1.0, 0.0, -4.9]),
    0.7: ([-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1.0, 0.0, -4.9]),
    0.4: ([0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1.0, 0.0, -4.9]),
}


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("lam", GAE)
def test_truncated_gae(lam: float, row: int) -> None:
    given, gamma = GAE_ROWS[row], GAE_ROWS[row]["gamma"]
    reward_N, value_N, last_state_N = (real(given[k]) for k in ("reward", "value", "after"))
    lengths_S = torch.tensor(given["lengths"])
    delta_N = gae.td_error(reward_N, value_N, last_state_N, gamma=gamma)
    advantage_N = gae.gae(delta_N, segments.continues(lengths_S), gamma=gamma, lam=lam)
    close(advantage_N, real(GAE[lam][row]), PRINTED[lam])
    if lam == 1.0:
        full_N = gae.monte_carlo(reward_N, lengths_S, value_N, last_state_N, gamma=gamma)
        close(full_N, real(GAE[lam][row]), PRINTED[lam])


# ---------------- returns of two trajectories whose discounts vary: multistep_test.py

REWARD = real([[1.0, 0.0, -1.0, 0.0, 1.0], [0.5, 0.8, -0.7, 0.0, 2.1]])
DISCOUNT = real([[0.5, 0.9, 1.0, 0.5, 0.8], [0.9, 0.5, 0.3, 0.8, 0.7]])
AFTER = real([[3.0, 1.0, 5.0, -5.0, 3.0], [-1.7, 1.2, 2.3, 2.2, 2.7]])
# V of the first state is not given, and no return depends on it.
VALUE = torch.cat([real([[7.0], [-7.0]]), AFTER[:, :-1]], dim=1)
LENGTHS = torch.tensor([5, 5])

LAMBDA_RETURNS = real(  # LambdaReturnsTest, λ = 0.75
    [
        [1.6460547, 0.72281253, 0.7375001, 0.6500001, 3.4],
        [0.7866317, 0.9913063, 0.1101501, 2.834, 3.99],
    ]
)
DISCOUNTED_RETURNS = real(  # DiscountedReturnsTest
    [
        [1.315, 0.63000005, 0.70000005, 1.7, 3.4],
        [1.33592, 0.9288, 0.2576, 3.192, 3.9899998],
    ]
)
N_STEP_RETURNS = {  # NStepBootstrappedReturnsTest; a window past the end bootstraps at the end
    3: real([[2.8, -3.15, 0.7, 1.7, 3.4], [1.2155, 0.714, 0.2576, 3.192, 3.99]]),
    5: real([[1.315, 0.63, 0.7, 1.7, 3.4], [1.33592, 0.9288, 0.2576, 3.192, 3.99]]),
    7: real([[1.315, 0.63, 0.7, 1.7, 3.4], [1.33592, 0.9288, 0.2576, 3.192, 3.99]]),
}


def lambda_advantages(
    reward: Tensor, discount: Tensor, value: Tensor, after: Tensor, lam: float
) -> Tensor:
    """Rows of G^λ - V, through our GAE with a λ a step."""
    rows, length = reward.shape
    lengths_S = torch.full((rows,), length)
    delta_N = gae.td_error(
        reward.reshape(-1), value.reshape(-1), (discount * after).reshape(-1), gamma=1.0
    )
    advantage_N = gae.gae(
        delta_N, segments.continues(lengths_S), gamma=1.0, lam=lam * discount.reshape(-1)
    )
    return advantage_N.reshape(rows, length)


@pytest.mark.parametrize(("lam", "expected"), [(0.75, LAMBDA_RETURNS), (1.0, DISCOUNTED_RETURNS)])
def test_lambda_and_discounted_returns(lam: float, expected: Tensor) -> None:
    advantage = lambda_advantages(REWARD, DISCOUNT, VALUE, AFTER, lam)
    return_N = gae.returns(advantage.reshape(-1), VALUE.reshape(-1))
    close(return_N.reshape(2, 5), expected)


def test_discounted_returns_are_a_linear_recurrence() -> None:
    last = ~segments.continues(LENGTHS)
    bootstrap_N = torch.where(last, (DISCOUNT * AFTER).reshape(-1), 0.0)
    return_N = segments.linear_recurrence(
        DISCOUNT.reshape(-1).masked_fill(last, 0.0), REWARD.reshape(-1) + bootstrap_N
    )
    close(return_N.reshape(2, 5), DISCOUNTED_RETURNS)


@pytest.mark.parametrize("steps", N_STEP_RETURNS)
def test_n_step_bootstrapped_returns(steps: int) -> None:
    """`gae.n_step` is this recurrence with one γ for the decay."""
    value_N = VALUE.reshape(-1)
    delta_N = gae.td_error(REWARD.reshape(-1), value_N, (DISCOUNT * AFTER).reshape(-1), gamma=1.0)
    decay_N = DISCOUNT.reshape(-1) * segments.continues(LENGTHS)
    advantage_N = segments.linear_recurrence(decay_N, delta_N, horizon=steps)
    close(gae.returns(advantage_N, value_N).reshape(2, 5), N_STEP_RETURNS[steps])


# ---------------- TD(λ), Sarsa(λ), Q(λ), λ = 0.75, with a termination: value_learning_test.py

TRACE_REWARD = real([[-1.3, -1.3, 2.3], [1.3, 5.3, -3.3]])
TRACE_DISCOUNT = real([[0.0, 0.89, 0.85], [0.88, 1.0, 0.83]])
TRACE_Q = real([[[1.1, 2.1], [-1.1, 1.1], [3.1, -3.1]], [[2.1, 3.1], [-1.1, 0.1], [-2.1, -1.1]]])
TRACE_ACTION = torch.tensor([[0, 1, 0], [1, 0, 0]])
TRACE_NEXT_Q = real(
    [[[1.2, 2.2], [-1.2, 0.2], [2.2, -1.2]], [[4.2, 2.2], [1.2, 1.2], [-1.2, -2.2]]]
)
TRACE_NEXT_ACTION = torch.tensor([[1, 0, 1], [1, 1, 0]])


def taken(q: Tensor, action: Tensor) -> Tensor:
    return q.gather(-1, action[..., None]).squeeze(-1)


def test_td_lambda() -> None:
    value = real([[1.1, -1.1, 3.1], [2.1, -1.1, -2.1]])
    after = torch.cat([value[:, 1:], real([[2.2], [-1.2]])], dim=1)
    expected = real([[-2.4, 3.2732253, 1.0700002], [-0.01701999, 2.6529999, -2.196]])
    close(lambda_advantages(TRACE_REWARD, TRACE_DISCOUNT, value, after, 0.75), expected)


# The errors are of Q(s_t, a_t), but the traces lead through the values after the steps, which are
# of other numbers (a target network's). So these make the target, and Q comes off at the end.
@pytest.mark.parametrize(
    ("after", "expected"),
    [
        # QLambdaTest (Peng's)
        (TRACE_NEXT_Q.max(-1).values, [[-2.4, 0.427975, 1.07], [0.69348, 3.478, -2.196]]),
        # SarsaLambdaTest
        (
            taken(TRACE_NEXT_Q, TRACE_NEXT_ACTION),
            [[-2.4, -1.8126001, -1.8200002], [0.25347996, 3.4780002, -2.196]],
        ),
    ],
    ids=["q", "sarsa"],
)
def test_q_lambda_and_sarsa_lambda(after: Tensor, expected: list[list[float]]) -> None:
    value = torch.cat([real([[0.0], [0.0]]), after[:, :-1]], dim=1)
    advantage = lambda_advantages(TRACE_REWARD, TRACE_DISCOUNT, value, after, 0.75)
    target_B = gae.returns(advantage.reshape(-1), value.reshape(-1))
    error_B = background.q_error(TRACE_Q.reshape(-1, 2), TRACE_ACTION.reshape(-1), target_B)
    # rlax's errors are target less Q, ours Q less target.
    close(-error_B.reshape(2, 3), real(expected))


# ---------------- one step: value_learning_test.py

Q = real([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0]])
ACTION = torch.tensor([0, 1])
ONE_STEP_REWARD = real([1.0, 1.0])
# Discounts of 0 and 1: the first terminates, and γ is 1.
TERMINATED = torch.tensor([True, False])


def test_q_learning_errors() -> None:
    next_q_BA = real([[0.0, 1.0, 0.0], [1.0, 2.0, 0.0]])
    target_B = background.td_target(ONE_STEP_REWARD, next_q_BA, TERMINATED, gamma=1.0)
    assert torch.equal(-background.q_error(Q, ACTION, target_B), real([0.0, 1.0]))
    one_B = background.n_step_target(
        ONE_STEP_REWARD[:, None], TERMINATED[:, None], next_q_BA.max(-1).values, gamma=1.0
    )
    assert torch.equal(-background.q_error(Q, ACTION, one_B), real([0.0, 1.0]))


def test_double_q_learning_errors() -> None:
    target_B = background.double_td_target(
        ONE_STEP_REWARD,
        real([[2.0, 10.0, 1.0], [11.0, 20.0, 1.0]]),
        real([[99.0, 1.0, 98.0], [91.0, 2.0, 66.0]]),
        TERMINATED,
        gamma=1.0,
    )
    assert torch.equal(-background.q_error(Q, ACTION, target_B), real([0.0, 1.0]))


def test_expected_sarsa_errors() -> None:
    q_BA = real([[1.0, 1.0, 0.5], [1.0, 1.0, 3.0]])
    behind_B = background.state_value(
        real([[0.2, 0.5, 0.3], [0.3, 0.4, 0.3]]), real([[1.5, 1.0, 2.0], [3.0, 2.0, 1.0]])
    )
    target_B = gae.td_error(real([4.0, 1.0]), torch.zeros_like(behind_B), behind_B, gamma=1.0)
    close(-background.q_error(q_BA, ACTION, target_B), real([4.4, 2.0]))


# TDLearningTest and QVMaxTest: every reward is -1, every V is 1. Their discounts are 0, 1/2 and 1
# in turn; here each γ takes its own third of the numbers, and 0 is a termination.
BEHIND_V = real([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
BEHIND_Q = real(
    [[0, -1], [-2, 0], [0, -3], [1, 0], [1, 1], [0, 1], [1, 2], [2, -2], [2, 2]],
)
ERRORS = real([-2.0, -2.0, -2.0, -2.0, -1.5, -1.0, -2.0, -1.0, 0.0])


@pytest.mark.parametrize(("third", "gamma"), [(0, 0.9), (1, 0.5), (2, 1.0)])
def test_one_step_errors_of_a_value(third: int, gamma: float) -> None:
    reward_B, value_B = -torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    ends = third == 0
    behind_B = torch.zeros_like(value_B) if ends else BEHIND_V[third::3]
    actual_B = gae.td_error(reward_B, value_B, behind_B, gamma=gamma)
    assert torch.equal(actual_B, ERRORS[third::3])
    target_B = background.td_target(
        reward_B, BEHIND_Q[third::3], torch.full((3,), ends), gamma=gamma
    )
    assert torch.equal(target_B - value_B, ERRORS[third::3])
