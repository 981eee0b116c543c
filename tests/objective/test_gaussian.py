"""Diagonal Gaussians against loops, torch.distributions and what defines them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from keel.objective import divergences
from tests.objective import loops

ROWS, WIDTH = 6, 3
MEAN = loops.random(ROWS * WIDTH, 1).reshape(ROWS, WIDTH)
OTHER_MEAN = loops.random(ROWS * WIDTH, 2).reshape(ROWS, WIDTH)
ACTION = loops.random(ROWS * WIDTH, 3, 2.0).reshape(ROWS, WIDTH)
# A deviation of its own in each row, and one for all rows.
LOG_STDS = [loops.random(n * WIDTH, 4, 0.7).reshape(n, WIDTH) for n in (ROWS, 1)]
OTHER_LOG_STDS = [loops.random(n * WIDTH, 5, 0.7).reshape(n, WIDTH) for n in (ROWS, 1)]


def theirs(mean_ND: torch.Tensor, log_std_ND: torch.Tensor) -> Independent:
    return Independent(Normal(mean_ND, log_std_ND.exp().expand_as(mean_ND)), 1)


@pytest.mark.parametrize("other_log_std", OTHER_LOG_STDS)
@pytest.mark.parametrize("log_std", LOG_STDS)
def test_functions_are_the_loop_and_those_of_torch(
    log_std: torch.Tensor, other_log_std: torch.Tensor
) -> None:
    log_prob = divergences.gaussian_log_prob(MEAN, log_std, ACTION)
    entropy = divergences.gaussian_entropy(log_std)
    divergence = divergences.gaussian_kl(MEAN, log_std, OTHER_MEAN, other_log_std)
    assert log_prob.shape == divergence.shape == (ROWS,)
    assert entropy.shape == (len(log_std),)
    loops.close(log_prob, theirs(MEAN, log_std).log_prob(ACTION))
    rows = zip(MEAN.tolist(), log_std.expand_as(MEAN).tolist(), ACTION.tolist(), strict=True)
    loops.close(log_prob, [loops.gaussian_log_prob(*row) for row in rows])
    loops.close(entropy.expand(ROWS), theirs(MEAN, log_std).entropy())
    other = theirs(OTHER_MEAN, other_log_std)
    loops.close(divergence, kl_divergence(theirs(MEAN, log_std), other))
    loops.close(divergences.gaussian_kl(MEAN, log_std, MEAN, log_std), [0.0] * ROWS)


def test_a_narrow_policy_far_from_the_action_stays_finite() -> None:
    mean, action = torch.zeros(1, 1), torch.full((1, 1), 3.0)
    log_std = torch.full((1, 1), -20.0)
    # float32: σ² = e^-40 is a number yet, and so is (3/σ)²; 1e-6 is a few of its roundings.
    expected = -0.5 * 9 * math.exp(40) + 20 - 0.5 * math.log(2 * math.pi)
    actual = float(divergences.gaussian_log_prob(mean, log_std, action))
    assert actual == pytest.approx(expected, rel=1e-6)
    assert torch.isfinite(divergences.gaussian_kl(mean, log_std, action, log_std)).all()
