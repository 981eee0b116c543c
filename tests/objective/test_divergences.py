"""Divergence estimators by their formulas; what they estimate is in test_enumeration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

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
