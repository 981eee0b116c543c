"""Divergence estimators (what they estimate is in test_enumeration) and Gaussians, by formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from keel.objective import divergences
from tests.objective import loops

NEW, OTHER = loops.random(20, 1), loops.random(20, 2)
DELTA = (NEW - OTHER).tolist()


def test_formulas() -> None:
    loops.close(divergences.k1(NEW, OTHER), DELTA)
    loops.close(divergences.k2(NEW, OTHER), [d * d / 2 for d in DELTA])
    loops.close(divergences.k3(NEW, OTHER), [math.exp(-d) + d - 1 for d in DELTA])
    loops.close(divergences.absolute(NEW, OTHER), [abs(d) for d in DELTA])
    loops.close(divergences.old_to_policy(NEW, OTHER), [math.exp(d) - d - 1 for d in DELTA])
    loops.close(
        divergences.policy_to_old(NEW, OTHER), [math.exp(d) * d - (math.exp(d) - 1) for d in DELTA]
    )
    loops.close(
        divergences.weighted(divergences.k1(NEW, OTHER), NEW, OTHER),
        [math.exp(d) * d for d in DELTA],
    )
    assert all((estimator(NEW, NEW) == 0).all() for estimator in ESTIMATORS)


def test_k3_keeps_its_digits_near_zero_and_stays_finite_far_away() -> None:
    """d = 1e-3 in float32: ½d² = 5e-7, where e^{−d} + d − 1 taken literally has no digit right."""
    zero = torch.zeros(1)
    near = divergences.k3(torch.tensor([1e-3]), zero)
    assert near.item() == pytest.approx(5e-7, rel=1e-3)
    for distance in (50.0, -50.0, 500.0, -500.0):
        far = torch.tensor([distance], requires_grad=True)
        for function in (divergences.k3, divergences.old_to_policy, divergences.policy_to_old):
            value = function(far, zero)
            (slope,) = torch.autograd.grad(value.sum(), far)
            assert value.isfinite().all()
            assert slope.isfinite().all()


ESTIMATORS = (
    divergences.k1,
    divergences.k2,
    divergences.k3,
    divergences.absolute,
    divergences.old_to_policy,
    divergences.policy_to_old,
)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_beyond_the_bound_an_estimator_is_constant_and_its_gradient_zero(estimator: Any) -> None:
    """Within ±20 the gradient has the sign of a finite difference, beyond it is exactly 0."""
    distance = torch.tensor([-50, -21, -19, -1, 1, 19, 21, 50], dtype=torch.float64)
    distance.requires_grad_()
    zero = torch.zeros_like(distance)
    value = estimator(distance, zero)
    (slope,) = torch.autograd.grad(value.sum(), distance)
    inside = distance.detach().abs() <= 20
    assert slope[~inside].tolist() == [0.0] * 4
    at = distance.detach()
    nudged = (estimator(at + 1e-4, zero) - estimator(at - 1e-4, zero)) / 2e-4
    assert slope.tolist() == pytest.approx(nudged.tolist(), rel=1e-5)
    assert value[0] == value[1]
    assert value[6] == value[7]


@pytest.mark.parametrize("estimator", [divergences.k1, divergences.k3])
def test_a_weighted_estimate_is_constant_where_its_ratio_is(estimator: Any) -> None:
    new = torch.tensor([25.0, 19.0, -25.0], dtype=torch.float64, requires_grad=True)
    old, reference = torch.zeros_like(new), torch.tensor([27.0, 21.0, -20.0]).double()

    def total(x: torch.Tensor) -> torch.Tensor:
        return divergences.weighted(estimator(x, reference), x, old)

    (slope,) = torch.autograd.grad(total(new).sum(), new)
    assert slope[0] == slope[2] == 0.0
    at = new.detach()
    nudged = (total(at + 1e-5) - total(at - 1e-5)) / 2e-5
    assert slope[1].item() == pytest.approx(nudged[1].item(), rel=1e-6)


def test_full_is_the_sum_over_the_vocabulary() -> None:
    logits, reference = loops.random(12, 1).reshape(3, 4), loops.random(12, 2).reshape(3, 4)
    expected = []
    for row, other in zip(logits.tolist(), reference.tolist(), strict=True):
        z, y = sum(map(math.exp, row)), sum(map(math.exp, other))
        expected.append(
            sum(
                math.exp(a) / z * (a - math.log(z) - b + math.log(y))
                for a, b in zip(row, other, strict=True)
            )
        )
    loops.close(divergences.full(logits, reference), expected)
    loops.close(divergences.full(logits.log_softmax(-1), reference.log_softmax(-1)), expected)


def test_a_token_that_is_ruled_out_adds_nothing_to_full() -> None:
    logits = torch.tensor([[0.3, -0.2, -torch.inf]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[0.1, 0.4, -torch.inf]], dtype=torch.float64)
    value = divergences.full(logits, reference)
    loops.close(value, divergences.full(logits[:, :2], reference[:, :2]))
    (slope,) = torch.autograd.grad(value.sum(), logits)
    assert slope.isfinite().all()
    free = torch.tensor([[0.1, 0.4, 2.0]], dtype=torch.float64)
    assert divergences.full(free, reference).item() == math.inf


def test_adaptive_coefficients() -> None:
    for kl, beta in [(1.6, 4.0), (1.4, 2.0), (1.0, 2.0), (0.7, 2.0), (0.6, 1.0)]:
        assert divergences.adapt_ppo(2.0, kl, target=1.0) == beta
    options = {"target": 2.0, "horizon": 100.0, "sequences": 10}
    assert divergences.adapt_ziegler(1.0, 2.2, **options) == pytest.approx(1.01)
    assert divergences.adapt_ziegler(1.0, 9.0, **options) == pytest.approx(1.02)
    assert divergences.adapt_ziegler(1.0, 0.0, **options) == pytest.approx(0.98)
    assert divergences.adapt_ziegler(3.0, 2.0, **options) == 3.0
    bounds = {"target": 0.5, "delta": 0.25, "maximum": 0.5}
    for entropy, before, after in [
        (0.5, 0.0, 0.25), (0.4, 0.25, 0.5), (0.4, 0.5, 0.5), (0.6, 0.5, 0.25), (0.6, 0.125, 0.0)
    ]:  # fmt: skip
        assert divergences.adapt_entropy(before, entropy, **bounds) == after


# ---------------- diagonal Gaussians, against a loop and torch.distributions

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


def test_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 0.0, -1.0]], dtype=torch.float64)
    p = logits[1].softmax(-1).tolist()
    expected = [math.log(4), -sum(x * math.log(x) for x in p)]
    loops.close(divergences.entropy(logits), expected)
    ruled_out = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    out = divergences.entropy(ruled_out)
    (slope,) = torch.autograd.grad(out.sum(), ruled_out)
    loops.close(out, [math.log(2)])
    loops.close(slope, torch.zeros(1, 3))
