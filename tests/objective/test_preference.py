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


def robust_loop(gap: list[float], share: list[float], beta: float, epsilon: float) -> list[float]:
    """The paper's estimate for a label, over the label."""
    out = []
    for h, p in zip(gap, share, strict=True):
        loss = {sign: -log_sigmoid(sign * beta * h) for sign in (1, -1)}
        unbiased = {
            sign: ((1 - epsilon) * loss[sign] - epsilon * loss[-sign]) / (1 - 2 * epsilon)
            for sign in (1, -1)
        }
        out.append(p * unbiased[1] + (1 - p) * unbiased[-1])
    return out


def hinge_loop(gap: list[float], share: list[float], beta: float) -> list[float]:
    return [
        p * max(0.0, 1 - beta * h) + (1 - p) * max(0.0, 1 + beta * h)
        for h, p in zip(gap, share, strict=True)
    ]


def simpo_loop(gap: list[float], share: list[float], beta: float, margin: float) -> list[float]:
    return [
        -p * log_sigmoid(beta * h - margin) - (1 - p) * log_sigmoid(-beta * h - margin)
        for h, p in zip(gap, share, strict=True)
    ]


def orpo_loop(chosen: list[float], rejected: list[float], share: list[float], beta: float) -> Any:
    out = []
    for a, b, p in zip(chosen, rejected, share, strict=True):
        odds = [math.exp(x) / (1 - math.exp(x)) for x in (a, b)]
        ratio = math.log(odds[0] / odds[1])
        out.append(-beta * (p * log_sigmoid(ratio) + (1 - p) * log_sigmoid(-ratio)))
    return out


def kto_loop(ratio: list[float], label: list[float], others: list[float]) -> list[float]:
    point = max(0.0, sum(others) / len(others))
    out = []
    for r, y in zip(ratio, label, strict=True):
        better = 1 / (1 + math.exp(-0.3 * (r - point)))
        worse = 1 / (1 + math.exp(-0.3 * (point - r)))
        out.append(1.3 * y * (1 - better) + 0.8 * (1 - y) * (1 - worse))
    return out


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_robust_is_the_loop(smoothing: float) -> None:
    found = preference.robust(GAP, SHARE, beta=0.3, smoothing=smoothing)
    loops.close(found, robust_loop(GAP.tolist(), SHARE.tolist(), 0.3, smoothing))


def test_robust_is_unbiased_under_turned_labels() -> None:
    """Its mean over labels that are turned with probability ε is the loss of the true label."""
    clean = preference.dpo(GAP, torch.ones_like(GAP), beta=0.3, smoothing=0.0)
    kept, turned = (
        preference.robust(GAP, torch.full_like(GAP, y), beta=0.3, smoothing=0.2) for y in (1.0, 0.0)
    )
    loops.close(0.8 * kept + 0.2 * turned, clean)


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_hinge_and_simpo_are_the_loops(beta: float) -> None:
    gap, share = GAP.tolist(), SHARE.tolist()
    loops.close(preference.hinge(GAP, SHARE, beta=beta), hinge_loop(gap, share, beta))
    found = preference.simpo(GAP, SHARE, beta=beta, margin=0.7)
    loops.close(found, simpo_loop(gap, share, beta, 0.7))


def test_orpo_is_the_loop() -> None:
    chosen, rejected = -CHOSEN.abs() - 0.01, -REJECTED.abs() - 0.01
    gap = preference.log_odds(chosen) - preference.log_odds(rejected)
    found = preference.orpo(gap, SHARE, beta=0.4)
    loops.close(found, orpo_loop(chosen.tolist(), rejected.tolist(), SHARE.tolist(), 0.4))


def test_odds_of_certainty_are_finite() -> None:
    log_prob = torch.tensor([0.0, -1e-12, -800.0], requires_grad=True)
    odds = preference.log_odds(log_prob)
    (gradient,) = torch.autograd.grad(odds.sum(), log_prob)
    assert bool(odds.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert odds[2].item() == -800.0


def test_nll_is_the_mean_over_chosen_tokens() -> None:
    lengths = [3, 5, 2, 4, 1, 6]
    tokens = sum(p * length for p, length in zip(SHARE.tolist(), lengths, strict=True))
    found = preference.chosen_nll(CHOSEN, SHARE, tokens=tokens)
    total = -sum(p * x for p, x in zip(SHARE.tolist(), CHOSEN.tolist(), strict=True)) / tokens
    assert found.sum().item() == pytest.approx(total)


@pytest.mark.parametrize("shift", [2.0, -2.0])
def test_kto_is_the_loop(shift: float) -> None:
    others = (REJECTED + shift).requires_grad_()
    point = preference.reference_point(others)
    assert not point.requires_grad
    assert (point.item() > 0) == (shift > 0)
    found = preference.kto(
        GAP, SHARE, point, beta=0.3, desirable_weight=1.3, undesirable_weight=0.8
    )
    loops.close(found, kto_loop(GAP.tolist(), SHARE.tolist(), others.tolist()))


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
        preference.hinge(score, share, beta=0.1),
        preference.robust(score, share, beta=1.0, smoothing=0.1),
        preference.simpo(score, share, beta=1.0, margin=0.5),
        preference.orpo(score, share, beta=1.0),
        preference.kto(
            score, share, none[0], beta=1.0, desirable_weight=1.0, undesirable_weight=1.0
        ),
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
        gap = (chosen - others[0]) / n - (rejected - others[1]) / m
        loss = preference.ipo(gap, one, beta=case["beta"])
    else:
        gap = (chosen - others[0]) - (rejected - others[1])
        loss = preference.dpo(gap, one, beta=case["beta"], smoothing=case["label_smoothing"])
    same_as_trl(case, loss.mean(), chosen, rejected)
