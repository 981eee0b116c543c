"""Losses of comparisons: float64 loops written apart, TRL's numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.objective import preference
from tests.objective import loops

C = 6
CHOSEN, REJECTED = loops.random(C, 1, 2.0), loops.random(C, 2, 2.0)
MARGIN = loops.random(C, 3).abs()
SHARE = loops.tensor([1.0, 0.0, 0.5, 0.8, 0.3, 1.0])
GAP = loops.random(C, 4, 3.0)
TRL = json.loads((Path(__file__).parent / "trl_preferences.json").read_text(encoding="utf-8"))
TRL_TOLERANCE = 1e-12
"""Both sides work in float64 on the same numbers; losses are of order 10."""


# ---------------------------------------------------------------- loops


def log_sigmoid(x: float) -> float:
    """log of 1 / (1 + e^−x), for moderate x."""
    return math.log(1.0 / (1.0 + math.exp(-x)))


def bradley_terry_loop(
    chosen: list[float], rejected: list[float], share: list[float], margin: list[float]
) -> list[float]:
    out = []
    for r_c, r_r, p, m in zip(chosen, rejected, share, margin, strict=True):
        won, lost = r_c - r_r - m, r_r - r_c - m
        out.append(-p * log_sigmoid(won) - (1 - p) * log_sigmoid(lost))
    return out


def dpo_loop(gap: list[float], share: list[float], beta: float, epsilon: float) -> list[float]:
    out = []
    for h, p in zip(gap, share, strict=True):
        believed = p * (1 - epsilon) + (1 - p) * epsilon
        right = 1.0 / (1.0 + math.exp(-beta * h))
        out.append(-(believed * math.log(right) + (1 - believed) * math.log(1 - right)))
    return out


def ipo_loop(gap: list[float], share: list[float], beta: float) -> list[float]:
    out = []
    for h, p in zip(gap, share, strict=True):
        above, below = h - 0.5 / beta, h + 0.5 / beta
        out.append(p * above * above + (1 - p) * below * below)
    return out


def test_bradley_terry_is_the_loop() -> None:
    found = preference.bradley_terry(CHOSEN, REJECTED, SHARE, MARGIN)
    lists = (x.tolist() for x in (CHOSEN, REJECTED, SHARE, MARGIN))
    loops.close(found, bradley_terry_loop(*lists))


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_dpo_is_the_loop(beta: float, smoothing: float) -> None:
    found = preference.dpo(GAP, SHARE, beta=beta, smoothing=smoothing)
    loops.close(found, dpo_loop(GAP.tolist(), SHARE.tolist(), beta, smoothing))


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_ipo_is_the_loop(beta: float) -> None:
    loops.close(preference.ipo(GAP, SHARE, beta=beta), ipo_loop(GAP.tolist(), SHARE.tolist(), beta))


def test_label_cross_entropy_is_the_softmax_of_two_classes() -> None:
    """Of the logits (0, z) against the distribution (1 − y, y)."""
    two = torch.stack([torch.zeros_like(GAP), GAP], dim=1)
    target = torch.stack([1 - SHARE, SHARE], dim=1)
    expected = torch.nn.functional.cross_entropy(two, target, reduction="none")
    loops.close(preference.label_cross_entropy(GAP, SHARE), expected)


# ---------------------------------------------------------------- far out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [500.0, -500.0])
def test_far_scores_stay_finite_in_loss_and_gradient(far: float, dtype: torch.dtype) -> None:
    score = torch.full((3,), far, dtype=dtype, requires_grad=True)
    share = torch.tensor([1.0, 0.5, 0.0], dtype=dtype)
    none = torch.zeros(3, dtype=dtype)
    losses = [
        preference.bradley_terry(score, none, share, none),
        preference.bradley_terry(none, score, share, none),
        preference.label_cross_entropy(score, share),
        preference.dpo(score, share, beta=1.0, smoothing=0.0),
        preference.ipo(score, share, beta=0.1),
        preference.centering(score, none),
    ]
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss.sum(), score)
        assert bool(loss.isfinite().all())
        assert bool(gradient.isfinite().all())
    # Wrong by 500 costs 500, whichever way round; right costs nothing that float can say.
    right, wrong = (0, 2) if far > 0 else (2, 0)
    for loss in (losses[0], losses[2], losses[3]):
        assert loss[wrong].item() == pytest.approx(500.0)
        assert loss[right].item() == pytest.approx(0.0, abs=1e-30)
        assert loss[1].item() == pytest.approx(250.0)


# ---------------------------------------------------------------- TRL's own trainers


def leaf(values: list[float]) -> Tensor:
    return loops.tensor(values).requires_grad_()


def same_as_trl(case: dict[str, Any], loss: Tensor, chosen: Tensor, rejected: Tensor) -> None:
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=TRL_TOLERANCE)
    assert chosen.grad is not None
    assert rejected.grad is not None
    loops.close(chosen.grad, case["chosen_gradient"], TRL_TOLERANCE)
    loops.close(rejected.grad, case["rejected_gradient"], TRL_TOLERANCE)


@pytest.mark.parametrize("case", TRL["reward"])
def test_reward_losses_are_trls(case: dict[str, Any]) -> None:
    chosen, rejected = leaf(case["chosen"]), leaf(case["rejected"])
    one = torch.ones_like(chosen)
    loss = preference.bradley_terry(chosen, rejected, one, loops.tensor(case["margins"])).mean()
    if case["centering"] is not None:
        loss = loss + case["centering"] * preference.centering(chosen, rejected).mean()
    same_as_trl(case, loss, chosen, rejected)


@pytest.mark.parametrize("case", TRL["dpo"])
def test_dpo_losses_are_trls(case: dict[str, Any]) -> None:
    chosen, rejected = leaf(case["chosen"]), leaf(case["rejected"])
    others = loops.tensor(case["reference_chosen"]), loops.tensor(case["reference_rejected"])
    one = torch.ones_like(chosen)
    if case["loss_type"] == "ipo":
        n, m = loops.tensor(case["chosen_lengths"]), loops.tensor(case["rejected_lengths"])
        gap = preference.log_ratio_gap(chosen / n, rejected / m, others[0] / n, others[1] / m)
        loss = preference.ipo(gap, one, beta=case["beta"])
    else:
        gap = preference.log_ratio_gap(chosen, rejected, *others)
        loss = preference.dpo(gap, one, beta=case["beta"], smoothing=case["label_smoothing"])
    same_as_trl(case, loss.mean(), chosen, rejected)
