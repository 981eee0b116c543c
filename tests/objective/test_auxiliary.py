"""Auxiliary terms against loops written apart, with their gradients."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.objective import auxiliary
from tests.objective import loops

SIZES = st.integers(1, 12)


@given(size=SIZES, seed=st.integers(0, 1000))
def test_uncertainty_weighs_the_log_probability_without_gradient(size: int, seed: int) -> None:
    log_prob_M = -loops.random(size, seed).abs()
    leaf = log_prob_M.clone().requires_grad_()
    found = auxiliary.uncertain(leaf)
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    probs = [math.exp(x) for x in log_prob_M.tolist()]
    loops.close(found.detach(), [p * (1 - p) * math.log(p) for p in probs])
    loops.close(grad, [p * (1 - p) for p in probs])


@given(size=SIZES, seed=st.integers(0, 1000))
def test_only_tokens_of_right_answers_count(size: int, seed: int) -> None:
    log_prob_N, outcome_N = -loops.random(size, seed).abs(), loops.random(size, seed + 1)
    outcome_N[0] = math.nan
    leaf = log_prob_N.clone().requires_grad_()
    found = auxiliary.of_right(leaf, outcome_N, threshold=0.3)
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    pairs = list(zip(log_prob_N.tolist(), outcome_N.tolist(), strict=True))
    loops.close(found.detach(), [x if r > 0.3 else 0.0 for x, r in pairs])
    loops.close(grad, [1.0 if r > 0.3 else 0.0 for _, r in pairs])
